"""The numbered stream of KV events that routers follow, with a bounded memory.

A subscriber is a cursor into the history. One that asks for events that are no longer there, or
falls behind them, is told that all blocks are gone and goes on from now: it then knows too little,
never something false.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from serving.scheduling.kv_events import AllBlocksCleared, BlocksStored, KvEvent

HISTORY_BATCHES = 8192
HISTORY_TOKENS = 1 << 22  # an id in a tuple takes 8 bytes and itself up to 28: 150 MB


@dataclass(frozen=True, kw_only=True)
class KvBatch:
    """What happened to a data rank's blocks in one step. Numbers count from 1 over all ranks."""

    number: int
    timestamp: float  # seconds since 1970
    rank: int
    events: tuple[KvEvent, ...]

    @property
    def num_tokens(self) -> int:
        """Token ids in it."""
        return sum(len(e.token_ids) for e in self.events if isinstance(e, BlocksStored))


class KvFeed:
    """Numbers what is published, on one event loop, and hands it to any number of subscribers."""

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        max_batches: int = HISTORY_BATCHES,
        max_tokens: int = HISTORY_TOKENS,
        clock: Callable[[], float] = time.time,
    ):
        self._num_ranks, self._clock = num_ranks, clock
        self._max_batches, self._max_tokens = max(max_batches, num_ranks), max_tokens
        self._batches: deque[KvBatch] = deque()
        self._num_tokens = 0
        self._last = 0
        self._arrived = asyncio.Event()

    @property
    def last_number(self) -> int:
        """The number of the newest batch; 0 before the first."""
        return self._last

    def publish(self, rank: int, events: Sequence[KvEvent]) -> None:
        """Adds what happened to a rank's blocks, if anything did."""
        if not events:
            return
        self._last += 1
        batch = KvBatch(number=self._last, timestamp=self._clock(), rank=rank, events=tuple(events))
        self._batches.append(batch)
        self._num_tokens += batch.num_tokens
        while len(self._batches) > self._max_batches or self._num_tokens > self._max_tokens:
            self._num_tokens -= self._batches.popleft().num_tokens
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    async def subscribe(self, start: int, idle_s: float) -> AsyncGenerator[KvBatch | None]:
        """The batches from number `start` on; None whenever nothing came for `idle_s` seconds.

        Start 0 means all that led to the present state, and so does a number that was never
        reached: its subscriber followed an engine that ran before this one.
        """
        following = 1 if start > self._last + 1 else max(start, 1)
        while True:
            first = self._last + 1 - len(self._batches)
            if following > self._last:
                if not await self._arrives(idle_s):
                    yield None
            elif following < first:
                batches, following = self._forgotten(), self._last + 1
                for batch in batches:
                    yield batch
            else:
                following += 1
                yield self._batches[following - 1 - first]

    async def _arrives(self, idle_s: float) -> bool:
        try:
            await asyncio.wait_for(self._arrived.wait(), idle_s)
        except TimeoutError:
            return False
        return True

    def _forgotten(self) -> list[KvBatch]:
        """One batch a rank that takes all its blocks away, under the newest numbers."""
        first = self._last + 1 - self._num_ranks
        now, gone = self._clock(), (AllBlocksCleared(),)
        return [
            KvBatch(number=max(first + rank, 1), timestamp=now, rank=rank, events=gone)
            for rank in range(self._num_ranks)
        ]
