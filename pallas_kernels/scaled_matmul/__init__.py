"""scaled_matmul: activations x weight matrices, each stored as a plain array, MXFP8 or NVFP4."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages
from pallas_kernels.scaled_matmul import expanded, mosaic, reference

Weight = Array | MXFP8Tensor | NVFP4Tensor | NVFP4Pages
TABLE = (
    Implementation("mosaic", mosaic.scaled_matmuls, mosaic.refuse),
    Implementation("expanded", expanded.scaled_matmuls, expanded.refuse),
    Implementation("reference", reference.scaled_matmuls),
)


def scaled_matmul(
    x: Float[Array, "*rows D"],
    weight: Weight,
    *,
    out_dtype: DTypeLike = jnp.float32,
    one_device: bool = True,
    implementation: str | None = None,
) -> Float[Array, "*rows F"]:
    """x W^T for a weight [F, D] in any stored format, accumulated in float32 (weight-only: x keeps
    its precision).
    """
    options = {"out_dtype": out_dtype, "one_device": one_device}
    return scaled_matmuls(x, [weight], implementation=implementation, **options)[0]


def scaled_matmuls(
    x: Float[Array, "*rows D"],
    weights: Sequence[Weight],
    *,
    out_dtype: DTypeLike = jnp.float32,
    one_device: bool = True,
    implementation: str | None = None,
) -> list[Float[Array, "*rows F"]]:
    """The products of the same x with several weights: one launch where a kernel takes them.

    `one_device` is False where the compiler partitions what is traced, which it cannot do to a
    kernel.
    """
    options = {"out_dtype": jnp.dtype(out_dtype), "one_device": one_device}
    return choose(TABLE, implementation, x, weights, **options).run(x, weights, **options)
