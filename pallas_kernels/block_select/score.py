"""Block scores from NVFP4 index pages: B[row, page] = max over the page's tokens of <q_row, k>.

Grid: `PROGRAMS` persistent programs of one warpgroup, each with an equal part of the steps
(`schedule`). A step is four pages, which the copy engine fetches by the block table, `STAGES` steps
ahead. Warp w decodes page w, in eight tiles of 16 tokens: a lane reads 16 bytes of a token's row
and its two scales, and the decoded registers are the A fragment of a wgmma (64 rows: 16 of each of
the four pages) against N query rows in shared memory. The contraction's order is free, so the
queries are permuted, not the keys. The maximum over tokens stays in registers until a few shuffles
end it.

Memory: 9,216 bytes a page and 8 of the schedule read once, 4 bytes a row and page written, the
queries (256 bytes a row) read whenever a program comes to another item. Scores are those of the query scaled by a power of
two that puts its largest element in 2^14 .. 2^15, which its order does not see: float16 then holds
all bits that float32 sums would notice, for bfloat16 and float16 queries alike.

Pages at and after the newest block of an item's last query are not scored (their scores are
undefined): the newest block is always chosen, so no page needs a causal mask.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import lanes, nvfp4_lanes
from pallas_kernels.block_select.schedule import (
    IDS,
    ITEM,
    PAGE,
    STEP,
    Schedule,
    items_of_sequence,
    rows_of_item,
)
from pallas_kernels.lanes import REF, SCALAR, Real, Word, word

TOKENS, WIDTH = 128, 128  # of a page, of a key
CODE_BYTES, PAGE_BYTES = 8192, 9216
PAGE_LINES = 72
PROGRAMS = 264  # two for each of an H200's 132 multiprocessors: 113 KB and 255 registers allow it
STAGES = 2
TILES = 8  # of 16 tokens
# Tiles in flight by N: more hide the latency of the tensor cores, and hold 36 to 96 registers each.
_FLIGHT = {8: 4, 16: 4, 32: 4, 64: 2, 128: 1}
_WGMMA = plgpu.Layout.WGMMA
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TOP = 14 + 2 * 127  # biased exponents of a query's factor and of its largest element add up to it


def block_scores(
    q: Float[Array, "B R I"],
    pool: UInt8[Array, "blocks lines 128"],
    line: Int[Array, ""],
    schedule: Schedule,
    blocks: int,
) -> Float[Array, "items N P4"]:
    """Scores of each item's rows for the pages of its schedule; the rest is undefined."""
    batch, rows, _ = q.shape
    num_rows = rows_of_item(rows)
    shape = (batch * items_of_sequence(rows), num_rows, -(-blocks // STEP) * STEP)
    kernel = plgpu.kernel(
        partial(_program, num_rows),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(PROGRAMS,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((STAGES, STEP, PAGE_LINES, 128), jnp.uint8),
            plgpu.SMEM((2, num_rows, 64), jnp.float16, transforms=_SWIZZLED),
            plgpu.Barrier(num_arrivals=STEP, num_barriers=STAGES),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(q, pool, line.reshape(1), schedule.counts, schedule.entries)


def _program(num_rows, q, pool, line, counts, entries, scores, pages, queries, arrived):
    """Scores this program's steps one after the other."""
    program, first_line = lax.axis_index("program"), line[0]
    steps, longest = counts[program], entries.shape[1]

    def page_ids(step):
        step = jnp.minimum(step, longest - 1)
        return tuple(entries[program, step, IDS + i] for i in range(STEP))

    def fetch(slot, ids):
        for i in range(STEP):  # the copy engine reads zeros for a block of -1
            source = pool.at[ids[i], pl.ds(first_line, PAGE_LINES)]
            plgpu.copy_gmem_to_smem(source, pages.at[slot, i], arrived.at[slot])

    for step in range(STAGES):
        ids = page_ids(step)
        pl.when(step < steps)(partial(fetch, step, ids))

    def score(step, carry):
        loaded, ids = carry
        slot = lax.rem(step, STAGES)
        item, page = entries[program, step, ITEM], entries[program, step, PAGE]

        @pl.when(item != loaded)
        def _():
            _load_queries(num_rows, q, queries, item)
            plgpu.commit_smem()

        plgpu.barrier_wait(arrived.at[slot])

        def release():
            _sync()  # all warps have decoded their page
            pl.when(step + STAGES < steps)(partial(fetch, slot, ids))

        best = _best_of_tiles(num_rows, pages.at[slot], queries, release)
        _store(best, scores, item, page)
        return item, page_ids(step + STAGES + 1)

    lax.fori_loop(0, steps, score, (jnp.int32(-1), page_ids(STAGES)))


def _best_of_tiles(num_rows, pages, queries, release) -> Array:
    """Maximum over the tiles: (64, N), where row 16 w + i has tokens i, i + 16, ... of page w."""
    flight = _FLIGHT[num_rows]
    best = None
    for first in range(0, TILES, flight):
        tiles = range(first, first + flight)

        def products(*sums, tiles=tiles):
            for tile, total in zip(tiles, sums, strict=True):
                low, high = _decode(tile, pages)
                plgpu.wgmma(total, low, queries.at[0].transpose((1, 0)))
                plgpu.wgmma(total, high, queries.at[1].transpose((1, 0)))
            if tiles[-1] == TILES - 1:
                release()
            return [total[...] for total in sums]

        sums = plgpu.ACC((64, num_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        parts = pl.run_scoped(products, *[sums] * flight)
        for part in parts:
            best = part if best is None else _maximum(num_rows, best, part)
    assert best is not None
    return best


def _decode(tile: int, pages: Any) -> tuple[Array, Array]:
    """Sixteen tokens of each warp's page as two A operands: rows g and g + 8 of a lane, its 32
    dimensions from 32 t, four words of eight codes: two of them in each operand.
    """
    half = plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=_WGMMA)

    @lanes.code(REF, returns=(half, half))
    def decode(_, pages):
        page = lanes.address(pages, lanes.warp() * PAGE_BYTES)
        fragments: list[list[list[Word]]] = [[[] for _ in range(8)] for _ in (0, 1)]
        for row in (2 * tile, 2 * tile + 1):  # of eight tokens
            codes = lanes.load_words(page, (lanes.lane() << 4) + 512 * row, 4)
            scales = lanes.load_bits(page, (lanes.lane() << 1) + (CODE_BYTES + 64 * row), 16)
            for group, scale in enumerate(nvfp4_lanes.scale_pairs(scales)):
                for i in (0, 1):
                    for k, pair in enumerate(nvfp4_lanes.code_pairs(codes[2 * group + i])):
                        value = lanes.multiply_half2(pair, scale)
                        fragments[group][4 * i + k].append(value)
        return tuple(lanes.half_accumulator(tiles) for tiles in fragments)

    return decode(pages)


def _maximum(num_rows: int, x: Array, y: Array) -> Array:
    """Elementwise; a NaN loses to every number, as in the reference."""
    shape = plgpu.ShapeDtypeStruct((64, num_rows), jnp.float32, layout=_WGMMA)

    @lanes.code(_WGMMA, _WGMMA, returns=shape)
    def maximum(_, x, y):
        pairs = zip(lanes.tiles_of(x), lanes.tiles_of(y), strict=True)
        return lanes.array_of([list(map(lanes.maximum, one, other)) for one, other in pairs])

    return maximum(x, y)


def _store(best: Array, scores: Any, item: Array, page: Array) -> None:
    """Writes each row's maximum over the 16 rows of a warp, to the warp's page."""
    _, num_rows, width = scores.shape

    @lanes.code(_WGMMA, REF, SCALAR, SCALAR)
    def store(_, best, scores, item, page):
        # A lane has columns 8 i + 2 t and the next one, of rows g and g + 8.
        columns = [
            lanes.maximum(values[c], values[c + 2])
            for values in lanes.tiles_of(best)
            for c in (0, 1)
        ]
        first, values = _reduce_rows(columns)
        row = lanes.scalar(item) * num_rows + ((lanes.lane() & 3) << 1)
        to, at = lanes.address(scores), lanes.scalar(page) + lanes.warp()
        for i, value in enumerate(values):
            index = first + i
            offset = ((row + ((index >> 1) << 3) + (index & 1)) * width + at) << 2
            lanes.store_reals(to, offset, [value])

    store(best, scores, item, page)


def _reduce_rows(values: list[Real]) -> tuple[Word, list[Real]]:
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


def _load_queries(num_rows: int, q: Any, queries: Any, item: Array) -> None:
    """Brings an item's rows to shared memory as float16 B operands [2, N, 64].

    A thread takes 8 dimensions 8 c .. 8 c + 7 of rows 8 apart. With t = c / 4 and w = c % 4, its
    dimensions i and i + 4 become elements 32 (w % 2) + 8 i + 2 t and the next one of operand w / 2:
    where `_decode` has the same dimensions of the keys.
    """
    _, rows, _ = q.shape
    items = items_of_sequence(rows)
    sequence = item // items
    start = sequence * rows + (item - sequence * items) * num_rows
    halves = q.dtype == jnp.float16

    @lanes.code(REF, plgpu.RefType(_SWIZZLED), SCALAR, SCALAR)
    def load(_, q, queries, start, end):
        source, to = lanes.address(q), lanes.address(queries)
        chunk, row = lanes.thread() & 15, lanes.thread() >> 4
        t, w = chunk >> 2, chunk & 3
        for more in range(0, num_rows, 8):
            index = lanes.scalar(start) + row + more
            last = lanes.scalar(end) + -1
            index = lanes.select(index.below(last), index, last)
            words = lanes.load_words(source, (index << 8) + (chunk << 4), 4)
            values = _normalised([x for one in words for x in lanes.reals_of_pair(one, halves)])
            at = ((w >> 1) * (num_rows * 128)) + (row << 7) + more * 128 + (t << 2)
            for i in range(4):
                piece = (((w & 1) << 2) + i) ^ row
                pair = lanes.half2_of_reals(values[i], values[i + 4])
                lanes.store_words(to, at + (piece << 4), [pair])

    load(q, queries, start, (sequence + 1) * rows)


def _normalised(values: list[Real]) -> list[Real]:
    """The 8 elements of a row in this lane, times the power of two that brings the largest of the
    row (in 16 neighbouring lanes) to 2^14 .. 2^15.
    """
    largest = lanes.real(0.0)
    for value in values:
        largest = lanes.maximum(largest, lanes.absolute(value))
    for distance in (1, 2, 4, 8):
        largest = lanes.maximum(largest, lanes.shuffle_xor(largest, distance))
    exponent = word(_TOP) + (lanes.bits_of_real(largest) >> 23) * -1
    exponent = lanes.select(exponent.below(254), exponent, word(254))
    factor = lanes.real_of_bits(exponent << 23)
    return [value * factor for value in values]


def _sync() -> None:
    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()
