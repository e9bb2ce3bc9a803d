"""sparse_attention in plain jnp: gather each query's chosen blocks and nothing else, then a float32
softmax over them.

Work and memory a query are C x Z keys whatever the context; queries are walked in groups that
gather at most 256 MiB.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layouts.pages import Source, read

_MAX_GATHERED = 1 << 26  # float32 values of K gathered at once


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_ids: Int[Array, "B T K C"],
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """See the package."""
    B, T, N, H = q.shape
    K, C = block_ids.shape[2:]
    rows = jnp.arange(B)[:, None, None, None]
    physical = jnp.where(block_ids < 0, -1, block_table[rows, jnp.maximum(block_ids, 0)])
    queries = (
        q.reshape(B * T, K, N // K, H),
        block_ids.reshape(B * T, K, C),
        physical.reshape(B * T, K, C),
        positions.reshape(B * T),
    )
    group = min(B * T, max(1, _MAX_GATHERED // (K * C * k.block_size * H)))

    @jax.checkpoint  # a gathered key is cheaper to gather again than to keep for the backward pass
    def attend(query):
        return _attend_one(*query, k=k, v=v, scale=scale)

    out, lse = lax.map(attend, queries, batch_size=group)
    return out.reshape(B, T, N, H).astype(q.dtype), lse.reshape(B, T, N)


def _attend_one(q_KGH, block_ids_KC, physical_KC, position, k: Source, v: Source, scale: float):
    K, C = block_ids_KC.shape
    key_positions = block_ids_KC[:, :, None] * k.block_size + jnp.arange(k.block_size)
    visible = (physical_KC[:, :, None] >= 0) & (key_positions <= position)
    visible = visible.reshape(K, 1, C * k.block_size)
    keys, values = (read(x, physical_KC).reshape(K, C * k.block_size, -1) for x in (k, v))
    return masked_softmax_attention(q_KGH, keys, values, visible, scale)


def masked_softmax_attention(
    q: Float[Array, "*batch G H"],
    keys: Float[Array, "*batch S H"],
    values: Float[Array, "*batch S H"],
    visible: Bool[Array, "*#batch #G S"],
    scale: float,
) -> tuple[Float[Array, "*batch G H"], Float[Array, "*batch G"]]:
    """float32 softmax over the visible keys; (0, -inf) where none is. What lies under the mask
    never matters; NaN neither, in keys that no query of the batch entry sees.
    """
    seen = jnp.any(visible, axis=-2)[..., None]
    keys, values = jnp.where(seen, keys, 0.0), jnp.where(seen, values, 0.0)
    q32 = q.astype(jnp.float32)
    scores = jnp.einsum("...GH,...SH->...GS", q32, keys, precision="highest") * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = jnp.einsum("...GS,...SH->...GH", weights, values, precision="highest")
    lse = jnp.where(some, jnp.log(total) + top[..., 0], -jnp.inf)
    return out / total[..., None], lse
