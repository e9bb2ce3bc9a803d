"""scaled_matmul: activations x one weight matrix, stored as a plain array, MXFP8 or NVFP4."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.scaled_matmul import reference

Weight = Array | MXFP8Tensor | NVFP4Tensor
TABLE = (Implementation("reference", reference.scaled_matmul),)


def scaled_matmul(
    x: Float[Array, "*rows D"],
    weight: Weight,
    *,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "*rows F"]:
    """x W^T for a weight [F, D] in any stored format, accumulated in float32 (weight-only: x keeps
    its precision).
    """
    chosen = choose(TABLE, implementation, x, weight)
    return chosen.run(x, weight, out_dtype=out_dtype)
