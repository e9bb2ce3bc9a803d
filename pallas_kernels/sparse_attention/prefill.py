"""sparse_attention for many queries on Hopper: pages outside, queries inside.

Each tile's (query, slot) pairs are sorted by the block that they name (XLA). Grid: KV heads of
tiles x slices of `PAIRS` sorted pairs, one warpgroup each. A program walks the runs of one block in
its slice: the page is fetched while the run before is computed, decoded once into shared memory
(`nvfp4_block`), and used for all pairs of the run, four at a time: their 4 x 16 query heads are the
64 rows of wgmma, q · k, softmax and p · v stay in registers. One partial result (float16, with its
log-sum-exp) is written for each pair; a second kernel (`slots`) merges the slots of a query in
their own order, so that the result does not depend on the batch.

Memory: 18,432 bytes a run, 4 KB of queries (mostly from the L2) and 4 KB of partial results a pair,
which are read once more: what bounds it when blocks are independent. Partial results of at most
`_MAX_PARTIAL` bytes are alive at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import half_block, lanes
from pallas_kernels.lanes import Word
from pallas_kernels.layouts.pages import Pages, Source
from pallas_kernels.logarithms import LN2, LOG2E
from pallas_kernels.nvfp4_lanes import DECODED
from pallas_kernels.sparse_attention import decode, nvfp4_block, slots
from pallas_kernels.sparse_attention.pairs import END, Pair

PAIRS = 128  # of one program
_HEADS, _WIDTH, _BLOCK = 16, 128, 128
_TOGETHER = 4  # pairs of one matrix product
_MIN_QUERIES = 32  # of a tile; below it a page has too few queries to share
_MAX_PARTIAL = 1 << 30
_WGMMA = plgpu.Layout.WGMMA
_ROW = _WGMMA.reduce(1)
_RAW = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_HALF = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_REF, _INT = lanes.REF, lanes.SCALAR
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_FRAGMENT = plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=_WGMMA)


def refuse(q, k, v, block_ids, block_table, positions, *, scale) -> str | None:
    """A sentence for what this kernel does not do, or does no better than `decode`."""
    if q.shape[1] < _MIN_QUERIES:
        return f"tiles of {q.shape[1]} queries, fewer than {_MIN_QUERIES}"
    pair = Pair.of(q.shape[1], block_ids.shape[-1])
    if reason := pair.refuse(block_table.shape[1]):
        return reason
    return decode.refuse(q, k, v, block_ids, block_table, positions, scale=scale)


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_ids: Int[Array, "B T K C"],
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """See the package."""
    assert isinstance(k, Pages) and isinstance(v, Pages)
    B, T, K, C = block_ids.shape
    most = max(1, _MAX_PARTIAL // (T * K * C * _HEADS * _WIDTH * 2))
    tiles = next(n for n in range(min(B, most), 0, -1) if B % n == 0)

    def attend(some):
        q, ids, table, at = some
        return _attend_group(q, k, v, ids, table, at, scale)

    parts = (q, block_ids, block_table, positions)
    if tiles == B:
        return attend(parts)
    parts = jax.tree.map(lambda x: x.reshape(B // tiles, tiles, *x.shape[1:]), parts)
    out, lse = lax.map(attend, parts)
    return out.reshape(q.shape), lse.reshape(B, T, -1)


def _attend_group(q, k: Pages, v: Pages, block_ids, block_table, positions, scale: float):
    B, T, K, C = block_ids.shape
    pair = Pair.of(T, C)
    ids, table, at = (x.astype(jnp.int32) for x in (block_ids, block_table, positions))
    pages = table[jnp.arange(B)[:, None, None, None], jnp.maximum(ids, 0)]
    some = (ids >= 0) & (pages >= 0)
    keys = pair.sort(ids.swapaxes(1, 2), some.swapaxes(1, 2)).reshape(B * K, T * C)
    keys = jnp.pad(keys, ((0, 0), (0, -T * C % PAIRS)), constant_values=END)
    kernel = plgpu.kernel(
        lanes.named("sparse_attention_prefill", _attend, pair=pair, scale=scale),
        out_type=(
            jax.ShapeDtypeStruct((B, T, K, C, _HEADS, _WIDTH), jnp.float16),
            jax.ShapeDtypeStruct((B, T, K, C, _HEADS), jnp.float32),
        ),
        grid=(B * K, keys.shape[1] // PAIRS),
        grid_names=("row", "slice"),
        scratch_types=_scratch(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
    )
    ends = jnp.max(at, axis=1) + 1
    lines = [jnp.asarray(x.line, jnp.int32).reshape(1) for x in (k, v)]
    out, lse = kernel(q, keys, table, at, ends, *lines, k.pool)
    out, lse = slots.merge(out, jnp.where(some[..., None], lse, -jnp.inf))
    return out.reshape(q.shape), lse.reshape(B, T, -1)


def _scratch() -> tuple:
    codes = plgpu.SMEM((decode.CODE_LINES, 128), jnp.uint8, transforms=_RAW)
    scales = plgpu.SMEM((decode.SCALE_LINES, 128), jnp.uint8)
    return (
        (codes, scales, codes, scales),
        plgpu.SMEM((2, _BLOCK, _WIDTH // 2), jnp.float16, transforms=_HALF),
        plgpu.SMEM((_BLOCK, _WIDTH), jnp.float16, transforms=_HALF),
        plgpu.SMEM((PAIRS,), jnp.int32),
        plgpu.Barrier(num_arrivals=4),
        plgpu.Barrier(),
    )


def _attend(
    q, all_keys, table, positions, ends, k_line, v_line, pool, out, lse,
    raw, k_half, v_half, pairs, page_there, pairs_there,
    *, pair: Pair, scale: float,
):  # fmt: skip
    K = out.shape[2]
    row = lax.axis_index("row")
    tile, head = row // K, lax.rem(row, K)
    first = lax.axis_index("slice") * PAIRS
    plgpu.copy_gmem_to_smem(all_keys.at[row, pl.ds(first, PAIRS)], pairs, pairs_there)
    plgpu.barrier_wait(pairs_there)

    def fetch(i):
        @pl.when((i < PAIRS) & (pairs[jnp.minimum(i, PAIRS - 1)] != END))
        def _():
            page = table[tile, pairs[i] >> pair.bits]
            for line, (codes, scales) in ((k_line[0], raw[:2]), (v_line[0], raw[2:])):
                decode.fetch(pool, page, line, head, K, codes, scales, page_there)

    def run(i):
        block = pairs[i] >> pair.bits
        limit = jnp.clip(ends[tile] - block * _BLOCK, 0, _BLOCK)
        end = _run_end(pair.bits)(pairs, i)
        plgpu.barrier_wait(page_there)
        _decode(raw, k_half, v_half, limit)
        plgpu.commit_smem()
        fetch(end)

        def together(n, loaded):
            j = i + n * _TOGETHER
            where = tile, head, block, j, end
            return _attend_pairs(
                q, positions, out, lse, pairs, k_half, v_half, loaded, where, pair, scale
            )

        loaded = _load(pair, q.shape)(q, pairs, tile, head, i, end)
        lax.fori_loop(0, pl.cdiv(end - i, _TOGETHER), together, tuple(loaded))
        return end

    fetch(0)
    lax.while_loop(
        lambda i: (i < PAIRS) & (pairs[jnp.minimum(i, PAIRS - 1)] != END), run, jnp.int32(0)
    )


def _attend_pairs(
    q, positions, out, lse, pairs, k_half, v_half, loaded, where, pair: Pair, scale: float
):
    """Four pairs j .. j + 3 of a run that ends at `end`: warp w computes the w-th. Takes their
    loaded queries and returns those of the next four, which are then under way.
    """
    tile, head, block, j, end = where
    low, high = _queries(*loaded)

    def product(sums, a, b):
        for part, operand in zip(a, b, strict=True):
            plgpu.wgmma(sums, part, operand)
        return sums[...]

    transposed = [k_half.at[i].transpose((1, 0)) for i in (0, 1)]
    s = pl.run_scoped(
        functools.partial(product, a=(low, high), b=transposed),
        _ACC((64, _BLOCK), jnp.float32),
    )
    loaded = _load(pair, q.shape)(q, pairs, tile, head, j + _TOGETHER, end)
    s = _hide(pair, positions.shape)(s, positions, pairs, tile, block, j, end)
    x = s * (scale * LOG2E * DECODED)
    top = jnp.max(x, axis=1)
    reference = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp2(x - lax.broadcast_in_dim(reference, x.shape, [0]))
    total = jnp.sum(p, axis=1)
    weights = p.astype(jnp.float16)
    sums = pl.run_scoped(
        functools.partial(product, a=(weights,), b=(v_half,)),
        _ACC((64, _WIDTH), jnp.float32),
    )
    _store(pair, out.shape)(sums, top, total, out, lse, pairs, tile, head, j, end)
    return tuple(loaded)


def _run_end(bits: int):
    """The first pair after i that names another block."""

    @lanes.code(_REF, _INT, returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_INT))
    def find(_, pairs, i):
        base, start = lanes.address(pairs), lanes.scalar(i)
        block = lanes.load_words(base, start << 2, 1)[0] >> bits
        end = lanes.word(PAIRS)
        for first in reversed(range(0, PAIRS, 32)):
            at = start + lanes.lane() + first
            inside = at.below(PAIRS)
            key = lanes.load_words(base, lanes.select(inside, at, start) << 2, 1)[0]
            same = lanes.both(inside, (key >> bits).equals(block))
            found = lanes.first_lane(lanes.negate(same))
            end = lanes.select(found.below(32), start + found + first, end)
        return lanes.splat(end)

    return find


@lanes.code((plgpu.RefType(_RAW), _REF) * 2, plgpu.RefType(_HALF), plgpu.RefType(_HALF), _INT)
def _decode(_, raw, k_half, v_half, limit):
    k_codes, k_scales, v_codes, v_scales = (lanes.address(x) for x in raw)
    lanes.sync_warpgroup()  # all warps are done with the page before
    nvfp4_block.decode_keys(k_codes, k_scales, lanes.address(k_half))
    nvfp4_block.decode_values(v_codes, v_scales, lanes.address(v_half), lanes.scalar(limit))


def _own(pairs, j, end, pair: Pair) -> tuple[Word, Word]:
    """(query, slot) of this warp's pair; behind the end of the run that of the last one."""
    at, last = lanes.scalar(j) + lanes.warp(), lanes.scalar(end) + -1
    at = lanes.select(at.below(last), at, last)
    key = lanes.load_words(lanes.address(pairs), at << 2, 1)[0] & ((1 << pair.bits) - 1)
    return key >> pair.slot_bits, key & ((1 << pair.slot_bits) - 1)


