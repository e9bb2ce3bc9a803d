"""The gate's logits for few rows: bfloat16 rows times a float32 matrix, by the matrix unit.

A float32 weight is exactly the sum of three bfloat16 numbers, so three products with the rows as
they are give what float32 gives. Grid: a CTA for each `WIDTH` columns, of one warpgroup for each 64
experts; a lane (g, t) of warp w has 16 columns from 16 t of experts 16 w + g and 8 further, which
are the register operand once split; the rows are permuted to match. CTAs leave partial sums
[parts, T, E], whatever T is: no order of summation depends on the batch.

Memory: the gate once (3.1 MB at full size), 4 bytes a part, row and expert written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import lanes
from pallas_kernels.lanes import REF, SCALAR, Real, Word

WIDTH = 64  # columns of a part
TILE, THREADS = 64, 128  # experts and threads of a warpgroup
MAX_ROWS = 128
_PIECE = 8  # elements of a row that a thread moves at once
_OPERAND = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
_SPLITS = 3


def partial_logits(x: Float[Array, "T D"], gate: Float[Array, "E D"]) -> Float[Array, "parts T E"]:
    """Sums over each part of the columns; their sum is W x."""
    (rows, columns), experts = x.shape, len(gate)
    parts, padded = columns // WIDTH, -(-rows // 8) * 8
    kernel = plgpu.kernel(
        lanes.named("route_gate", _program, padded),
        out_type=jax.ShapeDtypeStruct((parts, rows, experts), jnp.float32),
        grid=(parts,),
        grid_names=("part",),
        num_threads=experts // TILE,
        thread_name="team",
        scratch_types=(plgpu.SMEM((padded, WIDTH), jnp.bfloat16, transforms=_OPERAND),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(x, gate)


def splits(gate: Float[Array, "E D"]) -> list[Float[Array, "E D"]]:
    """Three bfloat16 matrices whose exact sum the gate is, the smallest first."""
    found = []
    for _ in range(_SPLITS):
        # Two casts in a row may be taken for none (excess precision); this rounding may not.
        rounded = jax.lax.reduce_precision(gate, exponent_bits=8, mantissa_bits=7)
        found.append(rounded.astype(jnp.bfloat16))
        gate = gate - rounded
    return found[::-1]


def _program(padded: int, x, gate, out, operand):
    part, team = lax.axis_index("part"), lax.axis_index("team")
    (rows, columns), teams = x.shape, gate.shape[0] // TILE
    splits = _split_weights(columns)(gate, part, team)
    _load_rows(rows, columns, teams * THREADS)(x, operand, part, team)
    plgpu.commit_smem()
    _sync_block()

    def product(sums):
        for weights in splits:  # the smallest first
            plgpu.wgmma(sums, weights, operand.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return sums[...]

    sums = plgpu.ACC((TILE, padded), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    _store(pl.run_scoped(product, sums), out, part, team)


def _split_weights(columns: int):
    """This warpgroup's 64 x 64 weights as three A operands, the smallest first."""
    fragment = plgpu.ShapeDtypeStruct((TILE, WIDTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @lanes.code(REF, SCALAR, SCALAR, returns=(fragment,) * _SPLITS)
    def load(_, gate, part, team):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        row = lanes.scalar(team) * TILE + (lanes.warp() << 4) + g
        splits = []
        for eight in (0, 1):
            at = ((row + 8 * eight) * columns + lanes.scalar(part) * WIDTH + (t << 4)) << 2
            source = lanes.address(gate, at)
            values = [x for i in range(4) for x in lanes.load_reals(source, 16 * i, 4)]
            splits.append([_split(*values[i : i + 2]) for i in range(0, 16, 2)])
        return tuple(
            lanes.bf16_accumulator([[low[i], high[i]] for low, high in zip(*splits, strict=True)])
            for i in reversed(range(_SPLITS))
        )

    return load


def _split(a: Real, b: Real) -> list[Word]:
    """Two values as three bfloat16 pairs whose sum they are, the largest first."""
    pairs = []
    for _ in range(_SPLITS):
        pairs.append(lanes.bf16_of_reals(a, b))
        low, high = lanes.reals_of_pair(pairs[-1], False)
        a, b = a - low, b - high
    return pairs


def _load_rows(rows: int, columns: int, threads: int):
    """The part's columns of all rows to the operand [N, 64], permuted: 16 t + 2 j + e goes to
    8 j + 2 t + e. Operand rows that x does not have stay as they are.
    """
    pieces = rows * (WIDTH // _PIECE)

    @lanes.code(REF, plgpu.RefType(_OPERAND), SCALAR, SCALAR)
    def load(_, x, operand, part, team):
        source, to = lanes.address(x), lanes.address(operand)
        thread = lanes.thread() + lanes.scalar(team) * THREADS
        for start in range(0, pieces, threads):
            piece = thread + start
            piece = lanes.select(piece.below(pieces), piece, lanes.word(pieces - 1))
            row, eighth = piece >> 3, piece & 7
            at = row * columns + lanes.scalar(part) * WIDTH + (eighth << 3)
            for i, pair in enumerate(lanes.load_words(source, at << 1, 4)):
                place = (((eighth & 1) << 2) + i) ^ (row & 7)
                lanes.store_words(to, (row << 7) + (place << 4) + ((eighth >> 1) << 2), [pair])

    return load


def _store(sums: Any, out: Any, part: Any, team: Any) -> None:
    _, rows, experts = out.shape

    @lanes.code(plgpu.Layout.WGMMA, REF, SCALAR, SCALAR)
    def store(_, sums, out, part, team):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        expert = lanes.scalar(team) * TILE + (lanes.warp() << 4) + g
        for i, tile in enumerate(lanes.tiles_of(sums)):
            for at, value in enumerate(tile):
                row = (t << 1) + (8 * i + at % 2)
                place = (lanes.scalar(part) * rows + row) * experts + expert + 8 * (at // 2)
                write = functools.partial(
                    lanes.store_reals, lanes.address(out), place << 2, [value]
                )
                lanes.when(row.below(rows), write)

    store(sums, out, part, team)


def _sync_block() -> None:
    @lanes.code()
    def sync(_):
        lanes.sync_block()

    sync()
