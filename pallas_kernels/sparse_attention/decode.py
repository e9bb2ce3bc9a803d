"""sparse_attention for few queries on Hopper: 16 query heads of one KV head against their own
NVFP4 pages.

A unit is a query and KV head; its chosen blocks are cut into parts of `PART` blocks, whatever the
batch, so that no order of summation depends on it. Grid: a cluster of CTAs (one warpgroup each) for
each unit; a CTA takes one part of a small batch, all parts of a large one. Pages come by the copy
engine (18,432 bytes each: K and V codes and scales) into a ring of two or four; each warp
takes 32 tokens of every page through scores, softmax and values in registers (`nvfp4_page`). The
warps' results are merged at the end of each part, the parts' at the end of the unit, across the
cluster if need be (`merge`).

Memory: 18,432 bytes a chosen block and KV head, 8 KB of queries and results, nothing else.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.pages import Pages, Source
from pallas_kernels.nvfp4_lanes import DECODED
from pallas_kernels.sparse_attention import merge, nvfp4_page

PART = 4  # pages
_HEADS, _WIDTH, _BLOCK = 16, 128, 128
CODE_LINES, SCALE_LINES = 64, 8  # of one head
_LOG2E = 1.4426950408889634
_MULTIPROCESSORS = 132  # of an H200
_MIN_CTAS = 256  # nearly two for each
_TEAMS = 4
_SLACK = 8.0  # a maximum is followed once it grows 2^8: float16 weights stay below 256
_ROW = plgpu.Layout.WGMMA.reduce(1)
_SWIZZLED = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_REF, _CODES, _INT = lanes.REF, plgpu.RefType(_SWIZZLED), lanes.SCALAR


def refuse(q, k, v, block_ids, block_table, positions, *, scale) -> str | None:
    """A sentence for what this kernel does not do."""
    if reason := refuse_device():
        return reason
    for source in (k, v):
        if not isinstance(source, Pages) or source.component.format != "nvfp4":
            return "keys and values are not NVFP4 pages"
        if source.compute != "exact":
            return f"cache compute {source.compute!r} is not 'exact'"
        if (source.block_size, source.component.width) != (_BLOCK, _WIDTH):
            return f"pages of {source.block_size} x {source.component.width}, not 128 x 128"
        if source.pool.shape[1] % 8:
            return f"rows of {source.pool.shape[1]} lines, not whole tiles of 8"
    if q.dtype != jnp.bfloat16:
        return f"queries are {q.dtype}, not bfloat16"
    if q.shape[2] != _HEADS * k.num_heads:
        return f"{q.shape[2]} query heads for {k.num_heads} KV heads, not 16 for each"
    if _parts(block_ids.shape[-1]) is None:
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
    lines = [jnp.asarray(x.line, jnp.int32).reshape(1) for x in (k, v)]
    ids, table, at = (x.astype(jnp.int32) for x in (block_ids, block_table, positions))
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
    )
    units = B * T * k.num_heads
    parts = _parts(block_ids.shape[-1])
    assert parts is not None
    plan = _Plan.of(units, parts)
    kernel = plgpu.kernel(
        lanes.named("sparse_attention_decode", _attend, plan=plan, units=units, scale=scale),
        out_type=shapes,
        grid=(-(-units // plan.teams),),
        grid_names=("cluster",),
        cluster=(plan.parts // plan.together,),
        cluster_names=("rank",),
        num_threads=plan.teams,
        thread_name="team",
        scratch_types=_scratch(plan),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
    )
    return kernel(q, ids, table, at, *lines, k.pool)


def _parts(chosen: int) -> int | None:
    """Parts of a unit: a power of two, at most 8 (a cluster's portable limit)."""
    return next((n for n in (1, 2, 4, 8) if n * PART >= chosen), None)


@dataclass(frozen=True)
class _Plan:
    """How a unit's parts are spread; what is added to what does not depend on it."""

    parts: int  # of a unit
    together: int  # of these, what one warpgroup takes, one after the other
    teams: int  # warpgroups of a CTA, each with units of its own

    @classmethod
    def of(cls, units: int, parts: int) -> "_Plan":
        """As many parts together as leave `_MIN_CTAS` CTAs. Where whole units fill the device,
        four warpgroups in a CTA: the compiler then keeps to 128 registers, so that 16 warps are
        resident and not 12.
        """
        if units >= _TEAMS * _MULTIPROCESSORS:
            return cls(parts=parts, together=parts, teams=_TEAMS)
        together = 1
        while together < parts and units * parts >= 2 * together * _MIN_CTAS:
            together *= 2
        return cls(parts=parts, together=together, teams=1)

    @property
    def ring(self) -> int:
        """Pages in flight for a warpgroup: two where shared memory is for four of them."""
        return PART if self.teams == 1 else 2

    @property
    def pages(self) -> int:
        """Pages that a warpgroup takes."""
        return self.together * PART


def _scratch(plan: _Plan) -> tuple:
    """The queries lie where the last part's result will."""
    pages = plan.teams * 2 * plan.ring
    return (
        plgpu.SMEM((pages, CODE_LINES, 128), jnp.uint8, transforms=_SWIZZLED),
        plgpu.SMEM((pages, SCALE_LINES, 128), jnp.uint8),
        plgpu.SMEM((plan.teams, 2 * plan.pages), jnp.int32),
        plgpu.SMEM((plan.teams, merge.ROWS_BYTES), jnp.uint8),
        plgpu.SMEM((plan.teams, plan.together * merge.PART_BYTES), jnp.uint8),
        plgpu.Barrier(num_arrivals=2, num_barriers=pages),
    )


def _attend(
    q, ids, table, positions, k_line, v_line, pool, out, lse,
    all_codes, all_scales, all_places, all_rows, all_parts, all_there,
    *, plan: _Plan, units: int, scale: float,
):  # fmt: skip
    """A team's `codes`, `scales` and `there` hold the keys of its ring, then the values; `places`
    (page, tokens seen of it) of all of its blocks.
    """
    T, K, C = ids.shape[1:]
    ring = plan.ring
    team, rank = lax.axis_index("team"), lax.axis_index("rank")
    unit = jnp.minimum(lax.axis_index("cluster") * plan.teams + team, units - 1)
    tile, query, head = unit // (T * K), lax.rem(unit // K, T), lax.rem(unit, K)
    places, rows, parts = (x.at[team] for x in (all_places, all_rows, all_parts))

    def page_of(i, kind):
        """Codes, scales and barrier of the i-th page's keys (0) or values (1)."""
        n = team * (2 * ring) + kind * ring + lax.rem(i, ring)
        return all_codes.at[n], all_scales.at[n], all_there.at[n]

    def start(*pages):
        """Copies pages to their places in the ring."""

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                for i in pages:
                    for kind, line in enumerate((k_line[0], v_line[0])):
                        fetch(pool, places[2 * i], line, head, K, *page_of(i, kind))

    def add_page(i, state):
        limit = places[2 * i + 1]
        codes, scales, there = page_of(i, 0)
        plgpu.barrier_wait(there)
        s = _scores(plan)(parts, codes, scales, limit)
        weights, (sums, tops, totals) = _softmax(s * (scale * _LOG2E * DECODED), state)
        codes, scales, there = page_of(i, 1)
        plgpu.barrier_wait(there)
        state = _add(sums, weights, codes, scales, limit), tops, totals

        @pl.when((lax.rem(i, PART) < PART - 2) & (i + ring < plan.pages))
        def _():
            plgpu.commit_smem()  # all warps are done with the page
            start(i + ring)

        return state

    def add_part(part, _):
        sums = plgpu.layout_cast(jnp.zeros((64, _WIDTH), jnp.float32), plgpu.Layout.WGMMA)
        tops = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), _ROW)
        totals = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _ROW)
        end = (part + 1) * PART
        state = lax.fori_loop(part * PART, end, add_page, (sums, tops, totals))
        ring_codes = all_codes.at[pl.ds(team * (2 * ring), 2 * ring)]
        _merge_warps(ring)(*state, ring_codes, rows, parts, part)

        @pl.when(part + 1 < plan.together)
        def _():  # the last two pages of a part lend their memory to its end
            plgpu.commit_smem()
            start(end - 2 + ring, end - 1 + ring)

    _place(table.shape[1], C, plan)(
        ids.at[tile, query, head], table.at[tile], positions.at[tile], query, rank, places
    )
    start(*(jnp.int32(i) for i in range(ring)))
    _load_queries(plan)(q.at[tile, query, pl.ds(head * _HEADS, _HEADS)], parts)
    lax.fori_loop(0, plan.together, add_part, None)
    heads = pl.ds(head * _HEADS, _HEADS)
    finish = _merge_parts(plan)
    finish(parts, rank, out.at[tile, query, heads], lse.at[tile, query, heads])