def _load(pair: Pair, shape):
    @lanes.code(_REF, _REF, _INT, _INT, _INT, _INT, returns=[_FRAGMENT, _FRAGMENT])
    def load(_, q, pairs, tile, head, j, end):
        """bfloat16 bits: float16 in name only."""
        _, T, N, _ = shape
        query, _ = _own(pairs, j, end, pair)
        row = (lanes.scalar(tile) * T + query) * N + lanes.scalar(head) * _HEADS
        parts = half_block.load_queries(lanes.address(q, row << 8))
        return [lanes.half_accumulator(part) for part in parts]

    return load


@lanes.code(_WGMMA, _WGMMA, returns=[_FRAGMENT, _FRAGMENT])
def _queries(_, *loaded):
    parts = (lanes.half_fragments(x) for x in loaded)
    return [lanes.half_accumulator(half_block.queries(x, nvfp4_block.ORDER)) for x in parts]


def _hide(pair: Pair, shape):
    """-inf for keys after a query's own position; skipped by a warp that sees the whole block."""

    @lanes.code(
        _WGMMA,
        _REF,
        _REF,
        _INT,
        _INT,
        _INT,
        _INT,
        returns=plgpu.ShapeDtypeStruct((64, _BLOCK), jnp.float32, layout=_WGMMA),
    )
    def mask(_, s, positions, pairs, tile, block, j, end):
        query, _ = _own(pairs, j, end, pair)
        at = (lanes.scalar(tile) * shape[1] + query) << 2
        left = lanes.load_words(lanes.address(positions), at, 1)[0] + 1
        left = left + lanes.scalar(block) * -_BLOCK
        tiles = lanes.tiles_of(s)
        flat = lanes.branch(
            left.below(_BLOCK),
            lambda: [x for values in half_block.hide(tiles, 0, left) for x in values],
            [x for values in tiles for x in values],
        )
        return lanes.array_of([flat[i : i + 4] for i in range(0, len(flat), 4)])

    return mask


