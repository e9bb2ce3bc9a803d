"""One data rank on the host: its pages, its device rows, and the sequences that hold them.

A sequence that is preempted or ends gives its blocks and its slot back only when no step in flight
may write to them; until then it drains. Tokens that arrive while a preempted one drains count, so
nothing that was computed twice can differ, and nothing late can reach its next life.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from serving.scheduling.block_hashes import BlockHash, event_id
from serving.scheduling.kv_events import BlocksStored, KvEventLog
from serving.scheduling.pages import Pages
from serving.scheduling.request import Phase, Request


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one data rank holds."""

    running: int
    draining: int
    used_blocks: int
    cached_blocks: int
    backlog_tokens: int


class Rank:
    """The running sequences of a rank in their order: more urgent first, then the older."""

    def __init__(
        self, index: int, *, num_blocks: int, num_slots: int, block_size: int, with_events: bool
    ):
        self.index, self.block_size = index, block_size
        self.pages = Pages(num_blocks, KvEventLog() if with_events else None)
        self.running: list[Request] = []
        self.draining: list[Request] = []
        self.num_coming = 0  # blocks that become available when the draining have drained
        # Which running sequence is about to compute a block that nobody has yet.
        self.promised: dict[BlockHash, Request] = {}
        self._free_slots = list(range(num_slots))
        heapify(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        """Device rows that nobody holds."""
        return len(self._free_slots)

    def prefilling(self) -> list[Request]:
        """The running sequences whose known tokens are not planned to the end, in order."""
        return [one for one in self.running if one.prefill_planned < one.prefill_target]

    @property
    def backlog(self) -> int:
        """Prompt tokens that are admitted and not planned yet."""
        return sum(one.prefill_target - one.prefill_planned for one in self.prefilling())

    def enter(self, request: Request, found: list[int], num_blocks: int) -> None:
        """Lets a sequence run on the found blocks and new ones, `num_blocks` in all."""
        self.pages.share(found)
        blocks = found + self.pages.allocate(num_blocks - len(found))
        computed = len(found) * self.block_size
        slot = heappop(self._free_slots)
        request.enter_pages(self.index, slot, blocks, num_found=len(found), computed=computed)
        insort(self.running, request, key=_order)
        full = request.prefill_target // self.block_size
        for block_hash in request.hashes(full, self.block_size)[len(found) : full]:
            self.promised.setdefault(block_hash, request)

    def leave(self, request: Request) -> bool:
        """Takes a running sequence out; whether its blocks and its slot are free already."""
        place = bisect_left(self.running, request.order, key=_order)
        assert self.running[place] is request
        del self.running[place]
        self._break_promises(request)
        if request.steps_in_flight == 0:
            self._free(request)
            return True
        request.phase = Phase.DRAINING
        self.draining.append(request)
        self.num_coming += self.pages.num_sole(request.blocks)
        return False

    def drained(self, request: Request) -> None:
        """Frees what a draining sequence held, now that no step in flight has it."""
        self.draining.remove(request)
        self._free(request)
        self.num_coming = sum(self.pages.num_sole(one.blocks) for one in self.draining)

    def grow(self, request: Request, num_blocks: int) -> list[int]:
        """Lengthens a sequence's blocks by so many; the new ones."""
        blocks = self.pages.allocate(num_blocks)
        request.blocks += blocks
        return blocks

    def publish(self, request: Request) -> None:
        """Lets others find the blocks whose tokens are all computed and known."""
        full = request.computed // self.block_size
        first = request.published
        if full <= first:
            return
        hashes = request.hashes(full, self.block_size)
        for index in range(first, full):
            if self.promised.get(hashes[index]) is request:
                del self.promised[hashes[index]]
            self.pages.publish(request.blocks[index], hashes[index])
        request.published = full
        if self.pages.events is not None:
            self.pages.events.stored(self._stored(request, first, full))

    def load(self) -> Load:
        """What it holds now."""
        return Load(
            running=len(self.running),
            draining=len(self.draining),
            used_blocks=self.pages.num_blocks - self.pages.num_available,
            cached_blocks=self.pages.num_cached,
            backlog_tokens=self.backlog,
        )

    def check(self) -> None:
        """Raises AssertionError unless blocks, slots and sequences agree. O(total)."""
        holders = self.running + self.draining
        self.pages.check(one.blocks for one in holders)
        slots = sorted(self._free_slots + [one.slot for one in holders])
        assert slots == list(range(len(slots))), "a slot is lost or held twice"
        assert self.running == sorted(self.running, key=_order)
        assert all(one.phase is Phase.RUNNING for one in self.running)
        assert all(one.steps_in_flight for one in self.draining), "one drains for nothing"
        assert set(self.promised.values()) <= set(self.running), "a promise nobody keeps"

    def _free(self, request: Request) -> None:
        self.pages.release(request.blocks)
        heappush(self._free_slots, request.slot)
        request.leave_pages()
        finished = request.finish_reason is not None
        request.phase = Phase.FINISHED if finished else Phase.WAITING

    def _break_promises(self, request: Request) -> None:
        full = request.prefill_target // self.block_size
        for block_hash in request.chain[request.published : full]:
            if self.promised.get(block_hash) is request:
                del self.promised[block_hash]

    def _stored(self, request: Request, first: int, full: int) -> BlocksStored:
        chain, size = request.chain, self.block_size
        return BlocksStored(
            block_ids=tuple(map(event_id, chain[first:full])),
            parent_id=event_id(chain[first - 1]) if first else None,
            token_ids=tuple(request.tokens[first * size : full * size]),
            block_size=size,
            adapter=request.asked.adapter,
            cache_salt=request.asked.cache_salt,
        )


def _order(request: Request) -> tuple[int, int]:
    return request.order
