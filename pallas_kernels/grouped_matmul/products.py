"""Products of sorted rows with NVFP4 pages: gate and up in one launch with SwiGLU, and down.

Two kernels, by how many rows a group may have: `resident` for at most 8, where weights are read at
memory speed, `streamed` for more, where it is the tensor cores that count. In both a warpgroup
decodes pages into registers, the A operand of wgmma, with rows of x as B (`page_lanes`), and sums
over all of K: nothing is added across units, and no order depends on the batch. Gate and up rows
take turns by 8 in A, so that one lane has both sums of a feature.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import resident, streamed
from pallas_kernels.grouped_matmul.activation import Activation
from pallas_kernels.grouped_matmul.grouping import EIGHT, Grouping
from pallas_kernels.grouped_matmul.launch import Launch
from pallas_kernels.grouped_matmul.matching_rows import SLAB, matching_rows
from pallas_kernels.grouped_matmul.page_lanes import store_activations, store_outputs
from pallas_kernels.layouts.nvfp4_pages import ROWS, NVFP4Pages

_RESIDENT_COLUMNS = 6144  # of 8 rows that leave room for pages


def activations(
    x: Float[Array, "T D"],
    gate: NVFP4Pages,
    up: NVFP4Pages,
    groups: Grouping,
    activation: Activation,
) -> Float[Array, "slabs S 64"]:
    """SwiGLU of x W_gate^T and x W_up^T at each place, rounded to x's dtype, laid out as
    `matching_rows` does it.
    """
    out = jax.ShapeDtypeStruct((gate.shape[1] // SLAB, len(groups.token), SLAB), x.dtype)
    divide = gate.divides, up.divides
    store = store_activations(out.shape, x.dtype, activation, divide=divide)
    return _run(2, store, out, x, (gate, up), groups, sorted_rows=False)


def outputs(
    x: Float[Array, "slabs S 64"],
    down: NVFP4Pages,
    groups: Grouping,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "S D"]:
    """x W^T, rounded to `out_dtype`, by default x's."""
    out = jax.ShapeDtypeStruct((x.shape[1], down.shape[1]), out_dtype or x.dtype)
    store = store_outputs(out.shape, out.dtype, down.divides)
    return _run(1, store, out, x, (down, down), groups)


def _run(matrices: int, store, out, x, weights, groups: Grouping, sorted_rows: bool = True):
    _, features, columns = weights[0].shape
    launch = Launch(
        widths=groups.widths,
        columns=columns,
        pages=features // ROWS,
        matrices=matrices,
        store=store,
        out=out,
    )
    scales = [outer_bits(one) for one in weights]
    operands = *(one.pages for one in weights), *scales, *groups.operands
    if launch.rows == EIGHT and columns <= _RESIDENT_COLUMNS:
        return resident.kernel(launch, x.dtype, sorted_rows)(x, groups.token, *operands)
    if not sorted_rows:
        x = matching_rows(x, groups.token)
    return streamed.kernel(launch, x.dtype)(x, *operands)


def outer_bits(weights: NVFP4Pages) -> Int[Array, "E"]:
    """The outer scales as bits, as they are stored: no work for XLA, also where they divide."""
    return lax.bitcast_convert_type(weights.outer, jnp.int32)


def scale_bits(weights: NVFP4Pages) -> Int[Array, "E"]:
    """The same as factors."""
    return lax.bitcast_convert_type(weights.multiplier, jnp.int32)
