"""The shapes that steps are compiled for: a small set, known before the server is ready.

Tokens grow by 2 from bucket to bucket, which pads by less than half of what a step costs. A row of
padding costs little, since it reads no pages and its token goes where every other one's does (tiny
on a CPU of 2 cores: a decode step of 4 rows takes 27 ms and one of 16 rows 36 ms), so rows grow by
4. The width of a block table costs next to nothing (tables stay on the device, and kernels go by a
sequence's length; tiny: 32 blocks take 32 ms and 128 blocks 36 ms), so it grows by 16.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from configs.serving import ServingConfig

MAX_PREFILL_ROWS = 16  # prompts that one step runs at most; rows of a prefill have this one size
ROW_GROWTH, PAGE_GROWTH = 4, 16
FIRST_PAGES = 128  # narrower tables would save nothing
FIRST_PREFILL_BLOCKS = 4  # a step of fewer tokens takes as long


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Shape:
    """What a program is compiled for: rows are sequences, tokens all of their tokens together,
    pages the width of the block table, steps the device steps of the dispatch.
    """

    kind: Literal["prefill", "decode"]
    rows: int
    tokens: int
    pages: int
    steps: int = 1


class Shapes:
    """The buckets of one config and pool."""

    def __init__(self, config: ServingConfig, num_blocks: int):
        drafts = config.num_speculative_tokens
        self._num_blocks, self._places = num_blocks, 1 + drafts
        self.max_prefill_rows = min(MAX_PREFILL_ROWS, config.max_num_seqs)
        budget, block_size = config.max_num_batched_tokens, config.block_size
        self.block_size = block_size
        self._rows = _buckets(1, config.max_num_seqs, ROW_GROWTH)
        self._decode_tokens = _buckets(1, config.max_num_seqs * self._places, 2)
        self._prefill_tokens = _buckets(min(FIRST_PREFILL_BLOCKS * block_size, budget), budget, 2)
        self._pages = _buckets(min(FIRST_PAGES, config.max_blocks), config.max_blocks, PAGE_GROWTH)
        # Drafts are chosen for each step by what the last one showed, so those are single steps.
        self.many_steps = 1 if drafts else config.num_scheduler_steps

    def prefill(self, *, tokens: int, pages: int) -> Shape:
        """The smallest shape for chunks of so many tokens together and tables of that width."""
        return Shape(
            kind="prefill",
            rows=self.max_prefill_rows,
            tokens=_fit(self._prefill_tokens, tokens),
            pages=_fit(self._pages, pages),
        )

    def decode(self, *, rows: int, tokens: int, pages: int, steps: int) -> Shape:
        """The smallest shape for so many sequences with so many anchors and drafts together."""
        row_bucket = _fit(self._rows, rows)
        return Shape(
            kind="decode",
            rows=row_bucket,
            tokens=_fit(self._decode_tokens, max(tokens, row_bucket)),
            pages=_fit(self._pages, pages),
            steps=steps,
        )

    def all(self) -> Iterator[Shape]:
        """Every shape that a plan can have: what has to be compiled before the first request."""
        for pages in self._pages:
            if not self._pages_exist(pages, before=0):
                continue
            for tokens in self._prefill_tokens:
                blocks = min(self.max_prefill_rows * pages, self._num_blocks)
                most = blocks * self.block_size
                if _below(self._prefill_tokens, tokens) < most:
                    yield Shape(
                        kind="prefill", rows=self.max_prefill_rows, tokens=tokens, pages=pages
                    )
            for rows in self._rows:
                if self._pages_exist(pages, before=_below(self._rows, rows)):
                    yield from self._decode_shapes(rows, pages)

    def _decode_shapes(self, rows: int, pages: int) -> Iterator[Shape]:
        for tokens in self._decode_tokens:
            reached = _below(self._decode_tokens, tokens) < rows * self._places
            if tokens < rows or not reached:
                continue
            for steps in sorted({1, self.many_steps}):
                yield Shape(kind="decode", rows=rows, tokens=tokens, pages=pages, steps=steps)

    def _pages_exist(self, pages: int, *, before: int) -> bool:
        """Whether the pool holds one sequence that needs this width beside `before` others, each of
        which has at least the block that it writes to for itself.
        """
        return _below(self._pages, pages) + 1 + before <= self._num_blocks


def _buckets(first: int, last: int, growth: int) -> list[int]:
    """first, first x growth, ... up to `last`, which always is one."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= growth
    return [*sizes, last]


def _fit(buckets: list[int], size: int) -> int:
    assert size <= buckets[-1], f"{size} is beyond the largest bucket {buckets[-1]}"
    return buckets[bisect_left(buckets, size)]


def _below(buckets: list[int], bucket: int) -> int:
    """The bucket before this one, 0 before the first: sizes above it need this one."""
    index = bisect_left(buckets, bucket)
    return buckets[index - 1] if index else 0
