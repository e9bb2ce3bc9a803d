"""Routed experts on Hopper: rows sorted by expert x NVFP4 pages, gate and up in one launch with
SwiGLU, down in another.

A unit of work is `TEAMS` x 64 weight rows of one expert, whole (all of K), with a group of at most
N of its rows (`grouping`). Grid: one CTA a multiprocessor, which takes every G-th unit, so that
neighbours share a group's rows and an expert's pages in the L2. One warpgroup copies pages and
rows through a ring of steps; each of the others decodes 64 rows of the pages into registers, the A
operand of wgmma, with the rows of x as B (`page_lanes`). Gate and up rows take turns by 8 in A, so
that one lane has both sums of a feature.

Memory: 0.5625 bytes a weight and group, 2 bytes an element of x a unit, from the L2; results once.
Nothing is added across units, and no order depends on the batch.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.activation import Activation
from pallas_kernels.grouped_matmul.grouping import EIGHT, Grouping
from pallas_kernels.grouped_matmul.matching_rows import SLAB
from pallas_kernels.grouped_matmul.page_lanes import (
    DECODED,
    decoded,
    store_activations,
    store_outputs,
)
from pallas_kernels.layouts.nvfp4_pages import COLUMNS, LINE, LINES, ROWS, NVFP4Pages

_MULTIPROCESSORS = 132  # of an H200
_TEAMS = 3  # warpgroups that multiply: as many as there are registers for
_MEMORY = 225 * 1024  # bytes of a CTA's shared memory for the ring
_DEEPEST = 8  # steps in the ring
_SWIZZLED = (plgpu.TilingTransform((EIGHT, SLAB)), plgpu.SwizzleTransform(128))
_COPIES = 3  # of a step
_COPYING, _MULTIPLYING = 24, 160  # registers a lane: 24 + 3 x 160 is all that there are


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a launch is compiled for."""

    rows: int  # N
    columns: int  # K
    teams: int
    wide: int  # pages of a step along K
    stride: int  # pages from one unit's first rows to the next one's
    apart: int  # pages from a unit's first rows to its second ones
    units: int  # of one group

    @property
    def steps(self) -> int:
        """Of a unit."""
        return self.columns // (COLUMNS * self.wide)

    @property
    def step_bytes(self) -> int:
        """Of the pages and rows of a step."""
        return self.wide * (2 * self.teams * LINES * LINE + self.rows * COLUMNS * 2)

    @property
    def ring(self) -> int:
        """Steps in shared memory."""
        return min(_DEEPEST, _MEMORY // self.step_bytes)


def activations(
    x: Float[Array, "slabs S 64"],
    gate: NVFP4Pages,
    up: NVFP4Pages,
    groups: Grouping,
    rows: int,
    activation: Activation,
) -> Float[Array, "slabs S 64"]:
    """SwiGLU of x W_gate^T and x W_up^T, rounded to x's dtype, laid out as x is."""
    _, features, columns = gate.shape
    teams = _teams(features // ROWS)
    shape = Shape(
        rows=rows,
        columns=columns,
        teams=teams,
        wide=_wide(rows, columns),
        stride=teams,
        apart=0,
        units=features // (ROWS * teams),
    )
    out = jax.ShapeDtypeStruct((features // SLAB, x.shape[1], SLAB), x.dtype)
    store = store_activations(out.shape, x.dtype, activation)
    return _launch(shape, store, out, x, (gate, up), groups)


def outputs(
    x: Float[Array, "slabs S 64"],
    down: NVFP4Pages,
    groups: Grouping,
    rows: int,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "S D"]:
    """x W^T, rounded to `out_dtype`, by default x's."""
    _, features, columns = down.shape
    teams = _teams(features // (2 * ROWS))
    shape = Shape(
        rows=rows,
        columns=columns,
        teams=teams,
        wide=_wide(rows, columns),
        stride=2 * teams,
        apart=teams,
        units=features // (2 * ROWS * teams),
    )
    out = jax.ShapeDtypeStruct((x.shape[1], features), out_dtype or x.dtype)
    return _launch(shape, store_outputs(out.shape, out.dtype), out, x, (down, down), groups)


def _teams(tiles: int) -> int:
    return next(n for n in range(_TEAMS, 0, -1) if tiles % n == 0)


def _wide(rows: int, columns: int) -> int:
    return 2 if rows <= 64 and columns % (2 * COLUMNS) == 0 else 1


def _launch(shape: Shape, store: Any, out: Any, x: Array, weights: tuple, groups: Grouping):
    kernel = plgpu.kernel(
        functools.partial(_program, shape, store),
        out_type=out,
        grid=(_MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=shape.teams + 1,
        thread_name="team",
        scratch_types=[
            plgpu.SMEM((shape.ring, 2, shape.teams, shape.wide, LINES, LINE), jnp.uint8),
            plgpu.SMEM(
                (shape.ring, 2 * shape.wide, shape.rows, SLAB), x.dtype, transforms=_SWIZZLED
            ),
            plgpu.Barrier(num_arrivals=_COPIES, num_barriers=shape.ring),
            plgpu.Barrier(num_arrivals=shape.teams, num_barriers=shape.ring),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    scales = [_scale_bits(one) for one in weights]
    return kernel(x, *(one.pages for one in weights), *scales, *groups.operands)


def _scale_bits(weights: NVFP4Pages) -> Int[Array, "E"]:
    """What sums are multiplied with, as bits."""
    return lax.bitcast_convert_type(weights.multiplier * jnp.float32(DECODED), jnp.int32)


def _program(
    shape: Shape, store, x, first_pages, second_pages, first_scales, second_scales,
    num_groups, experts, firsts, counts, out, pages, rows, there, read,
):  # fmt: skip
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    units = num_groups[0] * shape.units
    mine = lax.div(units - cta + _MULTIPROCESSORS - 1, _MULTIPROCESSORS)

    def unit(i):
        """Group and page row of this CTA's i-th unit."""
        u = cta + i * _MULTIPROCESSORS
        group = lax.div(u, shape.units)
        return group, (u - group * shape.units) * shape.stride

    def copy(i, carry):
        group, page = unit(i)
        expert, place = experts[group], firsts[group] * EIGHT

        def step(s, carry):
            n = i * shape.steps + s
            slot, column = lax.rem(n, shape.ring), s * shape.wide

            @pl.when(n >= shape.ring)
            def _():
                plgpu.barrier_wait(read.at[slot])

            source = x.at[pl.ds(2 * column, 2 * shape.wide), pl.ds(place, shape.rows)]
            plgpu.copy_gmem_to_smem(source, rows.at[slot], there.at[slot])
            for half, (weights, start) in enumerate(
                ((first_pages, page), (second_pages, page + shape.apart))
            ):
                source = weights.at[expert, pl.ds(start, shape.teams), pl.ds(column, shape.wide)]
                plgpu.copy_gmem_to_smem(source, pages.at[slot, half], there.at[slot])
            return carry

        return lax.fori_loop(0, shape.steps, step, carry)

    def multiply(i, carry):
        group, page = unit(i)
        expert, place, count = experts[group], firsts[group] * EIGHT, counts[group]
        first_scale, second_scale = first_scales[expert], second_scales[expert]

        def products(sums):
            def step(s, carry):
                slot = lax.rem(i * shape.steps + s, shape.ring)
                plgpu.barrier_wait(there.at[slot])
                for c in range(shape.wide):
                    mine = pages.at[slot, 0, team], pages.at[slot, 1, team]
                    for half, a in enumerate(decoded(c, *mine, x.dtype)):
                        plgpu.wgmma(sums, a, rows.at[slot, 2 * c + half].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[slot])
                return carry

            lax.fori_loop(0, shape.steps, step, None)
            return sums[...]

        sums = plgpu.ACC((64, shape.rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums = pl.run_scoped(products, sums)
        last = second_scale if shape.apart == 0 else jnp.int32(shape.apart)
        store(sums, out, page + team, place, count, first_scale, last)
        return carry

    @pl.when(team < shape.teams)
    def _():
        if shape.teams == _TEAMS:
            plgpu.set_max_registers(_MULTIPLYING, action="increase")
        lax.fori_loop(0, mine, multiply, None)

    @pl.when(team == shape.teams)
    def _():
        if shape.teams == _TEAMS:
            plgpu.set_max_registers(_COPYING, action="decrease")
        lax.fori_loop(0, mine, copy, None)
