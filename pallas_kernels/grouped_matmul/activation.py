"""SwiGLU-OAI: y = min(g, limit) sigmoid(alpha min(g, limit)) (clip(u, +-limit) + beta)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclass(frozen=True, kw_only=True)
class Activation:
    """Its constants; the gate is clamped from above only (spec/model 2.10)."""

    alpha: float = 1.702
    limit: float = 7.0
    beta: float = 1.0


def swiglu(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], constants: Activation
) -> Float[Array, "*rows F"]:
    """y in float32, rounded once to the gate's dtype."""
    g = jnp.minimum(gate.astype(jnp.float32), constants.limit)
    u = jnp.clip(up.astype(jnp.float32), -constants.limit, constants.limit)
    return (g * jax.nn.sigmoid(constants.alpha * g) * (u + constants.beta)).astype(gate.dtype)
