"""scaled_matmul for many rows on a GPU: expand the weight, multiply by the library's kernel.

Bytes of a weight [F, D] in MXFP8: 1.03 F D read, 2 F D written and read again; beside the product
of 8192 rows that is a few per cent. The result is rounded to `out_dtype` inside the product where
that is x's type, so that no float32 result travels through memory.
"""

from collections.abc import Sequence
from typing import Any

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
    sums = out_dtype if x.dtype == out_dtype else jnp.float32
    products = [
        jnp.einsum(
            "...D,FD->...F",
            x,
            expand(weight, x.dtype),
            preferred_element_type=sums,
            precision="highest" if x.dtype == jnp.float32 else None,
        )
        for weight in weights
    ]
    return [product.astype(out_dtype) for product in products]
