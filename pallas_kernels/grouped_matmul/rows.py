"""Moving rows to places that are known both ways, so that the gradient is a gather as well, and
matrices to several places each.

XLA transposes `x[rows]` to a scatter-add: serial on the CPU, atomic (and so in no fixed order) on
the GPU. Where each row goes to one place only, its gradient can be fetched from there; where a
matrix goes to many, its gradient is a product with ones and zeros.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.custom_vjp
def move_rows(
    x: Float[Array, "M D"],
    source: Int[Array, "S"],
    target: Int[Array, "M"],
    held: Bool[Array, "M"],
) -> Float[Array, "S D"]:
    """x[source]. `target[m]` is the one place of the result whose gradient row m gets, if `held`.

    Places that no `target` names must not matter to the loss.
    """
    return x[source]


def _forward(x, source, target, held):
    return move_rows(x, source, target, held), (target, held)


def _backward(kept, gradient):
    target, held = kept
    return jnp.where(held[:, None], gradient[target], 0), None, None, None


move_rows.defvjp(_forward, _backward)


def permute_rows(
    x: Float[Array, "M D"], order: Int[Array, "M"], inverse: Int[Array, "M"]
) -> Float[Array, "M D"]:
    """x[order] for a permutation whose inverse is at hand."""
    return move_rows(x, order, inverse, jnp.ones(len(order), bool))


@jax.custom_vjp
def matrices_at(weights: Float[Array, "E F D"], expert: Int[Array, "n"]) -> Float[Array, "n F D"]:
    """weights[expert]."""
    return weights[expert]


def _forward_matrices(weights, expert):
    return weights[expert], (expert, jnp.arange(len(weights)))


def _backward_matrices(kept, gradient):
    expert, all_experts = kept
    is_own = (all_experts[:, None] == expert).astype(gradient.dtype)
    how = {"preferred_element_type": jnp.float32, "precision": "highest"}
    return jnp.einsum("En,nFD->EFD", is_own, gradient, **how).astype(gradient.dtype), None


matrices_at.defvjp(_forward_matrices, _backward_matrices)
