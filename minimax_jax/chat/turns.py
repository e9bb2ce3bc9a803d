"""What the model generated in past turns, so that a conversation goes on from those very ids.

Text alone does not bring ids back: a sampled token sequence need not be the one that the encoder
chooses for its text, and a template writes a thought or a tool call in its own standard way. The
key is the rendered conversation up to the end of a turn, so an edited history, other tools or
another thinking mode find nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

MAX_TOKENS = 4_000_000  # 16 MB


class TurnMemory:
    """Ids by the digest of a rendered conversation (`Rendered.digests`); what was used least lately
    goes first when they are more than `max_tokens` in all.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS):
        """Raises ValueError for a `max_tokens` below 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} of the turn memory is not at least 1")
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._turns: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def recall(self, digests: Sequence[bytes]) -> tuple[int, list[int]] | None:
        """The last of the digests that is known, by its index, with its ids."""
        for index in reversed(range(len(digests))):
            ids = self._turns.get(digests[index])
            if ids is not None:
                self._turns.move_to_end(digests[index])
                return index, ids.tolist()
        return None

    def store(self, digest: bytes, ids: Sequence[int]) -> None:
        """Keeps the ids; more than `max_tokens` are not kept at all."""
        self._forget(digest)
        if len(ids) > self._max_tokens:
            return
        self._turns[digest] = array("i", ids)
        self.num_tokens += len(ids)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._turns)))

    def _forget(self, digest: bytes) -> None:
        self.num_tokens -= len(self._turns.pop(digest, ()))