def fetch(pool, page, line, head, K: int, codes, scales, there) -> None:
    """Starts the copies of one head's codes and scales of a page: two arrivals."""
    at = line + head * CODE_LINES
    plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, CODE_LINES)], codes, there)
    at = line + K * CODE_LINES + head * SCALE_LINES
    plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, SCALE_LINES)], scales, there)


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


def _queries_byte(plan: _Plan) -> int:
    """Where the queries lie in a team's parts."""
    assert merge.PART_BYTES >= 2 * _HEADS * _WIDTH
    return (plan.together - 1) * merge.PART_BYTES


def _load_queries(plan: _Plan):
    @lanes.code(_REF, _REF)
    def load(_, q, parts):
        to = lanes.address(parts, _queries_byte(plan))
        nvfp4_page.query_fragments(lanes.address(q), _WIDTH * 2, to)
        lanes.sync_warpgroup()

    return load


def _scores(plan: _Plan):
    @lanes.code(_REF, _CODES, _REF, _INT, returns=_array((64, 32)))
    def run(_, parts, codes, scales, limit):
        queries = lanes.address(parts, _queries_byte(plan))
        codes, scales = lanes.address(codes), lanes.address(scales)
        return nvfp4_page.scores(queries, codes, scales, lanes.scalar(limit))

    return run


