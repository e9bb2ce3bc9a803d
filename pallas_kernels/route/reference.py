"""route in plain jnp (model specification 2.11). The bias takes part in the choice only."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def route(
    x: Float[Array, "*rows D"],
    gate: Float[Array, "E D"],
    bias: Float[Array, "E"],
    *,
    count: int,
    scale: float,
    one_device: bool,
) -> tuple[Int[Array, "*rows X"], Float[Array, "*rows X"]]:
    """See the package."""
    s = scores(x, gate)
    _, experts = lax.top_k(s + bias.astype(jnp.float32), count)
    return experts, mixing(s, experts, scale)


def scores(x: Float[Array, "*rows D"], gate: Float[Array, "E D"]) -> Float[Array, "*rows E"]:
    """Every expert's score, in (0, 1)."""
    wide = x.astype(jnp.float32), gate.astype(jnp.float32)
    return jax.nn.sigmoid(jnp.einsum("...D,ED->...E", *wide, precision="highest"))


def mixing(
    scores: Float[Array, "*rows E"], experts: Int[Array, "*rows X"], scale: float
) -> Float[Array, "*rows X"]:
    """The scores of these experts, whoever chose them, as weights whose sum is `scale`."""
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    total = jnp.sum(chosen, axis=-1, keepdims=True)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # all of them may underflow to 0
    return chosen / total * scale
