"""sparse_attention for few queries on Hopper: 16 query heads of one KV head against their own
NVFP4 pages.

Grid: one cluster of S CTAs (one warpgroup each) for each query and KV head; a CTA takes four of the
chosen blocks, so S = ceil(C / 4) whatever the batch: no order of summation depends on it. A CTA
starts all of its copies at once (18,432 bytes a page: K and V codes and scales), then each warp
takes 32 tokens of every page through scores, softmax and values in registers (`nvfp4_page`); 4 S
partial results are merged in shared memory across the cluster (`merge`).

Memory: 18,432 bytes a chosen block and KV head, 8 KB of queries and results, nothing else.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.layouts.pages import Pages, Source
from pallas_kernels.nvfp4_lanes import DECODED
from pallas_kernels.sparse_attention import merge, nvfp4_page

PAGES = 4  # of one CTA
_HEADS, _WIDTH, _BLOCK = 16, 128, 128
_CODE_LINES, _SCALE_LINES = 64, 8  # of one head
_LOG2E = 1.4426950408889634
_SLACK = 8.0  # a maximum is followed once it grows 2^8: float16 weights stay below 256
_ROW = plgpu.Layout.WGMMA.reduce(1)
_SWIZZLED = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_REF, _CODES, _INT = plgpu.RefType(), plgpu.RefType(_SWIZZLED), plgpu.Layout.WG_SPLAT(())


def refuse(q, k, v, block_ids, block_table, positions, *, scale) -> str | None:
    """A sentence for what this kernel does not do."""
    for source in (k, v):
        if not isinstance(source, Pages) or source.component.format != "nvfp4":
            return "keys and values are not NVFP4 pages"
        if source.compute != "exact":
            return f"cache compute {source.compute!r} is not 'exact'"
        if (source.block_size, source.component.width) != (_BLOCK, _WIDTH):
            return f"pages of {source.block_size} x {source.component.width}, not 128 x 128"
    if q.dtype != jnp.bfloat16:
        return f"queries are {q.dtype}, not bfloat16"
    if q.shape[2] != _HEADS * k.num_heads:
        return f"{q.shape[2]} query heads for {k.num_heads} KV heads, not 16 for each"
    if _splits(block_ids.shape[-1]) is None:
        return f"{block_ids.shape[-1]} chosen blocks, more than 32"
    return None


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
    B, T, N, _ = q.shape
    lines = jnp.stack([k.line, v.line]).astype(jnp.int32)
    ids, table, at = (x.astype(jnp.int32) for x in (block_ids, block_table, positions))
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
    )
    splits = _splits(block_ids.shape[-1])
    assert splits is not None
    kernel = plgpu.kernel(
        functools.partial(_attend, splits=splits, scale=scale),
        out_type=shapes,
        grid=(B * T * k.num_heads,),
        grid_names=("unit",),
        cluster=(splits,),
        cluster_names=("split",),
        scratch_types=_scratch(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
    )
    return kernel(q, ids, table, at, lines, k.pool)


def _splits(chosen: int) -> int | None:
    """CTAs of a cluster: a power of two, at most 8 (the portable limit)."""
    return next((s for s in (1, 2, 4, 8) if s * PAGES >= chosen), None)


def _scratch() -> tuple:
    codes = plgpu.SMEM((PAGES, _CODE_LINES, 128), jnp.uint8, transforms=_SWIZZLED)
    scales = plgpu.SMEM((PAGES, _SCALE_LINES, 128), jnp.uint8)
    arrivals = plgpu.Barrier(num_arrivals=2, num_barriers=PAGES)
    queries = plgpu.SMEM((_HEADS * _WIDTH,), jnp.float16)
    rest = plgpu.SMEM((merge.SCRATCH_BYTES,), jnp.uint8)
    return codes, scales, codes, scales, queries, rest, arrivals, arrivals


def _attend(
    q, ids, table, positions, lines, pool, out, lse,
    k_codes, k_scales, v_codes, v_scales, queries, scratch, k_there, v_there,
    *, splits: int, scale: float,
):  # fmt: skip
    T, K, C = ids.shape[1:]
    unit, split = lax.axis_index("unit"), lax.axis_index("split")
    tile, query, head = unit // (T * K), lax.rem(unit // K, T), lax.rem(unit, K)
    limits = []
    for i in range(PAGES):
        page, limit = _place(ids, table, positions, tile, query, head, split * PAGES + i, C)
        limits.append(limit)
        for part, (codes, scales, there) in enumerate(
            ((k_codes, k_scales, k_there), (v_codes, v_scales, v_there))
        ):
            first = lines[part]
            at = first + head * _CODE_LINES
            plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, _CODE_LINES)], codes.at[i], there.at[i])
            at = first + K * _CODE_LINES + head * _SCALE_LINES
            plgpu.copy_gmem_to_smem(
                pool.at[page, pl.ds(at, _SCALE_LINES)], scales.at[i], there.at[i]
            )
    _load_queries(q.at[tile, query, pl.ds(head * _HEADS, _HEADS)], queries)

    sums = plgpu.layout_cast(jnp.zeros((64, _WIDTH), jnp.float32), plgpu.Layout.WGMMA)
    tops = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), _ROW)
    totals = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _ROW)
    state = sums, tops, totals
    for i in range(PAGES):
        plgpu.barrier_wait(k_there.at[i])
        s = _scores(queries, k_codes.at[i], k_scales.at[i], limits[i])
        weights, state = _softmax(s * (scale * _LOG2E * DECODED), state)
        plgpu.barrier_wait(v_there.at[i])
        state = (_add(state[0], weights, v_codes.at[i], v_scales.at[i], limits[i]), *state[1:])
    rows = pl.ds(head * _HEADS, _HEADS)
    _merge(splits)(*state, scratch, split, out.at[tile, query, rows], lse.at[tile, query, rows])


def _place(ids, table, positions, tile, query, head, i, chosen: int):
    """(physical page, tokens seen of it) of a chosen block; (0, 0) where there is none."""
    block = jnp.where(i < chosen, ids[tile, query, head, jnp.minimum(i, chosen - 1)], -1)
    page = table[tile, jnp.maximum(block, 0)]
    some = (block >= 0) & (page >= 0)
    seen = jnp.clip(positions[tile, query] + 1 - block * _BLOCK, 0, _BLOCK)
    return jnp.where(some, page, 0), jnp.where(some, seen, 0)


def _softmax(x, state):
    """float16 weights of scores x (in powers of two), and the state rescaled to their maximum."""
    sums, tops, totals = state
    new = jnp.max(x, axis=1)
    new = jnp.where(new > tops + _SLACK, new, tops)
    factor = jnp.where(new == tops, 1.0, jnp.exp2(tops - new))
    reference = jnp.where(new == -jnp.inf, 0.0, new)
    p = jnp.exp2(x - lax.broadcast_in_dim(reference, x.shape, [0]))
    totals = totals * factor + jnp.sum(p, axis=1)
    return p.astype(jnp.float16), (_rescale(sums, factor), new, totals)


def _array(shape, dtype=jnp.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)


@plgpu.inline_mgpu(arg_types=(_REF, _REF))
def _load_queries(_, q, queries):
    nvfp4_page.query_fragments(lanes.address(q), _WIDTH * 2, lanes.address(queries))
    lanes.sync_warpgroup()


@plgpu.inline_mgpu(arg_types=(_REF, _CODES, _REF, _INT), return_type=_array((64, 32)))
def _scores(_, queries, codes, scales, limit):
    at = (lanes.address(x) for x in (queries, codes, scales))
    return nvfp4_page.scores(*at, lanes.scalar(limit))


@plgpu.inline_mgpu(
    arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, _CODES, _REF, _INT),
    return_type=_array((64, _WIDTH)),
)
def _add(_, sums, weights, codes, scales, limit):
    at = (lanes.address(x) for x in (codes, scales))
    return nvfp4_page.add_values(sums, weights, *at, lanes.scalar(limit))


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _ROW), return_type=_array((64, _WIDTH)))
def _rescale(_, sums, factors):
    """Skipped by a warp whose maxima stayed."""
    return nvfp4_page.rescale(sums, factors)


def _merge(splits: int):
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _ROW, _ROW, _REF, _INT, _REF, _REF))
    def run(_, sums, tops, totals, scratch, rank, out, lse):
        at = lanes.address(out), lanes.address(lse)
        unit = DECODED
        merge.merge(sums, tops, totals, scratch, splits, lanes.scalar(rank), unit, *at)

    return run