@lanes.code(
    plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, _CODES, _REF, _INT, returns=_array((64, _WIDTH))
)
def _add(_, sums, weights, codes, scales, limit):
    codes, scales = lanes.address(codes), lanes.address(scales)
    return nvfp4_page.add_values(sums, weights, codes, scales, lanes.scalar(limit))


@lanes.code(plgpu.Layout.WGMMA, _ROW, returns=_array((64, _WIDTH)))
def _rescale(_, sums, factors):
    """Skipped by a warp whose maxima stayed."""
    return nvfp4_page.rescale(sums, factors)


def _place(num_blocks: int, chosen: int, plan: _Plan):
    """(page, tokens seen) of each block that this CTA takes, (0, 0) where there is none: one a
    thread, so that all are looked up at once.
    """

    @lanes.code(_REF, _REF, _REF, _INT, _INT, _REF)
    def place(_, ids, table, positions, query, rank, places):
        i = lanes.thread()
        slot = i + lanes.scalar(rank) * plan.pages

        def write():
            inside = slot.below(chosen)
            at = lanes.select(inside, slot, lanes.word(0)) << 2
            block = lanes.load_words(lanes.address(ids), at, 1)[0]
            known = lanes.both(lanes.word(-1).below(block), block.below(num_blocks))
            inside = lanes.both(inside, known)
            block = lanes.select(inside, block, lanes.word(0))
            page = lanes.load_words(lanes.address(table), block << 2, 1)[0]
            position = lanes.load_words(lanes.address(positions), lanes.scalar(query) << 2, 1)[0]
            inside = lanes.both(inside, lanes.word(-1).below(page))
            seen = position + block * -_BLOCK + 1
            nothing = lanes.word(0)
            pair = [lanes.select(inside, page, nothing), lanes.select(inside, seen, nothing)]
            lanes.store_words(lanes.address(places), i << 3, pair)

        lanes.when(i.below(plan.pages), write)
        lanes.sync_warpgroup()

    return place


def _merge_warps(ring: int):
    """The places of a part's last two pages, keys and values, are the spare memory."""

    @lanes.code(plgpu.Layout.WGMMA, _ROW, _ROW, _CODES, _REF, _REF, _INT)
    def run(_, sums, tops, totals, codes, rows, parts, part):
        assert CODE_LINES * 128 == merge.WARP_BYTES and PART % ring == 0
        pages = (ring - 2, ring - 1, 2 * ring - 2, 2 * ring - 1)
        spare = [lanes.address(codes, page * merge.WARP_BYTES) for page in pages]
        to = lanes.address(parts, lanes.scalar(part) * merge.PART_BYTES)
        merge.merge_warps(sums, tops, totals, spare, lanes.address(rows), to)

    return run


def _merge_parts(plan: _Plan):
    @lanes.code(_REF, _INT, _REF, _REF)
    def run(_, parts, rank, out, lse):
        ctas = plan.parts // plan.together
        base = lanes.address(parts)
        sync = lanes.sync_cluster if ctas > 1 else lanes.sync_warpgroup
        sync()
        bases = [lanes.in_cluster(base, i) for i in range(ctas)] if ctas > 1 else [base]
        all_parts = [lanes.at(x, i * merge.PART_BYTES) for x in bases for i in range(plan.together)]
        tiles = 16 // ctas  # of this CTA
        to = lanes.address(out), lanes.address(lse)

        def finish():
            merge.merge_parts(all_parts, lanes.scalar(rank) * tiles, tiles, DECODED, *to)

        lanes.when(lanes.warp().below(tiles), finish)
        if ctas > 1:
            sync()  # nobody leaves while its shared memory is read

    return run
