"""The load of each data rank as the event loop may read it: a picture that the engine's thread
renews several times a second and before it falls asleep.
"""

import time

from serving.engine_api import RankLoad
from serving.scheduling.scheduler import Scheduler
from serving.statistics import Statistics

RENEWED_S = 0.02
RATE_S = 1.0  # over which tokens a second are counted


class LoadWatch:
    """Takes the pictures."""

    def __init__(self, scheduler: Scheduler, statistics: Statistics):
        self._scheduler, self._statistics = scheduler, statistics
        self._renewed = self._marked = time.monotonic()
        self._marked_tokens = 0
        self._rate = 0.0
        self._picture = self._loads()

    @property
    def loads(self) -> list[RankLoad]:
        """The newest picture."""
        return self._picture

    def look(self, now: float, *, at_once: bool = False) -> None:
        """Takes a new picture, if the last one is old or it must be new."""
        if at_once or now - self._renewed >= RENEWED_S:
            self._renewed = now
            self._measure(now, resting=not self._scheduler.has_work)
            self._picture = self._loads()
            self._note(self._picture)

    def _measure(self, now: float, *, resting: bool) -> None:
        tokens, past = self._statistics.generation_tokens, now - self._marked
        if past >= RATE_S:
            self._rate = (tokens - self._marked_tokens) / past
            self._marked, self._marked_tokens = now, tokens
        if resting:
            self._rate = 0.0

    def _loads(self) -> list[RankLoad]:
        scheduler, statistics = self._scheduler, self._statistics
        queries = statistics.prefix_queries
        backlog = scheduler.admission.num_uncached_tokens()
        return [
            RankLoad(
                rank=rank.index,
                num_running=len(rank.running),
                num_waiting=0 if rank.index else len(scheduler.waiting),
                waiting_uncached_tokens=0 if rank.index else backlog,
                used_tokens=(rank.pages.num_blocks - rank.pages.num_available) * rank.block_size,
                max_tokens=rank.pages.num_blocks * rank.block_size,
                max_running=scheduler.config.max_num_seqs,
                tokens_per_second=self._rate / len(scheduler.ranks),
                cache_hit_rate=statistics.prefix_hits / queries if queries else 0.0,
            )
            for rank in scheduler.ranks
        ]

    def _note(self, loads: list[RankLoad]) -> None:
        statistics = self._statistics
        statistics.running = sum(load.num_running for load in loads)
        statistics.waiting = sum(load.num_waiting for load in loads)
        statistics.cache_usage = sum(load.token_usage for load in loads) / len(loads)
        statistics.tokens_per_second = self._rate
        statistics.weight_version = self._scheduler.weight_version
