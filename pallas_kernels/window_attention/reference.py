"""window_attention in plain jnp: gather the pages that the window can touch, append the block's own
keys, mask, softmax.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layouts.pages import Source, read
from pallas_kernels.sparse_attention.reference import masked_softmax_attention


def window_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_k: Float[Array, "B T K H"],
    block_v: Float[Array, "B T K H"],
    block_table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    window: int,
    scale: float,
) -> Float[Array, "B T N H"]:
    """See the package."""
    B, T, N, H = q.shape
    K, Z = k.num_heads, k.block_size
    num_pages = min(block_table.shape[1], -(-window // Z) + 1)
    first = jnp.maximum(lengths - window + 1, 0) // Z  # [B]
    logical = first[:, None] + jnp.arange(num_pages)  # [B, w]
    last = block_table.shape[1] - 1
    physical = jnp.take_along_axis(block_table, jnp.minimum(logical, last), axis=1)
    physical = jnp.where(logical > last, -1, physical)
    key_positions = (logical[:, :, None] * Z + jnp.arange(Z)).reshape(B, 1, num_pages * Z)
    query_positions = lengths[:, None, None] + jnp.arange(T)[:, None]
    inside = (key_positions > query_positions - window) & (key_positions < lengths[:, None, None])
    inside &= jnp.repeat(physical >= 0, Z, axis=1)[:, None]
    own = jnp.ones((B, T, T), bool)
    visible = jnp.tile(jnp.concatenate([inside, own], -1), (1, N // K, 1))[:, None]  # [B, 1, GT, S]
    keys = _with_own(k, physical, block_k)
    values = _with_own(v, physical, block_v)
    q_BKGH = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, H)
    out, _ = masked_softmax_attention(q_BKGH, keys, values, visible, scale)
    out = out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, N, H).astype(q.dtype)


def _with_own(source: Source, physical_Bw, own_BTKH):
    B, w = physical_Bw.shape
    K = source.num_heads
    context = read(source, jnp.broadcast_to(physical_Bw[:, None], (B, K, w)))
    context = context.reshape(B, K, w * source.block_size, -1)
    return jnp.concatenate([context, own_BTKH.swapaxes(1, 2).astype(jnp.float32)], axis=2)
