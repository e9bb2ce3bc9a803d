"""Products of groups of any size: pages and rows both stream through shared memory.

A unit of work is `teams` x 64 weight rows of one expert, all of K, with a group's rows. Grid: one
CTA a multiprocessor, which takes every G-th unit, so that neighbours share a group's rows and an
expert's pages in the L2. One warpgroup copies pages and rows through a ring of steps, the others
decode and multiply.

Memory: 0.5625 bytes a weight and group, 2 bytes an element of x a unit, from the L2; results once.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.launch import (
    MEMORY,
    MULTIPROCESSORS,
    PAGE_BYTES,
    SWIZZLED,
    Launch,
)
from pallas_kernels.grouped_matmul.matching_rows import SLAB
from pallas_kernels.grouped_matmul.page_lanes import decoded
from pallas_kernels.layouts.nvfp4_pages import COLUMNS, LINE, LINES

_TEAMS = 3  # warpgroups that multiply: as many as there are registers for
_DEEPEST = 8  # steps in the ring
_TWO_PAGES = 64  # rows up to which a step has two pages along K
_COPIES = 3  # of a step
_COPYING, _MULTIPLYING = 24, 160  # registers a lane: 24 + 3 x 160 is all that there are


def kernel(launch: Launch, dtype: Any) -> Any:
    """A function of (x, two matrices' pages, their scales, the groups)."""
    tiles = launch.units(1).count
    teams = next(n for n in range(_TEAMS, 0, -1) if tiles % n == 0)
    wide = 2 if launch.rows <= _TWO_PAGES and launch.columns % (2 * COLUMNS) == 0 else 1
    step_bytes = wide * (2 * teams * PAGE_BYTES + launch.rows * COLUMNS * 2)
    ring = min(_DEEPEST, MEMORY // step_bytes)
    return plgpu.kernel(
        functools.partial(_program, launch, teams, wide, ring),
        out_type=launch.out,
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=teams + 1,
        thread_name="team",
        scratch_types=[
            plgpu.SMEM((ring, 2, teams, wide, LINES, LINE), jnp.uint8),
            plgpu.SMEM((ring, 2 * wide, launch.rows, SLAB), dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=_COPIES, num_barriers=ring),
            plgpu.Barrier(num_arrivals=teams, num_barriers=ring),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _program(
    launch: Launch, teams: int, wide: int, ring: int,
    x, first_pages, second_pages, first_scales, second_scales,
    num_groups, experts, firsts, counts, out, pages, rows, there, read,
):  # fmt: skip
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    units, steps = launch.units(teams), launch.steps(wide)
    last = num_groups[0] * units.count + (MULTIPROCESSORS - 1) - cta
    own = lax.div(last, MULTIPROCESSORS)

    def unit(i):
        """Group and first page of this CTA's i-th unit."""
        u = cta + i * MULTIPROCESSORS
        group = lax.div(u, units.count)
        return group, (u - group * units.count) * units.stride

    def copy(i, carry):
        group, page = unit(i)
        expert, place = experts[group], firsts[group] * EIGHT

        def step(s, carry):
            n = i * steps + s
            slot, column = lax.rem(n, ring), s * wide

            @pl.when(n >= ring)
            def _():
                plgpu.barrier_wait(read.at[slot])

            source = x.at[pl.ds(2 * column, 2 * wide), pl.ds(place, launch.rows)]
            plgpu.copy_gmem_to_smem(source, rows.at[slot], there.at[slot])
            for half, (weights, start) in enumerate(
                ((first_pages, page), (second_pages, page + units.apart))
            ):
                source = weights.at[expert, pl.ds(start, teams), pl.ds(column, wide)]
                plgpu.copy_gmem_to_smem(source, pages.at[slot, half], there.at[slot])
            return carry

        return lax.fori_loop(0, steps, step, carry)

    def multiply(i, carry):
        group, page = unit(i)
        expert, place, count = experts[group], firsts[group] * EIGHT, counts[group]
        first_scale, second_scale = first_scales[expert], second_scales[expert]
        last = launch.last(second_scale, units.apart)

        def products(width, sums):
            def step(s, carry):
                slot = lax.rem(i * steps + s, ring)
                plgpu.barrier_wait(there.at[slot])
                for c in range(wide):
                    halves = pages.at[slot, 0, team], pages.at[slot, 1, team]
                    for half, a in enumerate(decoded(c, *halves, x.dtype)):
                        operand = rows.at[slot, 2 * c + half, pl.ds(0, width)]
                        plgpu.wgmma(sums, a, operand.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[slot])
                return carry

            lax.fori_loop(0, steps, step, None)
            return sums[...]

        narrower = 0
        for width in launch.widths:

            @pl.when((count > narrower) & (count <= width))
            def _(width=width):
                sums = plgpu.ACC((64, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
                sums = pl.run_scoped(functools.partial(products, width), sums)
                kept = jnp.int32(0), count
                launch.store(sums, out, page + team, place, *kept, first_scale, last)

            narrower = width
        return carry

    @pl.when(team < teams)
    def _():
        if teams == _TEAMS:
            plgpu.set_max_registers(_MULTIPLYING, action="increase")
        lax.fori_loop(0, own, multiply, None)

    @pl.when(team == teams)
    def _():
        if teams == _TEAMS:
            plgpu.set_max_registers(_COPYING, action="decrease")
        lax.fori_loop(0, own, copy, None)
