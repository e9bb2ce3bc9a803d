"""What a dispatch gave, as the scheduler reads it: arrays of the device become lists by row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from minimax_jax.sampling import TokenLogprobs
from serving.device.arrays import Resident, num_scored, reports_logprobs
from serving.device.sampler import BROKEN, NO_TOKEN, Sampled
from serving.scheduling.plan import PrefillRow, RankResult, RowLogprobs, StepResult


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one program gave that is wanted, on its way to the host; None is not wanted."""

    tokens: jax.Array
    logprobs: TokenLogprobs | None
    prompts: TokenLogprobs | None = None

    @classmethod
    def of(
        cls, sampled: Sampled, *, logprobs: bool, prompts: TokenLogprobs | None = None
    ) -> "Taken":
        """Begins to copy it to the host."""
        assert isinstance(sampled.tokens, jax.Array)
        taken = cls(
            tokens=sampled.tokens,
            logprobs=sampled.logprobs if logprobs else None,
            prompts=prompts,
        )
        for leaf in taken.leaves():
            leaf.copy_to_host_async()
        return taken

    def leaves(self) -> list[jax.Array]:
        """All arrays."""
        return jax.tree.leaves((self.tokens, self.logprobs, self.prompts))

    def fetched(self) -> "Taken":
        """The same in numpy arrays; waits for them."""
        return Taken(**jax.device_get(vars(self)))


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

    def result(self) -> StepResult:
        """What it gave; waits for it."""
        prefills: list[list[int]] = [[] for _ in range(self.num_prefills)]
        decodes: list[list[int]] = [[] for _ in range(self.num_decodes)]
        broken: set[int] = set()
        logprobs: dict[int, RowLogprobs] = {}
        prompt_logprobs: dict[int, RowLogprobs] = {}
        for part in self.prefills:
            taken = part.taken.fetched()
            for row, index in enumerate(part.indices):
                _take_row(part.residents[row], row, [taken], prefills[index], broken, logprobs)
            prompt_logprobs |= _scores(part, taken)
        for part in self.decodes:
            steps = [taken.fetched() for taken in part.taken]
            for row, index in enumerate(part.indices):
                _take_row(part.residents[row], row, steps, decodes[index], broken, logprobs)
        result = RankResult(
            prefills=prefills,
            decodes=decodes,
            broken=frozenset(broken),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return StepResult(step_id=self.step_id, ranks=[result])


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
