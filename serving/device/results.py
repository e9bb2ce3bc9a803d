"""What a dispatch gave, as the scheduler reads it: arrays of the device become lists by row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from minimax_jax.sampling import TokenLogprobs
from serving.device.arrays import Resident, num_scored, reports_logprobs
from serving.device.drafts import Drafted
from serving.device.sampler import BROKEN, NO_TOKEN, Sampled
from serving.device.speculative_step import Committed
from serving.scheduling.plan import PrefillRow, RankResult, RowLogprobs, StepResult


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one program gave that is wanted, on its way to the host; None is not wanted."""

    tokens: Any  # [B], or [k, B] of a speculative step
    logprobs: TokenLogprobs | None
    prompts: TokenLogprobs | None = None
    drafted: Drafted | None = None

    @classmethod
    def of(
        cls,
        sampled: Sampled | Committed,
        *,
        logprobs: bool,
        prompts: TokenLogprobs | None = None,
        drafted: Drafted | None = None,
    ) -> "Taken":
        """Begins to copy it to the host."""
        taken = cls(
            tokens=sampled.tokens,
            logprobs=sampled.logprobs if logprobs else None,
            prompts=prompts,
            drafted=drafted,
        )
        for leaf in taken.leaves():
            leaf.copy_to_host_async()
        return taken

    def leaves(self) -> list[jax.Array]:
        """All arrays."""
        return jax.tree.leaves((self.tokens, self.logprobs, self.prompts, self.drafted))

    def fetched(self) -> "Taken":
        """The same in numpy arrays; waits for them."""
        return Taken(**jax.device_get(vars(self)))

    def by_place(self) -> list["Taken"]:
        """The tokens of each place by themselves, once they are on the host."""
        if self.tokens.ndim == 1:
            return [self]
        return [
            Taken(tokens=row, logprobs=jax.tree.map(lambda x, k=k: x[k], self.logprobs))
            for k, row in enumerate(self.tokens)
        ]


@dataclass(frozen=True, kw_only=True)
class Survivals:
    """What the head's logits mean: the probability that a draft is kept together with those before
    it, by calibrated temperatures; of the first `num_drafts`, which are all that are ever tested.
    """

    temperatures: Sequence[float]
    num_drafts: int

    def cut(self, drafts: np.ndarray) -> list[int]:
        """The drafts that may be tested."""
        return drafts[: self.num_drafts].tolist()

    def of(self, confidence: np.ndarray) -> list[float]:
        """As `minimax_jax.speculative.budget.survivals`, of one row on the host; NaN is 0."""
        wanted = np.nan_to_num(confidence[: self.num_drafts].astype(np.float32), nan=-np.inf)
        scaled = wanted / np.asarray(self.temperatures, np.float32)[: self.num_drafts]
        with np.errstate(over="ignore"):
            return np.cumprod(1 / (1 + np.exp(-scaled))).tolist()


@dataclass(frozen=True, kw_only=True)
class PrefillPart:
    """One program's share of a step's chunks: which rows of the plan, where each one's tiles
    begin, and whose they are.
    """

    indices: Sequence[int]
    rows: Sequence[PrefillRow]
    places: Sequence[int]
    residents: Sequence[Resident]
    taken: Taken


@dataclass(frozen=True, kw_only=True)
class DecodePart:
    """One program's share of a step's decode rows, one `Taken` a device step."""

    indices: Sequence[int]
    residents: Sequence[Resident]
    taken: Sequence[Taken]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A step on the device."""

    step_id: int
    num_prefills: int
    num_decodes: int
    prefills: Sequence[PrefillPart]
    decodes: Sequence[DecodePart]
    survivals: Survivals | None  # None without a drafter

    def result(self) -> StepResult:
        """What it gave; waits for it."""
        result = RankResult(
            prefills=[[] for _ in range(self.num_prefills)],
            decodes=[[] for _ in range(self.num_decodes)],
        )
        broken: set[int] = set()
        for part in self.prefills:
            taken = part.taken.fetched()
            self._take(part, [taken], result.prefills, result, broken)
            result.prompt_logprobs.update(_scores(part, taken))
        for part in self.decodes:
            taken = [one.fetched() for one in part.taken]
            self._take(part, taken, result.decodes, result, broken)
        result = replace(result, broken=frozenset(broken))
        return StepResult(step_id=self.step_id, ranks=[result])

    def _take(
        self,
        part: PrefillPart | DecodePart,
        taken: Sequence[Taken],
        tokens: list[list[int]],
        result: RankResult,
        broken: set[int],
    ) -> None:
        """Adds a part's rows to the result."""
        places = [place for one in taken for place in one.by_place()]
        drafted = taken[-1].drafted
        for row, index in enumerate(part.indices):
            resident = part.residents[row]
            _take_row(resident, row, places, tokens[index], broken, result.logprobs)
            if drafted is not None and tokens[index] and self.survivals is not None:
                slot = resident.admission.slot
                result.drafts[slot] = self.survivals.cut(np.asarray(drafted.tokens[row]))
                if drafted.confidence is not None:
                    result.confidences[slot] = self.survivals.of(
                        np.asarray(drafted.confidence[row])
                    )


def _take_row(
    resident: Resident,
    row: int,
    steps: Sequence[Taken],
    tokens: list[int],
    broken: set[int],
    logprobs: dict[int, RowLogprobs],
) -> None:
    """Adds one row's tokens of some device steps to `tokens`, and what else they say of it."""
    slot, places = resident.admission.slot, []
    for step in steps:
        token = int(step.tokens[row])
        if token == BROKEN:
            broken.add(slot)
        if token in (BROKEN, NO_TOKEN):
            break
        tokens.append(token)
        places.append((step.logprobs, row))
    top = resident.admission.sampling.logprobs
    if reports_logprobs(resident) and places:
        assert top is not None
        logprobs[slot] = _row_logprobs(places, top)


def _scores(part: PrefillPart, taken: Taken) -> Iterator[tuple[int, RowLogprobs]]:
    """The prompts' own log-probabilities by slot, where they are wanted."""
    for row, place, resident in zip(part.rows, part.places, part.residents, strict=True):
        count, top = num_scored(row, resident), resident.admission.sampling.prompt_logprobs
        if count and top is not None:
            yield row.slot, _row_logprobs([(taken.prompts, place + i) for i in range(count)], top)


def _row_logprobs(places: Sequence[tuple[TokenLogprobs | None, int]], top: int) -> RowLogprobs:
    values, top_ids, top_values = [], [], []
    for found, place in places:
        assert found is not None
        values.append(float(found.chosen[place]))
        top_ids.append(np.asarray(found.top_tokens[place])[:top].tolist())
        top_values.append(np.asarray(found.top[place])[:top].tolist())
    return RowLogprobs(values=values, top_ids=top_ids, top_values=top_values)
