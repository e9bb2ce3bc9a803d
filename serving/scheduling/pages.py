"""The blocks of one data rank: who owns them, which can be found by their content, and which goes
first when room is needed.

A block is in one of three states: free (no owner, no content that anyone could want), cached (no
owner, but found by its hash; the least recently used goes first), or owned (by one or more
sequences; a full, committed one can be found as well). A sequence writes only into blocks that it
alone owns and that have no hash: partial blocks are never shared, and a prefix hit ends at a block
boundary before the last token, so nothing has to be copied on write.

Each operation costs O(blocks touched).
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from serving.scheduling.block_hashes import BlockHash
from serving.scheduling.kv_events import KvEventLog


class Pages:
    """Owns block ids 0..num_blocks-1 of one rank. `events` records what can be found, if given."""

    def __init__(self, num_blocks: int, events: KvEventLog | None = None):
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not a positive number of blocks")
        self.num_blocks = num_blocks
        self.events = events
        self._owners = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed is the next used
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner that can be found by their content."""
        return len(self._cached)

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest run of hashes from the first on that are there. O(found)."""
        found = []
        by_hash = self._by_hash
        for block_hash in hashes:
            block = by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_found(self, hashes: Sequence[BlockHash]) -> int:
        """How many `find` would give, in O(log): eviction begins at the end of a sequence, so what
        goes before a block that is there is there too.
        """
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._by_hash)

    def num_taken_from_available(self, found: Iterable[int]) -> int:
        """How many of the found blocks have no owner: sharing them makes so many unavailable."""
        return sum(not self._owners[block] for block in found)

    def num_sole(self, blocks: Iterable[int]) -> int:
        """How many of an owner's blocks are its alone, and so become available by its release."""
        return sum(self._owners[block] == 1 for block in blocks)

    def share(self, found: Iterable[int]) -> None:
        """Adds an owner to blocks that `find` gave."""
        for block in found:
            if not self._owners[block]:
                del self._cached[block]
            self._owners[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks with one owner and no content, `num_available` at most; cached ones are evicted as
        free ones run out.
        """
        assert count <= self.num_available, f"{count} blocks of {self.num_available} available"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Takes an owner off each block. The last of a sequence will be evicted first: the ones
        before it are of use without it, and it is of none without them.
        """
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} is released more often than owned"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, block_hash: BlockHash) -> bool:
        """Lets an owned block be found by its content, which never changes again.

        Another block of that content stays the one that is found; then this one, and False.
        """
        assert self._owners[block] > 0 and self._hashes[block] is None
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def forget_contents(self) -> None:
        """Lets nothing be found any more; blocks without an owner become free."""
        for block in self._by_hash.values():
            self._hashes[block] = None
        self._by_hash.clear()
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        if self.events is not None:
            self.events.cleared()

    def check(self, owned: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless the books balance, given every owner's blocks. O(total)."""
        owners = [0] * self.num_blocks
        for blocks in owned:
            for block in blocks:
                owners[block] += 1
        assert owners == self._owners, "owner counts differ from the owners"
        free, cached = set(self._free), set(self._cached)
        num_owned = sum(count > 0 for count in owners)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + num_owned == self.num_blocks, "a block is lost"
        assert not any(owners[block] for block in free | cached), "an owned block is free"
        assert not free & cached, "a block is free and cached"
        named = {block: name for name, block in self._by_hash.items()}
        assert named == {b: h for b, h in enumerate(self._hashes) if h is not None}
        assert cached <= named.keys() and not free & named.keys(), "a hash outlived its content"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        self._hashes[block] = None
        del self._by_hash[block_hash]
        if self.events is not None:
            self.events.removed(block_hash)
        return block
