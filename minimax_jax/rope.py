"""Rotary positions: angles of partial RoPE; the rotation itself is
`pallas_kernels.kv_insert.norm_rope`.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from configs.parts import AttentionConfig


def rope_angles(
    positions: Int[Array, "*rows"], config: AttentionConfig
) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows r"]]:
    """cos and sin of position x theta^(-2 i / rotary_dim), i < rotary_dim / 2, in float32
    (spec/model 2.6).
    """
    half = config.rotary_dim // 2
    # on the host: a GPU's own power is a unit off, which a million positions make visible
    exact = config.rope_theta ** -(np.arange(half) / max(half, 1))
    frequencies = exact.astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)
