"""sparse_attention for few queries on Hopper: 16 query heads of one KV head against their own
NVFP4 pages.

Grid: a CTA, or a cluster, for each unit (`plan`). Pages come by the copy engine (18,432 bytes each:
K and V codes and scales) into a ring of each warpgroup. Each warp takes 32 tokens of every page
through scores, softmax and values in registers (`nvfp4_page`). The warps' results are merged at the
end of each part in the memory of its last page, while the next page is on its way; the parts' at
the end of the unit, wherever they are (`merge`).

Memory: 18,432 bytes a chosen block and KV head, 8 KB of queries and results, nothing else.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes, online_softmax
from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.pages import Pages, Source
from pallas_kernels.logarithms import LOG2E
from pallas_kernels.nvfp4_lanes import DECODED
from pallas_kernels.sparse_attention import merge, nvfp4_page
from pallas_kernels.sparse_attention.plan import PART, Plan, parts_of

_HEADS, _WIDTH, _BLOCK = 16, 128, 128
CODE_LINES, SCALE_LINES = 64, 8  # of one head
_WGMMA = plgpu.Layout.WGMMA
_ROW = _WGMMA.reduce(1)
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
    if parts_of(block_ids.shape[-1]) is None:
        return f"{block_ids.shape[-1]} chosen blocks, more than 32"
    if scale <= 0:
        return f"scale={scale} is not positive"
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
    units, parts = B * T * k.num_heads, parts_of(block_ids.shape[-1])
    assert parts is not None
    plan = Plan.of(units, parts)
    kernel = plgpu.kernel(
        lanes.named("sparse_attention_decode", _attend, plan=plan, scale=scale),
        out_type=shapes,
        grid=(units,),
        grid_names=("unit",),
        cluster=(plan.ctas,),
        cluster_names=("rank",),
        num_threads=plan.teams,
        thread_name="team",
        scratch_types=_scratch(plan),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # those that are needed stand in the code
        ),
    )
    return kernel(q, ids, table, at, *lines, k.pool)


def _scratch(plan: Plan) -> tuple:
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
    *, plan: Plan, scale: float,
):  # fmt: skip
    """A team's `codes`, `scales` and `there` hold the keys of its ring, then the values; `places`
    (page, tokens seen of it) of all of its blocks.
    """
    T, K, C = ids.shape[1:]
    ring, lines = plan.ring, (k_line[0], v_line[0])
    team = lax.axis_index("team")
    unit, member = lax.axis_index("unit"), lax.axis_index("rank") * plan.teams + team
    tile, query, head = unit // (T * K), lax.rem(unit // K, T), lax.rem(unit, K)
    heads = pl.ds(head * _HEADS, _HEADS)
    places, rows, parts = (x.at[team] for x in (all_places, all_rows, all_parts))
    ring_codes = all_codes.at[pl.ds(team * (2 * ring), 2 * ring)]

    def page_of(i, kind):
        """Codes, scales and barrier of the i-th page's keys (0) or values (1)."""
        n = team * (2 * ring) + kind * ring + lax.rem(i, ring)
        return all_codes.at[n], all_scales.at[n], all_there.at[n]

    def fetch_page(i):
        for kind, line in enumerate(lines):
            fetch(pool, places[2 * i], line, head, K, *page_of(i, kind))

    def refill(i):
        """Asks for the page that takes the place of the i-th, once all warps are done with it."""
        plgpu.commit_smem()
        _in_first_warp(i + ring < plan.pages, lambda: fetch_page(i + ring))

    def add_page(i, state):
        limit = places[2 * i + 1]
        codes, scales, there = page_of(i, 0)
        plgpu.barrier_wait(there)
        s = _scores(plan)(parts, codes, scales, limit)
        weights, sums, *rest = _soften(scale * LOG2E * DECODED)(s, *state)
        codes, scales, there = page_of(i, 1)
        plgpu.barrier_wait(there)
        sums = _add(sums, weights, codes, scales, limit)
        pl.when(lax.rem(i, PART) < PART - 1)(lambda: refill(i))
        return sums, *rest

    def add_part(part, _):
        sums = plgpu.layout_cast(jnp.zeros((64, _WIDTH), jnp.float32), _WGMMA)
        tops = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), _ROW)
        totals = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _ROW)
        end = (part + 1) * PART
        state = lax.fori_loop(part * PART, end, add_page, (sums, tops, totals))
        _merge_warps(ring)(*state, ring_codes, rows, parts, part, end - 1)
        refill(end - 1)

    _place(table.shape[1], C, plan)(
        ids.at[tile, query, head], table.at[tile], positions.at[tile], query, member, places
    )
    _in_first_warp(True, lambda: [fetch_page(jnp.int32(i)) for i in range(ring)])
    _load_queries(plan)(q.at[tile, query, heads], parts)
    lax.fori_loop(0, plan.together, add_part, None)
    finish = _merge_parts(plan)
    finish(all_parts, member, team, out.at[tile, query, heads], lse.at[tile, query, heads])


