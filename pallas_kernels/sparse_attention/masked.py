"""Attention over whole contexts with a mask: dense attention, and sparse attention where the
context is short.

A tile reads its blocks once for all its queries and multiplies proper matrices, so below a few
times C blocks this beats gathering per query; above that it would compute mostly what the mask
throws away, and refuses.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layouts.pages import Source, read
from pallas_kernels.sparse_attention.reference import masked_softmax_attention

# Context blocks a chosen block up to which the mask is cheaper; and never more than queries a tile,
# since the mask reads a block once for all of them. CPU of 2 cores, tiny's heads, T = 16, 1024
# tiles, forward and backward: even at 40 blocks for 4 chosen (2.1 s and 2.2 s of CPU time); at 16
# blocks the mask needs 0.6 times as much, at 64 1.5 times.
_MAX_WASTE = 10
_MAX_SCORES = 1 << 25  # float32 scores held at once (one query's are the least)


def refuse(q, k, v, block_ids, block_table, positions, *, scale) -> str | None:
    """A sentence when the context holds too many blocks for the number chosen."""
    queries, chosen, context = q.shape[1], block_ids.shape[-1], block_table.shape[1]
    most = min(queries, _MAX_WASTE)
    if context <= most * chosen:
        return None
    return (
        f"{context} context blocks for tiles of {queries} queries "
        f"are more than {most} for each of {chosen} chosen"
    )


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
    logical = jnp.arange(block_table.shape[1])
    chosen = jnp.any(block_ids[..., None] == logical, axis=-2)
    return _attend(q, k, v, chosen, block_table, positions, scale)


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """See the package."""
    chosen = jnp.ones((*positions.shape, 1, block_table.shape[1]), bool)
    return _attend(q, k, v, chosen, block_table, positions, scale)


def _attend(q, k: Source, v: Source, chosen_BTkP: Bool[Array, "B T k P"], table, positions, scale):
    B, T, N, H = q.shape
    queries = max(1, _MAX_SCORES // (N * table.shape[1] * k.block_size))  # at once
    rows = next(rows for rows in range(min(T, queries), 0, -1) if T % rows == 0)  # of a part

    @jax.checkpoint
    def attend(tile):
        return _attend_tile(*tile, k=k, v=v, scale=scale)

    parts = (
        q.reshape(-1, rows, N, H),
        chosen_BTkP.reshape(-1, rows, *chosen_BTkP.shape[2:]),
        jnp.repeat(table, T // rows, axis=0),
        positions.reshape(-1, rows),
    )
    group = min(max(1, queries // rows), B * T // rows)
    out, lse = lax.map(attend, parts, batch_size=group)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(B, T, N)


def _attend_tile(q_TNH, chosen_TkP, table_P, positions_T, k: Source, v: Source, scale: float):
    T, N, H = q_TNH.shape
    K, P, Z = k.num_heads, table_P.shape[0], k.block_size
    ids = jnp.broadcast_to(table_P, (K, P))
    causal = jnp.arange(P * Z) <= positions_T[:, None]  # [T, S]
    visible = jnp.repeat(chosen_TkP & (table_P >= 0), Z, axis=-1) & causal[:, None]  # [T, k, S]
    visible = jnp.broadcast_to(visible.swapaxes(0, 1)[:, None], (K, N // K, T, P * Z))
    q_KGH = q_TNH.reshape(T, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, N // K * T, H)
    keys, values = (read(x, ids).reshape(K, P * Z, H) for x in (k, v))
    visible = visible.reshape(K, N // K * T, P * Z)
    out, lse = masked_softmax_attention(q_KGH, keys, values, visible, scale)
    out = out.reshape(K, N // K, T, H).transpose(2, 0, 1, 3).reshape(T, N, H)
    return out, lse.reshape(K, N // K, T).transpose(2, 0, 1).reshape(T, N)
