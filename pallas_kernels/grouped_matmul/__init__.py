"""grouped_matmul: tokens sorted by expert x each expert's own weight matrix."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.rows import permute_rows
from pallas_kernels.scaled_matmul import Weight

__all__ = ["grouped_matmul", "permute_rows"]

TABLE = (Implementation("reference", reference.grouped_matmul),)


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Weight,
    group_sizes: Int[Array, "E"],
    *,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "M F"]:
    """Row m of x times W_e^T, where e is the group that m falls in: the first group_sizes[0] rows
    are expert 0's, and so on.

    `weights` is [E, F, D] in any stored format; sums are float32. Rows beyond the last group are
    unspecified.
    """
    chosen = choose(TABLE, implementation, x, weights, group_sizes)
    return chosen.run(x, weights, group_sizes, out_dtype=out_dtype)
