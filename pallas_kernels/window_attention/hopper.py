"""window_attention on Hopper: four draft queries of 16 heads against the pages of a window.

Grid: (sequences x KV heads x groups of 4 queries) x splits, one warpgroup each. A program walks
`PAGES` pages of the window (the number of splits depends on the window alone, so no order of
summation depends on the batch); the last split also takes the block's own keys. A page is fetched
while the one before is computed, brought to float16 operands of wgmma once (`page_block`), and the
64 rows go through scores, online softmax and values in registers. Partial results (float16, with
their log-sum-exp) of the splits are merged by a second kernel (`slots` of sparse_attention).

Memory: 32,768 (FP8) or 65,536 (BF16) bytes a page and KV head, from the L2 for the second group of
queries; 4 KB of partial results a query, KV head and split.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import half_block, lanes, online_softmax
from pallas_kernels.dispatch import refuse_device
from pallas_kernels.half_block import HEADS, TOKENS, WIDTH
from pallas_kernels.layouts.pages import Pages, Source
from pallas_kernels.logarithms import LN2, LOG2E
from pallas_kernels.sparse_attention import slots
from pallas_kernels.window_attention import page_block

PAGES = 3  # of one program; the block's own keys count as the window's last page
_TOGETHER = 4  # queries of one product
_MAX_QUERIES = 64
_BYTES = {"fp8": 1, "bf16": 2}  # of one value
_WGMMA = plgpu.Layout.WGMMA
_ROW = _WGMMA.reduce(1)
_RAW = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_HALF = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_REF, _INT = lanes.REF, lanes.SCALAR
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def refuse(q, k, v, block_k, block_v, block_table, lengths, *, window, scale) -> str | None:
    """A sentence for what this kernel does not do."""
    if reason := refuse_device():
        return reason
    for source in (k, v):
        if not isinstance(source, Pages) or source.component.format not in _BYTES:
            return "keys and values are not FP8 or BF16 pages"
        if (source.block_size, source.component.width) != (TOKENS, WIDTH):
            return f"pages of {source.block_size} x {source.component.width}, not 128 x 128"
        if source.pool.shape[1] % 8:
            return f"rows of {source.pool.shape[1]} lines, not whole tiles of 8"
    for x in (q, block_k, block_v):
        if x.dtype != jnp.bfloat16:
            return f"queries or own keys are {x.dtype}, not bfloat16"
    if q.shape[2] != HEADS * k.num_heads:
        return f"{q.shape[2]} query heads for {k.num_heads} KV heads, not 16 for each"
    if q.shape[1] > _MAX_QUERIES:
        return f"{q.shape[1]} queries, more than {_MAX_QUERIES}"
    if scale <= 0:
        return f"scale={scale} is not positive"
    return None


def window_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_k: Float[Array, "B T K H"],
    block_v: Float[Array, "B T K H"],
    block_table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    window: int,
    scale: float,
) -> Float[Array, "B T N H"]:
    """See the package."""
    assert isinstance(k, Pages) and isinstance(v, Pages)
    B, T = q.shape[:2]
    pages = min(block_table.shape[1], -(-window // TOKENS) + 1)
    splits = -(-(pages + 1) // PAGES)
    groups = -(-T // _TOGETHER)
    kernel = plgpu.kernel(
        lanes.named(
            "window_attention", _attend, window=window, scale=scale, fmt=k.component.format
        ),
        out_type=(
            jax.ShapeDtypeStruct((B, T, k.num_heads, splits, HEADS, WIDTH), jnp.float16),
            jax.ShapeDtypeStruct((B, T, k.num_heads, splits, HEADS), jnp.float32),
        ),
        grid=(B * k.num_heads * groups, splits),
        grid_names=("unit", "split"),
        scratch_types=_scratch(_BYTES[k.component.format]),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
    )
    table, lengths = block_table.astype(jnp.int32), lengths.astype(jnp.int32)
    lines = [jnp.asarray(x.line, jnp.int32).reshape(1) for x in (k, v)]
    out, lse = kernel(q, block_k, block_v, table, lengths, *lines, k.pool)
    return slots.merge(out, lse)[0].reshape(q.shape)


def _scratch(value_bytes: int) -> tuple:
    raw = plgpu.SMEM((2, TOKENS * value_bytes, 128), jnp.uint8, transforms=_RAW)
    return (
        raw,  # keys and values
        plgpu.SMEM((2, TOKENS, WIDTH // 2), jnp.float16, transforms=_HALF),
        plgpu.SMEM((TOKENS, WIDTH), jnp.float16, transforms=_HALF),
        plgpu.Barrier(num_arrivals=2),
    )


def _attend(
    q, own_k, own_v, table, lengths, k_line, v_line, pool, out, lse,
    raw, k_half, v_half, there,
    *, window: int, scale: float, fmt: str,
):  # fmt: skip
    _, T, K, _ = own_k.shape
    groups = -(-T // _TOGETHER)
    unit, split = lax.axis_index("unit"), lax.axis_index("split")
    tile, rest = unit // (K * groups), lax.rem(unit, K * groups)
    head, group = rest // groups, lax.rem(rest, groups)
    length = lengths[tile]
    first = jnp.maximum(length - window + 1, 0) // TOKENS + split * PAGES
    count = jnp.clip(pl.cdiv(jnp.maximum(length, 0), TOKENS) - first, 0, PAGES)
    count = jnp.minimum(count, table.shape[1] - first)
    lines = TOKENS * _BYTES[fmt]

    def fetch(i):
        @pl.when(i < count)
        def _():
            page = jnp.maximum(table[tile, first + i], 0)
            for part, line in enumerate((k_line[0], v_line[0])):
                at = line + head * lines
                plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, lines)], raw.at[part], there)

    fetch(0)
    low, high = _queries(q.shape)(q, tile, group, head)
    step = functools.partial(_add_block, low, high, k_half, v_half, scale)

    def add_page(i, state):
        block = first + i
        seen = jnp.where(table[tile, block] >= 0, length - block * TOKENS, 0)
        plgpu.barrier_wait(there)
        _decode(fmt)(raw, k_half, v_half, seen)
        plgpu.commit_smem()
        fetch(i + 1)
        oldest = length - window + 1 - block * TOKENS + group * _TOGETHER
        return step(oldest, seen, state)

    def add_own(state):
        _load_own(own_k.shape)(own_k, own_v, tile, head, k_half, v_half)
        plgpu.commit_smem()
        return step(jnp.int32(-TOKENS), jnp.int32(T), state)

    sums = plgpu.layout_cast(jnp.zeros((64, WIDTH), jnp.float32), _WGMMA)
    tops = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), _ROW)
    totals = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _ROW)
    state = lax.fori_loop(0, count, add_page, (sums, tops, totals))
    state = lax.cond(split == out.shape[3] - 1, add_own, lambda state: state, state)
    _store(out.shape)(*state, out, lse, split, tile, group, head)


def _add_block(low, high, k_half, v_half, scale: float, oldest, end, state):
    """The state after one block: rows of warp w see its tokens oldest + w .. end - 1."""

    def scores(acc):
        for i, part in enumerate((low, high)):
            plgpu.wgmma(acc, part, k_half.at[i].transpose((1, 0)))
        return acc[...]

    s = pl.run_scoped(scores, _ACC((64, TOKENS), jnp.float32))
    weights, sums, tops, totals = _soften(scale * LOG2E)(_hide(s, oldest, end), *state)

    def values(acc):
        plgpu.wgmma(acc, weights, v_half)

    sums = pl.run_state(values)(_ACC.init(sums))
    return sums, tops, totals


def _soften(unit: float):
    row = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=_ROW)
    weights, sums = (
        plgpu.ShapeDtypeStruct((64, TOKENS), dtype, layout=_WGMMA)
        for dtype in (jnp.float16, jnp.float32)
    )

    @lanes.code(*[_WGMMA] * 2, *[_ROW] * 2, returns=(weights, sums, row, row))
    def run(_, s, sums, tops, totals):
        return online_softmax.soften(s, unit, sums, tops, totals)

    return run


def _queries(shape):
    fragment = plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=_WGMMA)

    @lanes.code(_REF, _INT, _INT, _INT, returns=[fragment, fragment])
    def load(_, q, tile, group, head):
        """Warp w loads query 4 group + w, or the last one."""
        _, T, N, _ = shape
        query = lanes.scalar(group) * _TOGETHER + lanes.warp()
        query = lanes.select(query.below(T), query, lanes.word(T - 1))
        row = (lanes.scalar(tile) * T + query) * N + lanes.scalar(head) * HEADS
        at = lanes.address(q, row << 8)
        parts = half_block.load_queries(at)
        return [lanes.half_accumulator(half_block.queries(x, page_block.ORDER)) for x in parts]

    return load


def _decode(fmt: str):
    @lanes.code(plgpu.RefType(_RAW), plgpu.RefType(_HALF), plgpu.RefType(_HALF), _INT)
    def decode(_, raw, k_half, v_half, limit):
        page, limit = lanes.address(raw), lanes.scalar(limit)
        lanes.sync_warpgroup()  # all warps are done with the block before
        keys = page_block.page_row(page, fmt)
        page_block.write_row(keys, lanes.address(k_half), half_block.place_key, limit)
        values = page_block.page_row(lanes.address(raw, TOKENS * 128 * _BYTES[fmt]), fmt)
        page_block.write_row(values, lanes.address(v_half), half_block.place_value, limit)

    return decode


def _load_own(shape):
    @lanes.code(_REF, _REF, _INT, _INT, plgpu.RefType(_HALF), plgpu.RefType(_HALF))
    def load(_, own_k, own_v, tile, head, k_half, v_half):
        _, T, K, _ = shape
        row = lanes.scalar(tile) * (T * K) + lanes.scalar(head)
        lanes.sync_warpgroup()
        for rows, to, place in (
            (own_k, k_half, half_block.place_key),
            (own_v, v_half, half_block.place_value),
        ):
            piece = page_block.own_row(rows, row << 8, K * half_block.ROW_BYTES, T)
            page_block.write_row(piece, lanes.address(to), place, lanes.word(T))

    return load


@lanes.code(
    _WGMMA, _INT, _INT, returns=plgpu.ShapeDtypeStruct((64, TOKENS), jnp.float32, layout=_WGMMA)
)
def _hide(_, s, oldest, end):
    """-inf outside of a warp's part of the block; skipped where it sees all of it."""
    first, end = lanes.scalar(oldest) + lanes.warp(), lanes.scalar(end)
    tiles = lanes.tiles_of(s)
    flat = lanes.branch(
        lanes.either(lanes.word(0).below(first), end.below(TOKENS)),
        lambda: [x for values in half_block.hide(tiles, first, end) for x in values],
        [x for values in tiles for x in values],
    )
    return lanes.array_of([flat[i : i + 4] for i in range(0, len(flat), 4)])


