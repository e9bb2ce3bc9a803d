"""The query rows of an item on their way to shared memory, and their maxima on the way out.

A thread takes chunk c of a row: dimensions 8 c .. 8 c + 7, c = 4 t + w, as four half2 words of
dimensions (0, 4), (1, 5), (2, 6), (3, 7): the order in which a key's codes are decoded. Rows are
multiplied by the power of two that puts their largest element in 2^14 .. 2^15, which the order of
their scores does not see: float16 then holds all that float32 sums would notice, for bfloat16 and
float16 queries alike.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.lanes import REF, SCALAR, Real, Word, word

ROW_BYTES = 256
_TOP = 14 + 2 * 127  # biased exponents of a row's factor and of its largest element add up to it


def place_rows(
    q: Any, dtype: Any, num_rows: int, bounds: tuple[Word, Word], place: Callable
) -> None:
    """Calls `place(row, c, four words)` for every row of an item, in the 128 threads together.

    `bounds`: the item's first row in q [B x R, 128], and the end of its sequence's rows, whose last
    one stands for those beyond.
    """
    chunk, row, last = lanes.thread() & 15, lanes.thread() >> 4, bounds[1] + -1
    for more in range(0, num_rows, 8):
        index = bounds[0] + row + more
        index = lanes.select(index.below(last), index, last)
        words = lanes.load_words(lanes.address(q), index * ROW_BYTES + (chunk << 4), 4)
        values = [x for one in words for x in lanes.reals_of_pair(one, dtype == jnp.float16)]
        values = _normalised(values)
        pairs = [lanes.half2_of_reals(values[i], values[i + 4]) for i in range(4)]
        place(row + more, chunk, pairs)


def fold(tiles: list[list[Real]], found: list[Real] | None = None) -> list[Real]:
    """The maximum over a lane's two tokens (g, g + 8) of a product's tiles, and over `found`: for
    each 8 query rows, those of rows 2 t and 2 t + 1. A NaN loses to every number, as in the
    reference.
    """
    values = [lanes.maximum(tile[c], tile[c + 2]) for tile in tiles for c in (0, 1)]
    return values if found is None else list(map(lanes.maximum, values, found))


def pack(values: list[Real]) -> Any:
    """N / 4 values a lane as the array of `packed_type`."""
    values = values * (-(-4 // len(values)))
    return lanes.array_of([values[i : i + 4] for i in range(0, len(values), 4)])


def unpack(array: Any, num_rows: int) -> list[Real]:
    """The inverse of `pack`."""
    return [value for tile in lanes.tiles_of(array) for value in tile][: num_rows // 4]


def packed_type(num_rows: int) -> Any:
    """An array with as many registers, since kernels pass arrays."""
    shape = (64, max(8, num_rows // 2))
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)


def store_packed(best: Any, scores: Any, item: Any, page: Any) -> None:
    """`store_maxima` of what was packed, for pages from this one on, in array code."""
    _, num_rows, width = scores.shape

    @lanes.code(plgpu.Layout.WGMMA, REF, SCALAR, SCALAR)
    def store(_, best, scores, item, page):
        row, column = lanes.scalar(item) * num_rows, lanes.scalar(page) + lanes.warp()
        store_maxima(unpack(best, num_rows), scores, row, width, column)

    store(best, scores, item, page)


def store_maxima(best: list[Real], scores: Any, first_row: Word, width: int, column: Word) -> None:
    """Writes each row's maximum over the 16 tokens of this warp's tiles to scores [row, column]."""
    first, values = _reduce(best)
    row = first_row + ((lanes.lane() & 3) << 1)
    for i, value in enumerate(values):
        index = first + i
        at = (row + ((index >> 1) << 3) + (index & 1)) * width + column
        lanes.store_reals(lanes.address(scores), at << 2, [value])


def _normalised(values: list[Real]) -> list[Real]:
    """The 8 elements of a row in this lane times the row's factor; 16 lanes have the row."""
    largest = lanes.real(0.0)
    for value in values:
        largest = lanes.maximum(largest, lanes.absolute(value))
    for distance in (1, 2, 4, 8):
        largest = lanes.maximum(largest, lanes.shuffle_xor(largest, distance))
    exponent = word(_TOP) + (lanes.bits_of_real(largest) >> 23) * -1
    exponent = lanes.select(exponent.below(254), exponent, word(254))
    factor = lanes.real_of_bits(exponent << 23)
    return [value * factor for value in values]


def _reduce(values: list[Real]) -> tuple[Word, list[Real]]:
    """The maximum of each value over the 8 lanes of its column, which then share the values out.

    Returns the index of the first value that this lane has, and that value and its successors: an
    eighth of all, or one that several lanes have.
    """
    first = word(0)
    for distance in (4, 8, 16):
        if len(values) == 1:
            values = [lanes.maximum(values[0], lanes.shuffle_xor(values[0], distance))]
            continue
        half = len(values) // 2
        upper = (lanes.lane() & distance).above(0)
        kept, sent = [], []
        for low, high in zip(values[:half], values[half:], strict=True):
            kept.append(lanes.select(upper, high, low))
            sent.append(lanes.select(upper, low, high))
        got = [lanes.shuffle_xor(x, distance) for x in sent]
        values = [lanes.maximum(x, y) for x, y in zip(kept, got, strict=True)]
        first = first + lanes.select(upper, word(half), word(0))
    return first, values
