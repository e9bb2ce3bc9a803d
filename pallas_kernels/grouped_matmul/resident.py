"""Products of groups of at most 8 rows, at the speed at which pages can be read: a group's rows
stay in shared memory.

A unit of work is 64 weight rows of one expert, all of K, with a group's rows. Grid: one CTA a
multiprocessor, with an equal, contiguous part of the units (so of one or two groups, when there are
few). Its warpgroups share the group's rows; each takes every fourth unit, whose pages come through
a ring of its own, some steps ahead, across units and groups. At the next group they wait for one
another.

Rows come sorted, or as they are, with the token at each place: then all threads sort, permute and
store them, which saves a launch.

Memory: 0.5625 bytes a weight and group, 2 bytes an element of x a CTA and group, from the L2;
results once.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.launch import (
    MEMORY,
    MULTIPROCESSORS,
    PAGE_BYTES,
    SWIZZLED,
    Launch,
)
from pallas_kernels.grouped_matmul.matching_rows import SLAB, load_rows
from pallas_kernels.grouped_matmul.page_lanes import decoded
from pallas_kernels.layouts.nvfp4_pages import COLUMNS, LINE, LINES

_TEAMS = 4
_COPIES = 2  # of a step


def kernel(launch: Launch, dtype: Any, sorted_rows: bool) -> Any:
    """A function of (x, tokens, two matrices' pages, their scales, the groups)."""
    wide = 2 if launch.columns % (2 * COLUMNS) == 0 else 1
    rows_bytes = EIGHT * launch.columns * 2
    ring = (MEMORY - rows_bytes) // (_TEAMS * wide * 2 * PAGE_BYTES)
    ring = min(ring, launch.steps(wide))
    return plgpu.kernel(
        functools.partial(_program, launch, sorted_rows, wide, ring),
        out_type=launch.out,
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=_TEAMS,
        thread_name="team",
        scratch_types=[
            plgpu.SMEM((_TEAMS * ring, 2, wide, LINES, LINE), jnp.uint8),
            plgpu.SMEM((launch.columns // SLAB, EIGHT, SLAB), dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=_COPIES, num_barriers=_TEAMS * ring),
            plgpu.Barrier(num_arrivals=1 if sorted_rows else _TEAMS),
            plgpu.Barrier(num_arrivals=_TEAMS),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # those that are needed stand in the code
        ),
    )


def _program(
    launch: Launch, sorted_rows: bool, wide: int, ring: int,
    x, token, first_pages, second_pages, first_scales, second_scales,
    num_groups, experts, firsts, counts, out, pages, rows, there, rows_there, rows_read,
):  # fmt: skip
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    units, steps = launch.units(1), launch.steps(wide)
    total = num_groups[0] * units.count
    first, end = lax.div(cta * total, MULTIPROCESSORS), lax.div((cta + 1) * total, MULTIPROCESSORS)
    own = lax.div(end - first - team + (_TEAMS - 1), _TEAMS)
    first_group, last_group = lax.div(first, units.count), lax.div(end - 1, units.count)

    def unit(i):
        """Group, expert and first page of this team's i-th unit, if it has so many."""
        u = jnp.minimum(first + team + i * _TEAMS, end - 1)
        group = lax.div(u, units.count)
        return group, experts[group], (u - group * units.count) * units.stride

    def fetch(n, s, expert, page):
        """Starts the copies of step s of a unit, the n-th step of this team, in one warp."""
        slot = team * ring + lax.rem(n, ring)
        for half, (weights, at) in enumerate(
            ((first_pages, page), (second_pages, page + units.apart))
        ):
            source = weights.at[expert, at, pl.ds(s * wide, wide)]
            plgpu.copy_gmem_to_smem(source, pages.at[slot, half], there.at[slot])

    def fetch_rows(group):
        place = firsts[group] * EIGHT
        if not sorted_rows:
            load_rows(EIGHT, launch.columns, _TEAMS, SWIZZLED)(x, token, rows, place, team)
            plgpu.commit_smem()
            plgpu.barrier_arrive(rows_there)
            return

        @pl.when(team == 0)
        def _():
            plgpu.copy_gmem_to_smem(x.at[:, pl.ds(place, EIGHT)], rows, rows_there)

    def next_rows(group, carry):
        """All teams together: the rows of the group after `group`."""
        plgpu.barrier_arrive(rows_read)
        plgpu.barrier_wait(rows_read)
        fetch_rows(group + 1)
        plgpu.barrier_wait(rows_there)
        return carry

    def multiply(i, carry):
        before, expert, page = carry
        group, _, _ = unit(i)
        _, next_expert, next_page = unit(i + 1)
        count, place = counts[group], firsts[group] * EIGHT
        first_scale, second_scale = first_scales[expert], second_scales[expert]
        turns = (next_expert, expert), (next_page, page)
        lax.fori_loop(before, group, next_rows, None)

        def products(sums):
            def step(s, carry):
                n = i * steps + s
                slot = team * ring + lax.rem(n, ring)
                plgpu.barrier_wait(there.at[slot])
                for c in range(wide):
                    halves = pages.at[slot, 0], pages.at[slot, 1]
                    for half, a in enumerate(decoded(c, *halves, x.dtype)):
                        operand = rows.at[2 * (s * wide + c) + half]
                        plgpu.wgmma(sums, a, operand.transpose((1, 0)))
                _sync_team()  # every warp has read the step: the next one may take its place
                ahead = s + ring
                is_next = ahead >= steps
                next_step = jnp.where(is_next, ahead - steps, ahead)
                pages_at = (jnp.where(is_next, *pair) for pair in turns)
                refill = functools.partial(fetch, n, next_step, *pages_at)
                lanes.in_one_warp(team, jnp.logical_not(is_next) | (i + 1 < own), refill)
                plgpu.wgmma_wait(0)
                return carry

            lax.fori_loop(0, steps, step, None)
            return sums[...]

        sums = plgpu.ACC((64, EIGHT), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums = pl.run_scoped(products, sums)
        last = launch.last(second_scale, units.apart)
        launch.store(sums, out, page, place, jnp.int32(0), count, first_scale, last)
        return group, next_expert, next_page

    @pl.when(end > first)
    def _():
        if sorted_rows:
            fetch_rows(first_group)  # before the pages, or they would wait behind all of these
        expert, page = unit(0)[1:]
        for n in range(ring):
            lanes.in_one_warp(team, own > 0, functools.partial(fetch, n, n, expert, page))
        if not sorted_rows:
            fetch_rows(first_group)
        plgpu.barrier_wait(rows_there)
        carry = first_group, expert, page
        group = lax.fori_loop(0, own, multiply, carry)[0]
        lax.fori_loop(group, last_group, next_rows, None)


def _sync_team() -> None:
    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()
