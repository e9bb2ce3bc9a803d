"""Rotary positions: angles of partial RoPE; the rotation itself is
`pallas_kernels.kv_insert.norm_rope`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.parts import AttentionConfig


def rope_angles(
    positions: Int[Array, "*rows"], config: AttentionConfig
) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows r"]]:
    """cos and sin of position x theta^(-2 i / rotary_dim), i < rotary_dim / 2, in float32
    (spec/model 2.6).
    """
    half = config.rotary_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / max(half, 1)
    frequencies = config.rope_theta**-exponents
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)
