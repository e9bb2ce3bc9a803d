"""Products of at most 8 tokens with the experts that they meet, and with the shared expert: the
tokens' rows stay in shared memory, and one launch has both kinds of weights.

A unit of work is 64 weight rows of one expert, all of K. Grid: one CTA a multiprocessor. It finds
the groups by itself (`few_groups`), has an equal, contiguous part of the experts' units, so of two
groups at most, and of the shared expert's; its four teams take units in turn, the experts' first.
Pages, or MXFP8 codes (`shared_units`), come through a ring of its own for each, some steps ahead,
across units. So no team waits for another one, but for the rows at the start.

Memory: 0.5625 bytes a weight and expert met, 1.03 of the shared one; results once.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.grouped_matmul import shared_lanes
from pallas_kernels.grouped_matmul.few_groups import COUNT, LIST, list_groups, store_places
from pallas_kernels.grouped_matmul.few_plan import SLOT, TABLES, TEAMS, WIDE, FewTokens
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.launch import MULTIPROCESSORS, SWIZZLED
from pallas_kernels.grouped_matmul.matching_rows import SLAB, load_first_rows, load_sorted_rows
from pallas_kernels.grouped_matmul.page_lanes import decoded
from pallas_kernels.grouped_matmul.shared_units import SharedUnits, sync_team
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
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _program(
    plan: FewTokens, x, ids, first_pages, second_pages, first_scales, second_scales, *refs
):
    *refs, memory, tables, rows, found, there, table_there = refs
    pages, codes = memory
    matrices = list(zip(refs[0:4:2], refs[1:4:2], strict=True)) if plan.part else []
    out, *place = refs[4:] if plan.part else refs
    launch, ring = plan.launch, plan.ring
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    units, steps, slabs = launch.units(1), launch.steps(WIDE), launch.columns // SLAB

    list_groups(plan.pairs, plan.experts)(ids, found, team)
    _sync_block()
    total = found[COUNT] * units.count
    first, end = _part(cta, total)
    first_group, last_group = lax.div(first, units.count), lax.div(end - 1, units.count)
    own = lax.div(end - first - team + (TEAMS - 1), TEAMS)
    shared_first, shared_end = _part(cta, units.count if matrices else 0)
    all_own = lax.div(end - first + shared_end - shared_first - team + (TEAMS - 1), TEAMS)
    shared = SharedUnits(
        plan=plan,
        matrices=matrices,
        codes=codes,
        tables=tables,
        rows=rows,
        there=there,
        table_there=table_there,
        team=team,
        first=shared_first + team + own * TEAMS - (end - first),
        stride=TEAMS,
        count=all_own - own,
        steps_before=own * steps,
    )

    def unit(i):
        """Group, expert and first page of this team's i-th unit, if it has so many."""
        u = jnp.minimum(first + team + i * TEAMS, end - 1)
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
                n = i * steps + s
                slot = team * ring + lax.rem(n, ring)
                plgpu.barrier_wait(there.at[slot])
                for c in range(WIDE):
                    halves = pages.at[slot, 0], pages.at[slot, 1]
                    for half, a in enumerate(decoded(c, *halves, x.dtype)):
                        operand = rows.at[eight * slabs + 2 * (s * WIDE + c) + half]
                        plgpu.wgmma(sums, a, operand.transpose((1, 0)))
                sync_team()  # every warp has read the step: the next one may take its place
                ahead = s + ring

                @pl.when(ahead < steps)
                def _():
                    fetch(n, ahead, expert, page)

                @pl.when((ahead >= steps) & (i + 1 < own))
                def _():
                    fetch(n, ahead - steps, next_expert, next_page)

                @pl.when((ahead >= steps) & (i + 1 == own))
                def _():
                    shared.fetch(ahead - steps)

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

    def multiply_shared(i, carry):
        shared.multiply(i, out)
        return carry

    start = unit(0)[1:]
    for n in range(ring):

        @pl.when(own > 0)
        def _(n=n):
            fetch(n, n, *start)

        @pl.when(own == 0)
        def _(n=n):
            shared.fetch(jnp.int32(n))

    if place:
        places = plan.pairs, plan.experts, plan.choices, plan.shared_place + EIGHT
        store_places(*places)(ids, *place, cta * TEAMS + team)
    _load(plan, x, rows, (first_group, last_group), team)
    plgpu.commit_smem()
    _sync_block()
    lax.fori_loop(0, own, multiply, start)
    if matrices:
        lax.fori_loop(0, shared.count, multiply_shared, None)


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
