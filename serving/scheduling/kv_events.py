"""What happens to the blocks that other requests may find, for a router that follows it."""

from dataclasses import dataclass

from serving.scheduling.block_hashes import BlockHash, event_id


@dataclass(frozen=True, kw_only=True)
class BlocksStored:
    """Blocks in the order of their chain can be found from now on; `token_ids` are theirs."""

    block_ids: tuple[int, ...]  # 64 bits, signed
    parent_id: int | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str | None
    cache_salt: str


@dataclass(frozen=True, kw_only=True)
class BlocksRemoved:
    """Blocks that cannot be found any more."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KvEventLog:
    """Events of one data rank since they were last taken; removals in a row are one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._removed: list[int] = []

    def stored(self, event: BlocksStored) -> None:
        """Adds an event of stored blocks."""
        self._flush()
        self._events.append(event)

    def removed(self, block_hash: BlockHash) -> None:
        """Adds the removal of one block."""
        self._removed.append(event_id(block_hash))

    def cleared(self) -> None:
        """Adds that all are gone."""
        self._flush()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KvEvent]:
        """The events in order; afterwards there are none."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._removed:
            self._events.append(BlocksRemoved(block_ids=tuple(self._removed)))
            self._removed = []
