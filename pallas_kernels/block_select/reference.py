"""block_select in plain jnp: B[t, b] = max over causal keys j of block b of <q_t, k_j>, then the
top C of it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.layouts.pages import Source, read

_HIGHEST = float(jnp.finfo(jnp.float32).max)  # loses to a forced block, whose score is inf
_LOWEST = -_HIGHEST  # and still beats a block that cannot be seen, whose score is -inf
_MAX_SCORES = 1 << 24  # token scores held at once (64 MiB of float32)


def block_select(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> Int[Array, "B T K C"]:
    """See the package."""
    scores = block_scores(index_q, index_k, block_table, positions)
    return best_blocks(
        scores,
        positions,
        block_size=index_k.block_size,
        top_k=top_k,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )


def best_blocks(
    scores: Float[Array, "B T K P"],
    positions: Int[Array, "B T"],
    *,
    block_size: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> Int[Array, "B T K C"]:
    """See the package."""
    scores = jnp.where(scores == 0, 0.0, scores)  # top_k ranks -0.0 below 0.0
    scores = jnp.nan_to_num(scores, nan=_LOWEST, posinf=_HIGHEST, neginf=_LOWEST)
    newest = (positions // block_size)[:, :, None, None]
    ids = jnp.arange(scores.shape[-1])
    forced = (ids < init_blocks) | (ids > newest - local_blocks)
    scores = jnp.where(forced, jnp.inf, scores)
    is_seen = (positions >= 0)[:, :, None, None] & (ids <= newest)
    scores = jnp.where(is_seen, scores, -jnp.inf)
    chosen_scores, chosen = lax.top_k(scores, min(top_k, scores.shape[-1]))
    chosen = jnp.where(chosen_scores == -jnp.inf, -1, chosen)
    unused = top_k - chosen.shape[-1]
    return jnp.pad(chosen, [(0, 0)] * 3 + [(0, unused)], constant_values=-1)


def block_scores(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T K P"]:
    """The indexer's score of every block, -inf where no key is causal. No gradient: selection is
    hard.
    """
    B, T, K, _ = index_q.shape
    P, Z = block_table.shape[1], index_k.block_size
    step = max(1, min(P, _MAX_SCORES // (B * T * K * Z)))
    num_steps = -(-P // step)
    padded = jnp.pad(block_table, [(0, 0), (0, num_steps * step - P)], constant_values=-1)
    index_q, index_k = lax.stop_gradient((index_q.astype(jnp.float32), index_k))

    def score_some(first: Int[Array, ""]) -> Float[Array, "B T K step"]:
        table = lax.dynamic_slice_in_dim(padded, first, step, axis=1)
        return _score(index_q, read(index_k, table[:, None])[:, 0], positions, first)

    parts = jax.lax.map(score_some, jnp.arange(num_steps) * step)  # [steps, B, T, K, step]
    return jnp.moveaxis(parts, 0, 3).reshape(B, T, K, num_steps * step)[..., :P]


def _score(q_BTKI, keys_BpZI, positions_BT, first):
    scores = jnp.einsum("BTKI,BpZI->BTKpZ", q_BTKI, keys_BpZI, precision="highest")
    scores = jnp.nan_to_num(scores, nan=_LOWEST, posinf=_HIGHEST, neginf=_LOWEST)
    p, Z = keys_BpZI.shape[1:3]
    key_positions = (first + jnp.arange(p))[:, None] * Z + jnp.arange(Z)
    causal = key_positions <= positions_BT[:, :, None, None, None]
    return jnp.max(jnp.where(causal, scores, -jnp.inf), axis=-1)
