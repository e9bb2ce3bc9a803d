"""Routed experts as three products of sorted rows: the meaning of `mixture`, and the way where each
product has something added to it, as adapters do.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.activation import Activation, swiglu
from pallas_kernels.grouped_matmul.rows import permute_rows
from pallas_kernels.scaled_matmul import Weight, scaled_matmul, scaled_matmuls


class Matrices(NamedTuple):
    """Of all experts, in any stored format; without E those of the shared one."""

    gate: Weight  # [E, F, D]
    up: Weight  # [E, F, D]
    down: Weight  # [E, D, F]


Linear = Callable[[str, Array, Array], Array]  # a matrix's name, sorted rows, how many each expert


def mixture(
    x: Float[Array, "T D"],
    matrices: Matrices,
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    activation: Activation,
    shared: Matrices | None = None,
) -> Float[Array, "T D"]:
    """See the package."""

    def linear(name: str, rows: Array, sizes: Array) -> Array:
        one = getattr(matrices, name)
        return reference.grouped_matmul(rows, one, sizes, out_dtype=jnp.float32)

    y = mixture_by(linear, x, matrices.gate.shape[0], experts, weights, activation)
    return y if shared is None else y + of_shared(x, shared, activation)


def of_shared(
    x: Float[Array, "T D"], matrices: Matrices, activation: Activation
) -> Float[Array, "T D"]:
    """One expert that all tokens meet, its matrices [F, D], [F, D] and [D, F]."""
    gate, up = scaled_matmuls(x, [matrices.gate, matrices.up], out_dtype=x.dtype)
    return scaled_matmul(swiglu(gate, up, activation), matrices.down, out_dtype=x.dtype)


def mixture_by(
    linear: Linear,
    x: Float[Array, "T D"],
    num_experts: int,
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    activation: Activation,
) -> Float[Array, "T D"]:
    """The same with a caller's products, by the names in `Matrices`."""
    (T, X), E = experts.shape, num_experts
    is_here = (experts >= 0) & (experts < E)
    flat = jnp.where(is_here, experts, E).reshape(T * X)
    order = jnp.argsort(flat, stable=True)  # (token, choice) pairs sorted by expert
    back = jnp.argsort(order)
    sizes = jnp.sum(flat[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)

    def rounded(name: str, rows: Array) -> Array:
        return linear(name, rows, sizes).astype(rows.dtype)

    rows = permute_rows(jnp.repeat(x, X, axis=0), order, back)
    y = rounded("down", swiglu(rounded("gate", rows), rounded("up", rows), activation))
    y_TXD = permute_rows(y, back, order).reshape(T, X, -1).astype(jnp.float32)
    y_TXD = jnp.where(is_here[..., None], y_TXD, 0.0)  # rows beyond the last expert are unspecified
    y_TD = jnp.einsum("TXD,TX->TD", y_TXD, weights, precision="highest")
    return y_TD.astype(x.dtype)
