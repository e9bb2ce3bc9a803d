"""scaled_matmul for many rows on a GPU: expand the weight, multiply by the library's kernel.

Bytes of a weight [F, D] in MXFP8: 1.03 F D read, 2 F D written and read again; beside the product
of 8192 rows that is a few per cent. The result is rounded to `out_dtype` inside the product where
that is x's type, so that no float32 result travels through memory.

What comes back is rounded to x's type, too: autodiff would multiply float32 gradients by a float32
copy of the weight, which of the head is 4.9 GB, on a tenth of the matrix units' rate.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import refuse_platform
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.scaled_matmul.reference import expand


def refuse(x: Array, weights: Sequence[Any], *, out_dtype: Any, one_device: bool) -> str | None:
    """On other devices this would be the reference."""
    return refuse_platform()


def scaled_matmuls(
    x: Float[Array, "*rows D"],
    weights: Sequence[Array | MXFP8Tensor | NVFP4Tensor],
    *,
    out_dtype: DTypeLike,
    one_device: bool,
) -> list[Float[Array, "*rows F"]]:
    """See the package."""
    return [_product(jnp.dtype(out_dtype), x, weight) for weight in weights]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(out_dtype, x, weight):
    sums = out_dtype if x.dtype == out_dtype else jnp.float32
    return _einsum("...D,FD->...F", x, expand(weight, x.dtype), sums).astype(out_dtype)


def _forward(out_dtype, x, weight):
    return _product(out_dtype, x, weight), (x, weight)


def _backward(_, kept, gradient):
    """Of x, and of a weight that is a plain array; what is stored in fewer bits has none."""
    x, weight = kept
    rounded = gradient.astype(x.dtype)
    of_x = _einsum("...F,FD->...D", rounded, expand(weight, x.dtype), x.dtype)
    if not isinstance(weight, jax.Array):
        return of_x, None
    return of_x, _einsum("...F,...D->FD", rounded, x, jnp.float32).astype(weight.dtype)


_product.defvjp(_forward, _backward)


def _einsum(formula: str, x: Array, y: Array, sums: DTypeLike) -> Array:
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(formula, x, y, preferred_element_type=sums, precision=precision)