def _store(shape):
    """A query's partial result, float16, and its log-sum-exp."""

    @lanes.code(_WGMMA, _ROW, _ROW, _REF, _REF, _INT, _INT, _INT, _INT)
    def store(_, sums, top, total, out, lse, split, tile, group, head):
        _, T, K, splits, _, _ = shape
        query = lanes.scalar(group) * _TOGETHER + lanes.warp()
        row = (lanes.scalar(tile) * T + query) * K + lanes.scalar(head)
        row = (row * splits + lanes.scalar(split)) * HEADS
        tops, totals = lanes.rows_of(top), online_softmax.all_columns(lanes.rows_of(total))
        nothing, one = lanes.real(0.0), lanes.real(1.0)
        factors = [lanes.select(x.above(nothing), one / x, nothing) for x in totals]
        g, t = lanes.lane() >> 2, lanes.lane() & 3

        def write():
            at, order = lanes.address(out, row << 8), page_block.ORDER
            half_block.store_rows(lanes.tiles_of(sums), factors, at, order, lanes.half2_of_reals)

        def write_lse():
            for half in (0, 1):
                value = (tops[half] + lanes.log2(totals[half])) * lanes.real(LN2)
                at = (row + g + 8 * half) << 2
                lanes.store_reals(lanes.address(lse), at, [value])

        inside = query.below(T)
        lanes.when(inside, write)
        lanes.when(lanes.both(inside, t.below(1)), write_lse)

    return store
