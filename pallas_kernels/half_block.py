"""A block of 128 keys or values as float16 operands of wgmma, and the query rows against it.

A kernel decodes a page once, a token in each of 128 threads, and uses it for many queries: four
queries times 16 heads are the 64 rows of a product, a query in each warp. The order of a
contraction is free, and so is that of the output's columns; both are chosen so that a lane has
whole 16-byte pieces of a row, and the four lanes of a row have 64 bytes side by side. Chunk
4 w + i of 16 (8 columns, 16 bytes) holds, for t = 0..3, the i-th pair of dimensions
32 w + 8 t .. + 7; lane (g, t) of a warp has columns 2 t, 2 t + 1 of every chunk. Which two of 8
dimensions make pair i of 4 is the `Order` of the number format's decoder.

Keys lie as [2, 128 tokens, 64], values as [128 tokens, 128], both in tiles of 8 x 64 with the
128-byte swizzle (16-byte chunk c of row r at c ^ (r % 8)).
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import Real, Word, load_words

TOKENS, WIDTH, HEADS = 128, 128, 16
ROW_BYTES = 2 * WIDTH  # of bfloat16 or float16
Order = tuple[tuple[int, int], ...]  # the two dimensions, of 8, that make each of 4 pairs
NEIGHBOURS: Order = ((0, 1), (2, 3), (4, 5), (6, 7))


def place_key(token: Word, chunk: int) -> Word:
    """The byte of a key's chunk."""
    return (token << 7) + 16384 * (chunk // 8) + (((token & 7) ^ (chunk % 8)) << 4)


def place_value(token: Word, chunk: int) -> Word:
    """The byte of a value's chunk."""
    at = ((token >> 3) << 11) + ((token & 7) << 7)
    return at + 1024 * (chunk // 8) + (((token & 7) ^ (chunk % 8)) << 4)


def load_queries(row: Any) -> tuple[list[list[Word]], list[list[Word]]]:
    """16 bfloat16 rows at a pointer of this warp, as they are: what `queries` takes later, so that
    a load may be under way for long.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    tiles = []
    for w in range(4):
        at = (t << 4) + 64 * w
        rows = [load_words(row, head * ROW_BYTES + at, 4) for head in (g, g + 8)]
        tiles += [list(pair) for pair in zip(*rows, strict=True)]
    return tiles[:8], tiles[8:]


def queries(loaded: list[list[Word]], order: Order) -> list[list[Word]]:
    """The float16 A fragments of 64 columns from their loaded words."""
    tiles = []
    for first in range(0, len(loaded), 4):
        rows = []
        for half in (0, 1):
            pairs = (reals_of_bf16(loaded[first + i][half]) for i in range(4))
            x = [one for pair in pairs for one in pair]
            rows.append([lanes.half2_of_reals(x[i], x[j]) for i, j in order])
        tiles += [list(pair) for pair in zip(*rows, strict=True)]
    return tiles


def store_rows(
    tiles: list[list[Real]],
    factors: list[Real],
    row: Any,
    order: Order,
    pack: Callable[[Real, Real], Word],
) -> None:
    """16 rows of 128 values, times one factor for row g and g + 8, to 16-bit rows at a pointer of
    this warp; `pack(low, high)` rounds two values into a word.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    for half, factor in enumerate(factors):
        for w in range(4):
            x: dict[int, Real] = {}
            for i, pair in enumerate(order):
                values = tiles[4 * w + i][2 * half : 2 * half + 2]
                x |= {dim: one * factor for dim, one in zip(pair, values, strict=True)}
            words = [pack(x[i], x[i + 1]) for i in range(0, 8, 2)]
            lanes.store_words(row, (g + 8 * half) * ROW_BYTES + (t << 4) + 64 * w, words)


def hide(tiles: list[list[Real]], first: Word | int, end: Word) -> list[list[Real]]:
    """-inf in place of the columns before `first` and from `end` on, in all rows of this warp."""
    own = (lanes.lane() & 3) << 1
    nothing = lanes.real(float("-inf"))

    def seen(column: int) -> Any:
        below = (own + column).below(end)
        if isinstance(first, int):
            assert first == 0
            return below
        return lanes.both(below, lanes.negate((own + column).below(first)))

    return [
        [lanes.select(seen(8 * j + i % 2), value, nothing) for i, value in enumerate(values)]
        for j, values in enumerate(tiles)
    ]


def reals_of_bf16(pair: Word) -> list[Real]:
    """The two bfloat16 values of a word."""
    return [lanes.real_of_bits(pair << 16), lanes.real_of_bits(pair & 0xFFFF0000)]
