"""scaled_matmul for few rows on Hopper: at most `ROWS` bfloat16 rows x MXFP8 weights as they lie in
the checkpoint, at the speed at which the weights can be read.

Weights [F, D] are cut into tiles of 64 rows and `parts` of D, the same ones whatever the batch.
Grid: one CTA a multiprocessor, of `TEAMS` warpgroups; it holds its part of x in shared memory for
good. A warpgroup takes tiles, one after the other: codes come by the copy engine in steps of
64 x 256 (16 KB), some steps ahead, and become the register operand of wgmma, x is the other one
(`weight_tiles`). Several weights of the same x are one launch.

Memory: codes and exponents once, x once a CTA (from the L2), and 4 bytes a row, weight row and part
written; the parts are summed by what reads them, in their order.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import lanes
from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
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
_LAUNCHES = 4  # as many as cost no more than expanding the weight
TEAMS = 3
_MULTIPROCESSORS = 132  # of an H200
_PART_WIDTHS = (1536, 1024, 512)  # exponents come in multiples of 16 bytes; 1536 x 32 rows fit
_UNITS = 264  # tiles x parts from which on the teams are busy
_WIDE = 16  # rows up to which three steps fit in the ring


@dataclass(frozen=True)
class Plan:
    """How weights of `tiles` tiles in all and D columns are dealt out; no sum depends on M."""

    rows: int  # M
    tiles: int
    columns: int  # D

    @property
    def width(self) -> int:
        """Of a part of D: the widest that leaves every team work."""
        fitting = [w for w in _PART_WIDTHS if self.columns % w == 0]
        busy = [w for w in fitting if self.tiles * (self.columns // w) >= _UNITS]
        return busy[0] if busy else fitting[-1]

    @property
    def parts(self) -> int:
        """Of D, each of them one CTA's."""
        return self.columns // self.width

    @property
    def ctas(self) -> int:
        """A multiple of the parts."""
        return max(1, _MULTIPROCESSORS // self.parts) * self.parts

    @property
    def steps(self) -> int:
        """Of a tile's part."""
        return self.width // STEP

    @property
    def ring(self) -> int:
        """Steps in flight for a team."""
        return 3 if self.rows <= _WIDE else 2

    @property
    def early(self) -> int:
        """Of these, how many are asked for before x: about as long as x takes."""
        return 1 if self.rows <= 8 else 2

    @property
    def tables(self) -> int:
        """Tiles whose exponents are held at a time."""
        return (self.steps - 1 + self.ring) // self.steps + 1

    @property
    def operand_rows(self) -> int:
        """N: M rounded up to what the matrix unit takes."""
        return -(-self.rows // 8) * 8


def refuse(x: Array, weights: Sequence[Any], *, out_dtype: Any, one_device: bool) -> str | None:
    """A sentence for what this kernel does not do."""
    if reason := refuse_device():
        return reason
    if not one_device:
        return "the compiler cannot partition a kernel over devices"
    if not all(isinstance(one, MXFP8Tensor) for one in weights):
        return "a weight is not MXFP8"
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    rows, columns = x.size // max(1, x.shape[-1]), x.shape[-1]
    if not 0 < rows <= _LAUNCHES * ROWS:
        return f"{rows} rows, not 1 to {_LAUNCHES * ROWS}"
    if columns % _PART_WIDTHS[-1] or columns // _PART_WIDTHS[-1] > _MULTIPROCESSORS:
        return f"{columns} columns, not a multiple of {_PART_WIDTHS[-1]}"
    if any(one.shape[0] % 8 for one in weights):
        return "a weight has rows that are no multiple of 8"
    if any(one.shape[0] % TILE for one in weights[:-1]):
        return f"a weight before the last has rows that are no multiple of {TILE}"
    return None


def scaled_matmuls(
    x: Float[Array, "*rows D"],
    weights: Sequence[MXFP8Tensor],
    *,
    out_dtype: Any,
    one_device: bool,
) -> list[Float[Array, "*rows F"]]:
    """See the package."""
    rows = x.reshape(-1, x.shape[-1])
    sums = _products(rows, [(one.codes, one.exponents) for one in weights])
    ends = _ends([one.shape[0] for one in weights])
    return [
        sums[:, first:end].astype(out_dtype).reshape(*x.shape[:-1], end - first)
        for first, end in ends
    ]


@jax.custom_vjp
def _products(x: Float[Array, "M D"], weights: list[tuple[Array, Array]]) -> Float[Array, "M F"]:
    pieces = [_launch(x[i : i + ROWS], weights) for i in range(0, len(x), ROWS)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _forward(x, weights):
    return _products(x, weights), weights


def _backward(weights, gradient):
    """Through the weights as they are: the gradient of x alone."""
    ends = _ends([len(codes) for codes, _ in weights])
    parts = [
        jnp.einsum(
            "MF,FD->MD",
            gradient[:, first:end],
            MXFP8Tensor(*one).dequantize(jnp.bfloat16),
            preferred_element_type=jnp.float32,
        )
        for (first, end), one in zip(ends, weights, strict=True)
    ]
    return functools.reduce(jnp.add, parts).astype(jnp.bfloat16), None


_products.defvjp(_forward, _backward)


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First and end of each of some pieces that lie one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _launch(x: Float[Array, "M D"], weights: list[tuple[Array, Array]]) -> Float[Array, "M F"]:
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
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    sums = kernel(x, *(leaf for one in weights for leaf in one))
    # Added one by one: what XLA makes of a sum over the first axis is a slow kernel of its own.
    return functools.reduce(jnp.add, [sums[part] for part in range(plan.parts)])


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
    bounds = _ends([-(-one.shape[0] // TILE) for one, _ in weights])  # of each one's tiles
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    part = lax.rem(cta, plan.parts)
    teams = plan.ctas // plan.parts * TEAMS
    place = cta // plan.parts * TEAMS + team
    first = place * plan.tiles // teams
    tiles = (place + 1) * plan.tiles // teams - first
    column = part * plan.width

    def fetch(i, step):
        """Starts the copies of a step of this team's i-th tile, and with the first one of its
        exponents.
        """
        n = team * plan.ring + lax.rem(i * plan.steps + step, plan.ring)
        table = team * plan.tables + lax.rem(i, plan.tables)
        for (start, end), (source, powers) in zip(bounds, weights, strict=True):

            @pl.when((i < tiles) & (first + i >= start) & (first + i < end))
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

    def tile(i, _):
        table = team * plan.tables + lax.rem(i, plan.tables)
        plgpu.barrier_wait(table_there.at[table])

        def products(sums):
            def step(s, _):
                n = team * plan.ring + lax.rem(i * plan.steps + s, plan.ring)
                plgpu.barrier_wait(there.at[n])
                for half in (0, 1):
                    a = decoded(half, codes.at[n], tables.at[table], s)
                    for k, one in enumerate(a):
                        operand = rows.at[4 * s + (2 * half + k)]
                        plgpu.wgmma(sums, one, operand.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                _sync_team()  # every warp has read the step: the next one may take its place
                ahead = s + plan.ring
                fetch(i + ahead // plan.steps, lax.rem(ahead, plan.steps))

            lax.fori_loop(0, plan.steps, step, None)
            return sums[...]

        sums = plgpu.ACC((TILE, plan.operand_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        store_sums(pl.run_scoped(products, sums), out, part, (first + i) * TILE)

    # Each team has some weights under way while x comes; all of them, and x would wait for them.
    load = load_rows(plan.rows, plan.columns, plan.width, TEAMS)
    for n in range(plan.ring):
        if n == plan.early:
            load(x, rows, column, team)
        fetch(jnp.int32(n // plan.steps), jnp.int32(n % plan.steps))
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
