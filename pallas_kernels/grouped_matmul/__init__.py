"""grouped_matmul: rows sorted by expert x each expert's own weight matrix; `mixture`: the routed
experts as a whole, from tokens to their weighted sums.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.grouped_matmul import by_parts, mosaic, reference
from pallas_kernels.grouped_matmul.activation import Activation, swiglu
from pallas_kernels.grouped_matmul.by_parts import Matrices, mixture_by
from pallas_kernels.scaled_matmul import Weight

__all__ = [
    "Activation",
    "Matrices",
    "grouped_matmul",
    "mixture",
    "mixture_by",
    "swiglu",
]

TABLE = (
    Implementation("mosaic", mosaic.grouped_matmul, mosaic.refuse_matmul),
    Implementation("reference", reference.grouped_matmul),
)
MIXTURES = (
    Implementation("few_tokens", mosaic.few_tokens, mosaic.refuse_few_tokens),
    Implementation("mosaic", mosaic.mixture, mosaic.refuse_mixture),
    Implementation("reference", by_parts.mixture),
)


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
    chosen = choose(TABLE, implementation, x, weights, group_sizes, out_dtype=out_dtype)
    return chosen.run(x, weights, group_sizes, out_dtype=out_dtype)


def mixture(
    x: Float[Array, "T D"],
    matrices: Matrices,
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    activation: Activation,
    shared: Matrices | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """The sum of each token's experts, times their weights: down (act(gate x, up x)); and that of
    an expert that all tokens share, if there is one.

    Products are summed in float32 and rounded to x's dtype; so are the activations. The weighted
    sum is float32, in the order of the token's choices; it is rounded before the shared expert's
    is added. Ids outside of 0 .. E - 1 add nothing: other devices have those experts.
    """
    args = x, matrices, experts, weights, activation, shared
    return choose(MIXTURES, implementation, *args).run(*args)
