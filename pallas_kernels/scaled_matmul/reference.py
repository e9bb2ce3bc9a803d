"""scaled_matmul in plain jnp: expand the weight to x's dtype, multiply, accumulate in float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages


def expand(
    weight: Array | MXFP8Tensor | NVFP4Tensor | NVFP4Pages, dtype: DTypeLike
) -> Float[Array, "..."]:
    """A weight's values in a compute dtype; e2m1 x e4m3 scales are exact in bf16 but for the outer
    scale's rounding.
    """
    if isinstance(weight, jax.Array):
        return weight.astype(dtype)
    return weight.dequantize(dtype)


def scaled_matmuls(
    x: Float[Array, "*rows D"],
    weights: Sequence[Array | MXFP8Tensor | NVFP4Tensor | NVFP4Pages],
    *,
    out_dtype: DTypeLike,
    one_device: bool,
) -> list[Float[Array, "*rows F"]]:
    """See the package."""
    products = [
        jnp.einsum(
            "...D,FD->...F",
            x,
            expand(weight, x.dtype),
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        for weight in weights
    ]
    return [product.astype(out_dtype) for product in products]
