"""scaled_matmul of bfloat16 rows x MXFP8 weights as they lie in the checkpoint, on Hopper: by
`few_rows`, at the speed at which weights are read, or `some_rows`, where it is the rows that count.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.scaled_matmul import few_rows, some_rows
from pallas_kernels.scaled_matmul.plan import MULTIPROCESSORS, PART_WIDTHS, ends
from pallas_kernels.scaled_matmul.weight_tiles import TILE

_MOST_ROWS = 256  # beyond, expanding the weights costs less than decoding them again and again


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
    if not 0 < rows <= _MOST_ROWS:
        return f"{rows} rows, not 1 to {_MOST_ROWS}"
    if columns % PART_WIDTHS[-1] or columns // PART_WIDTHS[-1] > MULTIPROCESSORS:
        return f"{columns} columns, not a multiple of {PART_WIDTHS[-1]}"
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
    bounds = ends([one.shape[0] for one in weights])
    return [
        sums[:, first:end].astype(out_dtype).reshape(*x.shape[:-1], end - first)
        for first, end in bounds
    ]


@jax.custom_vjp
def _products(x: Float[Array, "M D"], weights: list[tuple[Array, Array]]) -> Float[Array, "M F"]:
    by = few_rows if len(x) <= few_rows.ROWS else some_rows
    return by.products(x, weights)


def _forward(x, weights):
    return _products(x, weights), weights


def _backward(weights, gradient):
    """Through the weights as they are: the gradient of x alone."""
    bounds = ends([len(codes) for codes, _ in weights])
    parts = [
        jnp.einsum(
            "MF,FD->MD",
            gradient[:, first:end],
            MXFP8Tensor(*one).dequantize(jnp.bfloat16),
            preferred_element_type=jnp.float32,
        )
        for (first, end), one in zip(bounds, weights, strict=True)
    ]
    return functools.reduce(jnp.add, parts).astype(jnp.bfloat16), None


_products.defvjp(_forward, _backward)