def _store(pair: Pair, shape):
    """A pair's partial result, float16, and its log-sum-exp."""

    @lanes.code(_WGMMA, _ROW, _ROW, _REF, _REF, _REF, _INT, _INT, _INT, _INT)
    def store(_, sums, top, total, out, lse, pairs, tile, head, j, end):
        _, T, K, C, _, _ = shape
        query, slot = _own(pairs, j, end, pair)
        number = ((lanes.scalar(tile) * T + query) * K + lanes.scalar(head)) * C + slot
        tops, totals = lanes.rows_of(top), lanes.rows_of(total)
        nothing, unit = lanes.real(0.0), lanes.real(DECODED)
        factors = [lanes.select(x.above(nothing), unit / x, nothing) for x in totals]
        g, t = lanes.lane() >> 2, lanes.lane() & 3

        def write():
            row = lanes.address(out, number << 12)
            tiles, order = lanes.tiles_of(sums), nvfp4_block.ORDER
            half_block.store_rows(tiles, factors, row, order, lanes.half2_of_reals)

        def write_lse():
            for half in (0, 1):
                value = (tops[half] + lanes.log2(totals[half])) * lanes.real(LN2)
                lanes.store_reals(lanes.address(lse, number << 6), (g + 8 * half) << 2, [value])

        inside = (lanes.scalar(j) + lanes.warp()).below(lanes.scalar(end))
        lanes.when(inside, write)
        lanes.when(lanes.both(inside, t.below(1)), write_lse)

    return store
