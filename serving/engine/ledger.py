"""The engine's sequences by name and by slot, and what is counted of them; but for `take_records`
and `publish` all is for the engine's thread alone.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain

from serving.engine.sequence import Sequence
from serving.kv_feed import KvFeed
from serving.scheduling.kv_events import KvEvent
from serving.scheduling.plan import RankPlan, RankResult, StepPlan, StepResult
from serving.scheduling.scheduler import Scheduler
from serving.statistics import SequenceRecord, Statistics, StepRecord


class Ledger:
    """Who is where, and the statistics."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.statistics = Statistics()
        self.statistics.accepted_at = [0] * scheduler.config.num_speculative_tokens
        self.listens = False  # whether anyone wants records
        self.num_grammars = 0  # sequences that have one
        self._by_name: dict[tuple[str, int], Sequence] = {}
        self._by_slot: list[dict[int, Sequence]] = [{} for _ in scheduler.ranks]
        self._records: deque[StepRecord | SequenceRecord] = deque()
        self._kv_events: deque[tuple[int, list[KvEvent]]] = deque()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_name.values())

    # ---- sequences

    def add(self, sequence: Sequence) -> None:
        """Begins to keep a sequence."""
        request = sequence.request
        self._by_name[request.request_id, request.index] = sequence
        request.owner = sequence
        self.num_grammars += sequence.grammar is not None

    def at(self, rank: int, slot: int) -> Sequence:
        """The sequence that a slot has, or had last."""
        return self._by_slot[rank][slot]

    def admitted(self, plan: StepPlan) -> None:
        """Notes which sequences came into which slots."""
        now = time.monotonic()
        for rank, part in enumerate(plan.ranks):
            for admission in part.admissions:
                sequence = self._by_name[admission.request_id, admission.index]
                sequence.enter(rank, admission.slot, now)
                self._by_slot[rank][admission.slot] = sequence

    def remove(self, sequence: Sequence, now: float) -> None:
        """Counts a sequence's end and forgets it."""
        assert sequence.end is not None
        request, statistics = sequence.request, self.statistics
        del self._by_name[request.request_id, request.index]
        request.owner = None
        self.num_grammars -= sequence.grammar is not None
        statistics.finished[sequence.end.reason] += 1
        if request.index == 0:
            statistics.prompt_tokens += request.prompt_length
        if self.listens:
            self._records.append(sequence.record(now))

    # ---- steps

    def score_prompts(self, plan: StepPlan, result: StepResult) -> None:
        """Hands the log-probabilities of chunks to their sequences."""
        for rank, (part, given) in enumerate(zip(plan.ranks, result.ranks, strict=True)):
            if given.prompt_logprobs:
                for row in part.prefills:
                    scores = given.prompt_logprobs.get(row.slot)
                    if scores is not None:
                        self.at(rank, row.slot).score_prompt(row.start, scores)

    def count_step(self, plan: StepPlan, result: StepResult) -> list[tuple[int, int]]:
        """Counts a dispatch; of each row with drafts how many were tested and how many kept."""
        statistics = self.statistics
        statistics.steps += 1
        statistics.preemptions = self._scheduler.room.num_preemptions
        statistics.prefix_queries = self._scheduler.admission.prefix_queries
        statistics.prefix_hits = self._scheduler.admission.prefix_hits
        if not statistics.accepted_at:
            return []
        outcomes = list(chain.from_iterable(map(_outcomes, plan.ranks, result.ranks)))
        statistics.drafts += len(outcomes)
        for (tested, kept), rows in Counter(outcomes).items():
            statistics.draft_tokens += rows * tested
            statistics.accepted_tokens += rows * kept
            for place in range(kept):
                statistics.accepted_at[place] += rows
        return outcomes

    def count_tokens(
        self, plan: StepPlan, settled: Iterable[tuple[Sequence, list[int]]], now: float
    ) -> None:
        """Notes for listeners when sequences got tokens."""
        firsts, gaps = [], []
        for one, tokens in settled:
            if not tokens:
                continue
            if one.last_token is None:
                one.first_token = now
                firsts.append(now - one.arrival)
            else:
                gaps.append(now - one.last_token)
            one.last_token = now
        self._records.append(
            StepRecord(num_tokens=_num_tokens(plan), first_token_s=firsts, inter_token_s=gaps)
        )

    def note_kv_events(self) -> None:
        """Takes what happened to the blocks."""
        for rank, own in enumerate(self._scheduler.ranks):
            if own.pages.events is not None and (events := own.pages.events.take()):
                self._kv_events.append((rank, events))

    # ---- what the event loop takes

    @property
    def has_news(self) -> bool:
        """Whether the loop has something to take."""
        return bool(self._records or self._kv_events)

    def take_records(self) -> Iterator[StepRecord | SequenceRecord]:
        """What listeners have to be told."""
        while self._records:
            yield self._records.popleft()

    def publish(self, feed: KvFeed) -> None:
        """Publishes what happened to the blocks."""
        while self._kv_events:
            feed.publish(*self._kv_events.popleft())


def _outcomes(part: RankPlan, given: RankResult) -> list[tuple[int, int]]:
    rows = zip(part.decode_widths, given.decodes, strict=True)
    # A row without tokens is of a sequence that had ended: nothing was tested.
    return [(width, len(tokens) - 1) for width, tokens in rows if width and tokens]


def _num_tokens(plan: StepPlan) -> int:
    return sum(
        sum(row.length for row in part.prefills) + len(part.decode_slots) + sum(part.decode_widths)
        for part in plan.ranks
    )
