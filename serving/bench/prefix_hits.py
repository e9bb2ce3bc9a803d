"""The share of prompt tokens that a prefix cache without end would hold: what a measured rate is
compared with.

A hit is a run of whole blocks from the start that earlier prompts had, and ends before a prompt's
last token, which is always computed. Answers do not count: they are not in the prompts that follow,
or are so with other tokens (specification serving 4.5).
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serving.bench.asks import Ask, Segment, concatenated
from serving.scheduling.block_hashes import BlockHash, extend_chain

# The tokens that a server makes of a prompt's segments; None where that is not known.
IdsOf = Callable[[Sequence[Segment]], array | None]
_ROOT = b"\0" * 32


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens, and how many of them could have been found."""

    tokens: int = 0
    found: int = 0

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.tokens + other.tokens, self.found + other.found)

    @property
    def rate(self) -> float | None:
        """The share, 0 to 1; None without tokens."""
        return self.found / self.tokens if self.tokens else None


class EndlessCache:
    """The blocks of all prompts so far, in blocks of `block_size` tokens."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._known: set[BlockHash] = set()

    def hits(self, prompt: "GrowingPrompt") -> Hits:
        """What of a prompt is known, and knows it from then on."""
        num_tokens, chain = len(prompt.tokens), prompt.chain(self._block_size)
        found = 0
        for block_hash in chain[: (num_tokens - 1) // self._block_size]:
            if block_hash not in self._known:
                break
            found += self._block_size
        self._known.update(chain)
        return Hits(num_tokens, found)


class GrowingPrompt:
    """A prompt that becomes the next one: hashes of blocks that stay are not made again."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._chains: dict[int, list[BlockHash]] = {}

    def become(self, tokens: array) -> None:
        """Has other tokens from now on."""
        kept = num_shared(self.tokens, tokens)
        self._chains = {size: chain[: kept // size] for size, chain in self._chains.items()}
        self.tokens = tokens

    def chain(self, block_size: int) -> list[BlockHash]:
        """The hashes of its whole blocks."""
        chain = self._chains.setdefault(block_size, [])
        extend_chain(chain, _ROOT, self.tokens, block_size, len(self.tokens) // block_size)
        return chain


def num_shared(one: array, other: array) -> int:
    """How many first tokens two prompts have in common, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def hits_of_asks(
    asks: Iterable[Ask], block_size: int, ids_of: IdsOf = concatenated
) -> dict[str, Hits]:
    """By request id, what each finds of those before it; without those of unknown tokens, and those
    that are not measured but known to the others.
    """
    cache, hits = EndlessCache(block_size), {}
    for ask in asks:
        ids = ids_of(ask.segments)
        if ids is None:
            continue
        prompt = GrowingPrompt()
        prompt.become(ids)
        found = cache.hits(prompt)
        if ask.is_measured:
            hits[ask.request_id] = found
    return hits
