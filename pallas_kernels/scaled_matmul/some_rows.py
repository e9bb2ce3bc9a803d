"""scaled_matmul for more rows than `few_rows` holds, too few to expand the weights for: both MXFP8
codes and rows of x stream through shared memory.

Rows are cut into groups of at most `GROUP_ROWS`, weights into tiles of 64 rows, D into parts
(`plan`), as for few rows; so sums are added in the same order. A unit of work is a group, a part
and three tiles. Grid: one CTA a multiprocessor, which takes every G-th unit, so that neighbours
share tiles in the L2. One warpgroup copies, by steps of 128 columns, three decode and multiply.

Memory: codes and exponents once a group, x once for three tiles, from the L2; 4 bytes a row, weight
row and part written.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import lanes
from pallas_kernels.scaled_matmul.plan import MULTIPROCESSORS, Plan, ends
from pallas_kernels.scaled_matmul.weight_tiles import (
    CHUNK,
    CODES,
    GROUP,
    OPERAND,
    SLAB,
    TILE,
    decoded,
    store_sums,
)

GROUP_ROWS = 128  # of x, whose sums fit in the registers beside decoded weights
TEAMS = 3  # warpgroups that multiply: as many as there are registers for
_MEMORY = 225 * 1024  # bytes of a CTA's shared memory, barriers apart
_DEEPEST = 8  # steps in the ring
_COPYING, _MULTIPLYING = 24, 160  # registers a lane: 24 + 3 x 160 is all that there are


@dataclass(frozen=True)
class Units:
    """How M rows and weights of `plan.tiles` tiles are dealt out."""

    plan: Plan

    @property
    def groups(self) -> int:
        """Of rows."""
        return -(-self.plan.rows // GROUP_ROWS)

    @property
    def rows(self) -> int:
        """N: of a group."""
        return -(-self.plan.rows // (8 * self.groups)) * 8

    @property
    def count(self) -> int:
        """Of all units."""
        return self.groups * self.plan.parts * -(-self.plan.tiles // TEAMS)

    @property
    def steps(self) -> int:
        """Of a unit."""
        return self.plan.width // CHUNK

    @property
    def ring(self) -> int:
        """Steps under way."""
        step = (TEAMS * TILE + 2 * self.rows) * CHUNK
        tables = 2 * TEAMS * TILE * self.plan.width // GROUP
        return min(_DEEPEST, self.steps, (_MEMORY - tables) // step)


def products(x: Float[Array, "M D"], weights: list[tuple[Array, Array]]) -> Float[Array, "M F"]:
    """x times the weights, each as codes and exponents, one after the other."""
    features = sum(len(codes) for codes, _ in weights)
    plan = Plan(rows=len(x), tiles=-(-features // TILE), columns=x.shape[1])
    units = Units(plan)
    kernel = plgpu.kernel(
        lanes.named("scaled_matmul_some_rows", _program, units),
        out_type=jax.ShapeDtypeStruct((plan.parts, plan.rows, features), jnp.float32),
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=TEAMS + 1,
        thread_name="team",
        scratch_types=[
            plgpu.SMEM((units.ring, TEAMS, TILE, CHUNK), jnp.float8_e4m3fn, transforms=CODES),
            plgpu.SMEM((2, TEAMS, TILE, plan.width // GROUP), jnp.uint8),
            plgpu.SMEM((units.ring, 2, units.rows, SLAB), jnp.bfloat16, transforms=OPERAND),
            plgpu.Barrier(num_arrivals=TEAMS + 1, num_barriers=units.ring),
            plgpu.Barrier(num_arrivals=TEAMS, num_barriers=units.ring),
            plgpu.Barrier(num_arrivals=TEAMS, num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    sums = kernel(
        _permuted(x, units.groups * units.rows), *(leaf for one in weights for leaf in one)
    )
    total = sums[0]
    for part in range(1, plan.parts):  # one by one, as in `few_rows`
        total += sums[part]
    return total


def _permuted(x: Float[Array, "M D"], rows: int) -> Float[Array, "slabs rows 64"]:
    """Of 128 columns, 32 t + 2 j + e goes to 8 j + 2 t + e (`weight_tiles`), in slabs of 64; so
    many rows, zeros at the end.
    """
    x = jnp.pad(x, ((0, rows - len(x)), (0, 0)))
    pieces = x.reshape(rows, x.shape[1] // CHUNK, 4, 2, 8, 2)  # row, chunk, t, slab, j, e
    return pieces.transpose(1, 3, 0, 4, 2, 5).reshape(x.shape[1] // SLAB, rows, SLAB)


def _program(units: Units, x, *refs):
    *leaves, out, codes, tables, rows, there, read, table_there = refs
    weights = list(zip(leaves[::2], leaves[1::2], strict=True))
    bounds = ends([-(-one.shape[0] // TILE) for one, _ in weights])  # of each one's tiles
    plan, ring, steps = units.plan, units.ring, units.steps
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    own = lax.div(units.count + (MULTIPROCESSORS - 1) - cta, MULTIPROCESSORS)

    def unit(i):
        """Group, part and first tile of this CTA's i-th unit."""
        u = cta + i * MULTIPROCESSORS
        some = lax.div(u, units.groups)
        part = lax.rem(some, plan.parts)
        return lax.rem(u, units.groups), part, lax.div(some, plan.parts) * TEAMS

    def with_weight(tile, do):
        """`do` with the codes, exponents and rows of a tile; of the last one if there is none."""
        tile = jnp.minimum(tile, plan.tiles - 1)
        for (start, end), (source, powers) in zip(bounds, weights, strict=True):

            @pl.when((tile >= start) & (tile < end))
            def _(source=source, powers=powers, start=start):
                do(source, powers, pl.ds((tile - start) * TILE, TILE))

    def copy(i, carry):
        group, part, first_tile = unit(i)
        for one in range(TEAMS):
            width, at = plan.width // GROUP, lax.rem(i, 2)

            def copy_table(_, powers, some, one=one, width=width, at=at):
                source = powers.at[some, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(source, tables.at[at, one], table_there.at[at])

            # The table was last read by the unit before the last one, all of whose steps are read.
            with_weight(first_tile + one, copy_table)

        def step(s, carry):
            n = i * steps + s
            slot, column = lax.rem(n, ring), part * plan.width + s * CHUNK

            @pl.when(n >= ring)
            def _():
                plgpu.barrier_wait(read.at[slot])

            slabs = pl.ds(lax.div(column, SLAB), CHUNK // SLAB)
            source = x.at[slabs, pl.ds(group * units.rows, units.rows)]
            plgpu.copy_gmem_to_smem(source, rows.at[slot], there.at[slot])
            for one in range(TEAMS):

                def copy_codes(source, _, some, one=one):
                    source = source.at[some, pl.ds(column, CHUNK)]
                    plgpu.copy_gmem_to_smem(source, codes.at[slot, one], there.at[slot])

                with_weight(first_tile + one, copy_codes)
            return carry

        return lax.fori_loop(0, steps, step, carry)

    def multiply(i, carry):
        group, part, first_tile = unit(i)
        table = lax.rem(i, 2)
        plgpu.barrier_wait(table_there.at[table])

        def products(sums):
            def step(s, carry):
                slot = lax.rem(i * steps + s, ring)
                plgpu.barrier_wait(there.at[slot])
                for half, a in enumerate(
                    decoded(0, codes.at[slot, team], tables.at[table, team], s)
                ):
                    plgpu.wgmma(sums, a, rows.at[slot, half].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[slot])
                return carry

            lax.fori_loop(0, steps, step, None)
            return sums[...]

        sums = plgpu.ACC((TILE, units.rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums = pl.run_scoped(products, sums)
        store_sums(sums, out, part, (first_tile + team) * TILE, group * units.rows)
        return carry

    @pl.when(team < TEAMS)
    def _():
        plgpu.set_max_registers(_MULTIPLYING, action="increase")
        lax.fori_loop(0, own, multiply, None)

    @pl.when(team == TEAMS)
    def _():
        plgpu.set_max_registers(_COPYING, action="decrease")
        lax.fori_loop(0, own, copy, None)
