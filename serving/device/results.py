"""What a dispatch gave, as the scheduler reads it: arrays of the device become lists by row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from minimax_jax.sampling import TokenLogprobs
from serving.device.arrays import Resident, num_scored, reports_logprobs
from serving.device.drafts import Drafted
from serving.device.routing_records import RoutingRecords
from serving.device.sampler import BROKEN
from serving.device.taken import Taken, as_lists
from serving.scheduling.plan import PrefillRow, RankResult, RowLogprobs, StepResult


@dataclass(frozen=True, kw_only=True)
class Survivals:
    """What the head's logits mean: the probability that a draft is kept together with those before
    it, by calibrated temperatures; of the first `num_drafts`, which are all that are ever tested.
    """

    temperatures: Sequence[float]
    num_drafts: int

    def cut(self, drafts: np.ndarray) -> list[list[int]]:
        """The drafts of each row that may be tested."""
        return drafts[:, : self.num_drafts].tolist()

    def of(self, confidence: np.ndarray) -> list[list[float]]:
        """As `minimax_jax.speculative.budget.survivals`, of rows on the host; NaN is 0."""
        wanted = confidence[:, : self.num_drafts].astype(np.float32)
        scaled = np.nan_to_num(wanted, nan=-np.inf)
        scaled /= np.asarray(self.temperatures, np.float32)[: self.num_drafts]
        with np.errstate(over="ignore"):
            return np.cumprod(1 / (1 + np.exp(-scaled)), axis=-1).tolist()


class Seat(NamedTuple):
    """A row of a plan and where it is: its rank, its index there, its row in the program, and whose
    it is.
    """

    rank: int
    index: int
    row: int
    resident: Resident

    @property
    def slot(self) -> int:
        """Its slot on its rank."""
        return self.resident.admission.slot


@dataclass(frozen=True, kw_only=True)
class PrefillPart:
    """One program's share of a step's chunks: which, and where each one's tiles begin."""

    seats: Sequence[Seat]
    rows: Sequence[PrefillRow]
    places: Sequence[int]
    taken: Taken


@dataclass(frozen=True, kw_only=True)
class DecodePart:
    """One program's share of a step's decode rows, one `Taken` a device step."""

    seats: Sequence[Seat]
    taken: Sequence[Taken]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A step on the device."""

    step_id: int
    num_rows: Sequence[tuple[int, int]]  # chunks and decode rows of each data rank
    prefills: Sequence[PrefillPart]
    decodes: Sequence[DecodePart]
    survivals: Survivals | None  # None without a drafter
    records: RoutingRecords | None  # None unless they are kept

    def result(self) -> StepResult:
        """What it gave; waits for it."""
        results = [
            RankResult(prefills=[[]] * prefills, decodes=[[]] * decodes)
            for prefills, decodes in self.num_rows
        ]
        broken: list[set[int]] = [set() for _ in results]
        for part in self.prefills:
            taken = self._fetched(part.taken)
            for seat, tokens in self._take(part.seats, [taken], results, broken):
                results[seat.rank].prefills[seat.index] = tokens
            _add_scores(part, taken.prompts, results)
        for part in self.decodes:
            taken = [self._fetched(one) for one in part.taken]
            for seat, tokens in self._take(part.seats, taken, results, broken):
                results[seat.rank].decodes[seat.index] = tokens
        ranks = [
            replace(result, broken=frozenset(own))
            for result, own in zip(results, broken, strict=True)
        ]
        return StepResult(step_id=self.step_id, ranks=ranks)

    def _fetched(self, taken: Taken) -> Taken:
        """What a program gave, on the host; its experts are written down there."""
        found = taken.fetched()
        if found.routes is not None:
            assert self.records is not None
            self.records.write(found.routes)
        return found

    def _take(
        self,
        seats: Sequence[Seat],
        taken: Sequence[Taken],
        results: Sequence[RankResult],
        broken: Sequence[set[int]],
    ) -> Iterator[tuple[Seat, list[int]]]:
        """The tokens of each seat; what else is said of them goes to the results."""
        top = max((seat.resident.admission.sampling.logprobs or 0 for seat in seats), default=0)
        places = [place for one in taken for place in one.places(top)]
        logprobs = [place.logprobs for place in places if place.logprobs is not None]
        columns = list(zip(*(place.tokens for place in places), strict=True))
        drafts, confidences = self._drafts(taken[-1].drafted)
        for seat in seats:
            column, slot, result = columns[seat.row], seat.slot, results[seat.rank]
            tokens = list(column) if min(column) >= 0 else _up_to_the_end(column)
            if len(tokens) < len(column) and column[len(tokens)] == BROKEN:
                broken[seat.rank].add(slot)
            yield seat, tokens
            if not tokens:
                continue
            if reports_logprobs(seat.resident):
                result.logprobs[slot] = _row_logprobs(logprobs[: len(tokens)], seat)
            if drafts is not None:
                result.drafts[slot] = drafts[seat.row]
            if confidences is not None:
                result.confidences[slot] = confidences[seat.row]

    def _drafts(
        self, drafted: Drafted | None
    ) -> tuple[list[list[int]] | None, list[list[float]] | None]:
        """The next drafts of all rows, and what they are expected to survive."""
        if drafted is None or self.survivals is None:
            return None, None
        drafts = self.survivals.cut(np.asarray(drafted.tokens))
        if drafted.confidence is None:
            return drafts, None
        return drafts, self.survivals.of(np.asarray(drafted.confidence))


def _up_to_the_end(column: Sequence[int]) -> list[int]:
    return list(takewhile(lambda token: token >= 0, column))


def _add_scores(
    part: PrefillPart, prompts: TokenLogprobs | None, results: Sequence[RankResult]
) -> None:
    """The prompts' own log-probabilities by slot, where they are wanted."""
    if prompts is None:
        return
    asked = (seat.resident.admission.sampling.prompt_logprobs or 0 for seat in part.seats)
    scores = as_lists(prompts, max(asked))
    for row, first, seat in zip(part.rows, part.places, part.seats, strict=True):
        count = num_scored(row, seat.resident)
        if count:
            own = slice(first, first + count)
            results[seat.rank].prompt_logprobs[seat.slot] = RowLogprobs(
                values=scores.values[own],
                top_ids=scores.top_ids[own],
                top_values=scores.top_values[own],
            )


def _row_logprobs(places: Sequence[RowLogprobs], seat: Seat) -> RowLogprobs:
    """A row's own of some places, as many of the likeliest as its sequence wants."""
    top, row = seat.resident.admission.sampling.logprobs, seat.row
    values, top_ids, top_values = [], [], []
    for all_values, all_ids, all_top_values in places:
        values.append(all_values[row])
        top_ids.append(all_ids[row])
        top_values.append(all_top_values[row])
    if len(top_ids[0]) != top:
        top_ids, top_values = [ids[:top] for ids in top_ids], [some[:top] for some in top_values]
    return RowLogprobs(values, top_ids, top_values)
