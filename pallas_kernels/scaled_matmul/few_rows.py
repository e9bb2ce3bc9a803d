"""scaled_matmul for few rows on Hopper: at most `ROWS` bfloat16 rows x MXFP8 weights, at the speed
at which the weights can be read.

Weights [F, D] are cut into tiles of 64 rows and parts of D (`plan`). Grid: one CTA a
multiprocessor, of `TEAMS` warpgroups; it holds its part of x in shared memory for good. A
warpgroup takes tiles, one after the other: codes come by the copy engine in steps of 64 x 256
(16 KB), some steps ahead, and become the register operand of wgmma, x is the other one
(`weight_tiles`). Several weights of the same x are one launch.

Memory: codes and exponents once, x once a CTA (from the L2), and 4 bytes a row, weight row and part
written; the parts are summed by what reads them, in their order.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import lanes
from pallas_kernels.scaled_matmul.plan import Plan, ends
from pallas_kernels.scaled_matmul.weight_tiles import (
    CODES,
    GROUP,
    OPERAND,
    STEP,
    TILE,
    decoded,
    load_rows,
    store_sums,
)

ROWS = 32  # of x in one launch
TEAMS = 3


def products(x: Float[Array, "M D"], weights: list[tuple[Array, Array]]) -> Float[Array, "M F"]:
    """x times the weights, each as codes and exponents, one after the other."""
    features = sum(len(codes) for codes, _ in weights)
    plan = Plan(rows=len(x), tiles=-(-features // TILE), columns=x.shape[1])
    kernel = plgpu.kernel(
        lanes.named("scaled_matmul_few_rows", _program, plan),
        out_type=jax.ShapeDtypeStruct((plan.parts, plan.rows, features), jnp.float32),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=TEAMS,
        thread_name="team",
        scratch_types=_scratch(plan),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # those that are needed stand in the code
        ),
    )
    sums = kernel(x, *(leaf for one in weights for leaf in one))
    # Added one by one: what XLA makes of a sum over the first axis is a slow kernel of its own.
    return reduce(jnp.add, [sums[part] for part in range(plan.parts)])


def _scratch(plan: Plan) -> tuple:
    steps, tables = TEAMS * plan.ring, TEAMS * plan.tables
    return (
        plgpu.SMEM((steps, TILE, STEP), jnp.float8_e4m3fn, transforms=CODES),
        plgpu.SMEM((tables, TILE, plan.width // GROUP), jnp.uint8),
        plgpu.SMEM((plan.width // 64, plan.operand_rows, 64), jnp.bfloat16, transforms=OPERAND),
        plgpu.Barrier(num_barriers=steps),
        plgpu.Barrier(num_barriers=tables),
    )


def _program(plan: Plan, x, *refs):
    *leaves, out, codes, tables, rows, there, table_there = refs
    weights = list(zip(leaves[::2], leaves[1::2], strict=True))
    bounds = ends([-(-one.shape[0] // TILE) for one, _ in weights])  # of each one's tiles
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    part = lax.rem(cta, plan.parts)
    teams = plan.ctas // plan.parts * TEAMS
    place = cta // plan.parts * TEAMS + team
    first = place * plan.tiles // teams
    tiles = (place + 1) * plan.tiles // teams - first
    column = part * plan.width

    def fetch(i, step):
        """Starts the copies of a step of this team's i-th tile, and with the first one of its
        exponents; in one warp.
        """
        n = team * plan.ring + lax.rem(i * plan.steps + step, plan.ring)
        table = team * plan.tables + lax.rem(i, plan.tables)
        for (start, end), (source, powers) in zip(bounds, weights, strict=True):

            @pl.when((first + i >= start) & (first + i < end))
            def _(source=source, powers=powers, start=start):
                some = pl.ds((first + i - start) * TILE, TILE)
                at = column + step * STEP
                plgpu.copy_gmem_to_smem(source.at[some, pl.ds(at, STEP)], codes.at[n], there.at[n])

                @pl.when(step == 0)
                def _():
                    plgpu.copy_gmem_to_smem(
                        powers.at[some, pl.ds(part * (plan.width // GROUP), plan.width // GROUP)],
                        tables.at[table],
                        table_there.at[table],
                    )

    def refill(i, step):
        lanes.in_one_warp(team, i < tiles, partial(fetch, i, step))

    def tile(i, _):
        table = team * plan.tables + lax.rem(i, plan.tables)
        plgpu.barrier_wait(table_there.at[table])

        def products(sums):
            def step(s, _):
                n = team * plan.ring + lax.rem(i * plan.steps + s, plan.ring)
                plgpu.barrier_wait(there.at[n])
                for half in (0, 1):
                    a = decoded(half, codes.at[n], tables.at[table], 2 * s + half)
                    for k, one in enumerate(a):
                        operand = rows.at[4 * s + (2 * half + k)]
                        plgpu.wgmma(sums, one, operand.transpose((1, 0)))
                _sync_team()  # every warp has read the step: the next one may take its place
                ahead = s + plan.ring
                refill(i + ahead // plan.steps, lax.rem(ahead, plan.steps))
                plgpu.wgmma_wait(0)

            lax.fori_loop(0, plan.steps, step, None)
            return sums[...]

        sums = plgpu.ACC((TILE, plan.operand_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums = pl.run_scoped(products, sums)
        store_sums(sums, out, part, (first + i) * TILE, jnp.int32(0))

    # Each team has some weights under way while x comes; all of them, and x would wait for them.
    load = load_rows(plan.rows, plan.columns, plan.width, TEAMS)
    for n in range(plan.ring):
        if n == plan.early:
            load(x, rows, column, team)
        refill(jnp.int32(n // plan.steps), jnp.int32(n % plan.steps))
    if plan.early == plan.ring:
        load(x, rows, column, team)
    _publish_rows()
    lax.fori_loop(0, tiles, tile, None)


def _sync_team() -> None:
    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()


def _publish_rows() -> None:
    """What any thread of the block wrote to shared memory is there for all matrix units."""

    @lanes.code()
    def publish(_):
        lanes.sync_block()

    plgpu.commit_smem()
    publish()
