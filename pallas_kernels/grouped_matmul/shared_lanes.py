"""How the lanes of `few_tokens` read an MXFP8 matrix as it lies in the checkpoint: 128 columns of
two pieces of 32 rows, decoded to the operand that a pair of NVFP4 pages gives (`page_lanes`).

A lane (g, t) of warp w has row 8 w + g of both pieces, the group of 32 columns from 32 t and its
exponent.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, mxfp8_lanes
from pallas_kernels.lanes import REF, SCALAR
from pallas_kernels.layouts.mxfp8 import GROUP

ROWS, COLUMNS = 32, 128  # of a piece
CODES = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))
TABLE = 16  # exponents of a row that are fetched at a time: the least that the copy engine moves
STEPS = TABLE * GROUP // COLUMNS  # that a table serves
_WGMMA = plgpu.Layout.WGMMA


def decoded(codes: Any, powers: Any, step: Any) -> Any:
    """Two A operands (64, 64) of codes [2 x 32, 128], swizzled, with exponents [2, 32, 16], of
    which step `step` has four: rows of the pieces take turns by 8, values / `DECODED`.
    """
    operand = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=_WGMMA)

    @lanes.code(plgpu.RefType(CODES), REF, SCALAR, returns=(operand, operand))
    def decode(_, codes, powers, step):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        source, table = lanes.address(codes), lanes.address(powers)
        group = ((lanes.scalar(step) & (STEPS - 1)) << 2) + t
        rows = []
        for piece in (0, 1):
            at = ((lanes.warp() << 3) + g) * TABLE + group
            power = lanes.load_bits(table, at + piece * ROWS * TABLE, 8)
            factor = mxfp8_lanes.factor_pair(power)
            line = ((lanes.warp() + piece * (ROWS // 8)) << 10) + (g << 7)
            words = []
            for half in (0, 1):
                words += lanes.load_words(source, line + ((((t << 1) + half) ^ g) << 4), 4)
            rows.append([pair for one in words for pair in mxfp8_lanes.value_pairs(one, factor)])
        columns = [list(pair) for pair in zip(*rows, strict=True)]
        return lanes.bf16_accumulator(columns[:8]), lanes.bf16_accumulator(columns[8:])

    return decode(codes, powers, step)
