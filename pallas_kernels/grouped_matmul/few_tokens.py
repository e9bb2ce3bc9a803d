"""Products of at most 8 tokens with the experts that they meet, and with the shared expert: the
tokens' rows stay in shared memory, and one launch has both kinds of weights.

A unit of work is 64 weight rows of one expert, all of K. Grid: one CTA a multiprocessor. It finds
the groups by itself (`few_groups`), has an equal, contiguous part of the experts' units, so of two
groups at most; its four teams take them in turn (`few_plan`). A CTA may have a unit of the shared
expert too, which comes first (`shared_units`). MXFP8 codes, then pages come through a ring of its
own for each team, some steps ahead, across units. So no team waits for another one, but for the
rows at the start. Each team's copies are a warp's, another one's each, since a multiprocessor's
schedulers, of which each has a warp of every team, have no time to lose.

Memory: 0.5625 bytes a weight and expert met, 1.03 of the shared one; results once.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.grouped_matmul import shared_lanes
from pallas_kernels.grouped_matmul.few_groups import COUNT, LIST, list_groups, store_places
from pallas_kernels.grouped_matmul.few_plan import KEPT, SLOT, TABLES, TEAMS, WIDE, FewTokens, Turns
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.launch import MULTIPROCESSORS, SWIZZLED
from pallas_kernels.grouped_matmul.matching_rows import SLAB, load_first_rows, load_sorted_rows
from pallas_kernels.grouped_matmul.page_lanes import decoded
from pallas_kernels.grouped_matmul.shared_units import SharedUnit, sync_team
from pallas_kernels.layouts.nvfp4_pages import LINE, LINES, ROWS

_COPIES = 2  # of a step, and of a table


def kernel(plan: FewTokens, dtype: Any) -> Any:
    """A function of (rows, ids, two matrices' pages, their scales[, two matrices of the shared
    expert, each as codes and exponents]), to results, and if rows are tokens to pairs' places.
    """
    slots, lines = TEAMS * plan.ring, (SLOT // shared_lanes.COLUMNS, shared_lanes.COLUMNS)
    rows = plan.eights * plan.launch.columns // SLAB, EIGHT, SLAB
    return plgpu.kernel(
        lanes.named("few_tokens_down" if plan.by_group else "few_tokens_gate_up", _program, plan),
        out_type=plan.launch.out,
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=TEAMS,
        thread_name="team",
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM((slots, 2, WIDE, LINES, LINE), jnp.uint8),
                plgpu.SMEM((slots, *lines), jnp.float8_e4m3fn, transforms=shared_lanes.CODES),
            ),
            plgpu.SMEM((TEAMS * TABLES, 2, ROWS, shared_lanes.TABLE), jnp.uint8),
            plgpu.SMEM(rows, dtype, transforms=SWIZZLED),
            plgpu.SMEM((LIST,), jnp.int32),
            plgpu.Barrier(num_arrivals=_COPIES, num_barriers=slots),
            plgpu.Barrier(num_arrivals=_COPIES, num_barriers=TEAMS * TABLES),
            plgpu.SMEM((KEPT,), jnp.float32),
            plgpu.Barrier(num_arrivals=1),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # those that are needed stand in the code
        ),
    )


def _program(
    plan: FewTokens, x, ids, first_pages, second_pages, first_scales, second_scales, *refs
):
    *refs, memory, tables, rows, found, there, table_there, last_part, last_there = refs
    pages, codes = memory
    matrices = list(zip(refs[0:4:2], refs[1:4:2], strict=True)) if plan.part else []
    out, *place = refs[4:] if plan.part else refs
    launch, ring = plan.launch, plan.ring
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    units, steps, slabs = launch.units(1), launch.steps(WIDE), launch.columns // SLAB

    shared_unit, shared_end = _part(cta, units.count if matrices else 0)
    shared = SharedUnit(
        plan=plan,
        matrices=matrices,
        codes=codes,
        tables=tables,
        rows=rows,
        there=there,
        table_there=table_there,
        last_part=last_part,
        last_there=last_there,
        team=team,
        page=shared_unit * units.stride,
        exists=shared_unit < shared_end,
    )
    before = shared.count  # steps of the ring
    for n in range(ring):
        lanes.in_one_warp(team, n < before, partial(shared.fetch, jnp.int32(n)))

    list_groups(plan.pairs, plan.experts)(ids, found, TEAMS - 1 - team)
    _sync_block()
    first, end = _part(cta, found[COUNT] * units.count)
    first_group, last_group = lax.div(first, units.count), lax.div(end - 1, units.count)
    turns = Turns(count=end - first, has_shared=shared.exists, team=team)
    own = turns.own

    def unit(i):
        """Group, expert and first page of this team's i-th unit, if it has so many."""
        u = jnp.minimum(first + turns.unit(i), end - 1)
        group = lax.div(u, units.count)
        return group, found[group], (u - group * units.count) * units.stride

    def fetch(n, s, expert, page):
        """Starts the copies of step s of a unit, the n-th step of this team."""
        slot = team * ring + lax.rem(n, ring)
        for half, (weights, at) in enumerate(
            ((first_pages, page), (second_pages, page + units.apart))
        ):
            source = weights.at[expert, at, pl.ds(s * WIDE, WIDE)]
            plgpu.copy_gmem_to_smem(source, pages.at[slot, half], there.at[slot])

    def multiply(i, carry):
        expert, page = carry
        group, _, _ = unit(i)
        _, next_expert, next_page = unit(i + 1)
        eight, start = plan.rows_at(group - first_group)

        def products(sums):
            def step(s, carry):
                n = before + i * steps + s
                slot = team * ring + lax.rem(n, ring)
                plgpu.barrier_wait(there.at[slot])
                for c in range(WIDE):
                    halves = pages.at[slot, 0], pages.at[slot, 1]
                    for half, a in enumerate(decoded(c, *halves, x.dtype)):
                        operand = rows.at[eight * slabs + 2 * (s * WIDE + c) + half]
                        plgpu.wgmma(sums, a, operand.transpose((1, 0)))
                sync_team()  # every warp has read the step: the next one may take its place
                ahead = s + ring
                is_next = ahead >= steps
                next_step = jnp.where(is_next, ahead - steps, ahead)
                pages_at = (
                    jnp.where(is_next, next_expert, expert),
                    jnp.where(is_next, next_page, page),
                )
                refill = partial(fetch, n, next_step, *pages_at)
                lanes.in_one_warp(team, jnp.logical_not(is_next) | (i + 1 < own), refill)
                plgpu.wgmma_wait(0)
                return carry

            lax.fori_loop(0, steps, step, None)
            return sums[...]

        sums = plgpu.ACC((64, EIGHT), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums = pl.run_scoped(products, sums)
        kept = group * EIGHT - start, start, start + plan.tokens
        last = launch.last(second_scales[expert], units.apart)
        launch.store(sums, out, page, *kept, first_scales[expert], last)
        return next_expert, next_page

    start = unit(0)[1:]

    def fetch_first(n):
        lanes.in_one_warp(team, (n >= before) & (own > 0), partial(fetch, n, n - before, *start))

    def refill_shared(q):
        lanes.in_one_warp(team, q + ring < before, partial(shared.fetch, q + ring))
        fetch_first(q + ring)

    for n in range(ring):
        fetch_first(jnp.int32(n))
    if place:
        places = plan.pairs, plan.experts, plan.choices, plan.shared_place + EIGHT
        store_places(*places)(ids, *place, cta * TEAMS + team)
    _load(plan, x, rows, (first_group, last_group), team)
    plgpu.commit_smem()
    _sync_block()
    if matrices:
        shared.multiply(refill_shared, out)
    lax.fori_loop(0, own, multiply, start)


def _part(cta: Any, total: Any) -> tuple[Any, Any]:
    """First and end of this CTA's units."""
    return lax.div(cta * total, MULTIPROCESSORS), lax.div((cta + 1) * total, MULTIPROCESSORS)


def _load(plan: FewTokens, x: Any, rows: Any, groups: tuple[Any, Any], team: Any) -> None:
    """The rows of this CTA's groups, and of the shared expert."""
    columns = plan.launch.columns
    if not plan.by_group:
        load_first_rows(plan.tokens, columns, TEAMS, SWIZZLED)(x, rows, team)
        return
    first, last = groups
    slabs = columns // SLAB
    load = load_sorted_rows(plan.tokens, x.shape, TEAMS, SWIZZLED)

    def load_at(j: int, place: Any) -> None:
        eight, start = plan.rows_at(jnp.int32(j))
        load(x, rows, place, eight * slabs, start, team)

    load_at(0, first * EIGHT)
    load_at(1, last * EIGHT)
    if plan.part is not None:
        load_at(2, jnp.int32(plan.shared_place))


def _sync_block() -> None:
    @lanes.code()
    def sync(_):
        lanes.sync_block()

    sync()