def _in_first_warp(condition, do) -> None:
    """Runs `do` in the first warp of the warpgroup if the condition holds; the others go on."""

    @plgpu.warp_map
    def _(warp):
        @pl.when((warp == 0) & condition)
        def _():
            do()


def fetch(pool, page, line, head, K: int, codes, scales, there) -> None:
    """Starts the copies of one head's codes and scales of a page: two arrivals."""
    at = line + head * CODE_LINES
    plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, CODE_LINES)], codes, there)
    at = line + K * CODE_LINES + head * SCALE_LINES
    plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, SCALE_LINES)], scales, there)


def _array(columns: int):
    return plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=_WGMMA)


def _queries_byte(plan: Plan) -> int:
    """Where the queries lie in a team's parts."""
    assert merge.PART_BYTES >= 2 * _HEADS * _WIDTH
    return (plan.together - 1) * merge.PART_BYTES


def _load_queries(plan: Plan):
    @lanes.code(_REF, _REF)
    def load(_, q, parts):
        to = lanes.address(parts, _queries_byte(plan))
        nvfp4_page.query_fragments(lanes.address(q), _WIDTH * 2, to)
        lanes.sync_warpgroup()

    return load


def _scores(plan: Plan):
    @lanes.code(_REF, _CODES, _REF, _INT, returns=_array(32))
    def run(_, parts, codes, scales, limit):
        queries = lanes.address(parts, _queries_byte(plan))
        codes, scales = lanes.address(codes), lanes.address(scales)
        return nvfp4_page.scores(queries, codes, scales, lanes.scalar(limit))

    return run


def _soften(unit: float):
    weights = plgpu.ShapeDtypeStruct((64, 32), jnp.float16, layout=_WGMMA)
    row = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=_ROW)

    @lanes.code(_WGMMA, _WGMMA, _ROW, _ROW, returns=(weights, _array(_WIDTH), row, row))
    def run(_, s, sums, tops, totals):
        return online_softmax.soften(s, unit, sums, tops, totals)

    return run


@lanes.code(_WGMMA, _WGMMA, _CODES, _REF, _INT, returns=_array(_WIDTH))
def _add(_, sums, weights, codes, scales, limit):
    codes, scales = lanes.address(codes), lanes.address(scales)
    return nvfp4_page.add_values(sums, weights, codes, scales, lanes.scalar(limit))


def _place(num_blocks: int, chosen: int, plan: Plan):
    """(page, tokens seen) of each block that this team takes, (0, 0) where there is none: one a
    thread, so that all are looked up at once.
    """

    @lanes.code(_REF, _REF, _REF, _INT, _INT, _REF)
    def place(_, ids, table, positions, query, member, places):
        i = lanes.thread()
        slot = i + lanes.scalar(member) * plan.pages

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
    """The place of a part's last page, keys and values, is the spare memory."""

    @lanes.code(_WGMMA, _ROW, _ROW, _CODES, _REF, _REF, _INT, _INT)
    def run(_, sums, tops, totals, codes, rows, parts, part, page):
        size = CODE_LINES * 128
        assert size == 2 * merge.ROUND_BYTES
        page = lanes.scalar(page)
        slot = page + (page // ring) * -ring
        spare = [
            lanes.address(codes, slot * size + (kind * ring * size + i * merge.ROUND_BYTES))
            for kind in (0, 1)
            for i in (0, 1)
        ]
        own = (lanes.warp() >> 1) * (ring * size) + ((lanes.warp() & 1) * merge.ROUND_BYTES)
        to = lanes.address(parts, lanes.scalar(part) * merge.PART_BYTES)
        lanes.sync_warpgroup()  # all warps are done with the page
        state, own = (sums, tops, totals), lanes.at(spare[0], own)
        merge.merge_warps(*state, spare, own, lanes.address(rows), to)

    return run


def _merge_parts(plan: Plan):
    @lanes.code(_REF, _INT, _INT, _REF, _REF)
    def run(_, all_parts, member, team, out, lse):
        base = lanes.address(all_parts)
        sync = lanes.sync_block if plan.teams > 1 else lanes.sync_warpgroup
        sync = lanes.sync_cluster if plan.ctas > 1 else sync
        sync()
        bases = [lanes.in_cluster(base, i) for i in range(plan.ctas)] if plan.ctas > 1 else [base]
        own = range(plan.teams * plan.together)
        pieces = [lanes.at(x, i * merge.PART_BYTES) for x in bases for i in own]
        tiles = 16 // plan.spread  # of this warpgroup
        to = lanes.address(out), lanes.address(lse)
        first = lanes.scalar(member) * tiles
        finish = functools.partial(merge.merge_parts, pieces, first, tiles, DECODED, *to)
        lanes.when(lanes.warp().below(merge.warps(tiles)), finish)
        if plan.ctas > 1:
            sync()  # nobody leaves while its shared memory is read

    return run
