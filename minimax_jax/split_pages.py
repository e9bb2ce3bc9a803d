"""Attention where neighbouring ranks share out the pages of a context (`dcp` with `split`).

Each of n ranks of a group has all heads of the group, of every n-th block of a context: block j
lies on rank j mod n. Ids of blocks count over the group: id p is row p // n of rank p mod n, so the
j-th entry of a sequence's table is an id of j modulo n. Whoever owns the pages sees to that.

    keys         the group's heads, written by the rank that has their block
    choice       every rank scores its own blocks for the group's heads, and all get all scores. Of
                 more than a few tokens a sequence the index keys of the batch's contexts are
                 gathered instead, for as long as a layer chooses. One op decides, as on one device,
                 by the same bits
    attention    every rank attends for all heads of the group to those chosen blocks that it has;
                 the parts go to the heads' owners, which merge them by their log-sum-exp

A rank holds 1 / n of the group's bytes, so index keys, and key heads that more ranks than heads
would copy, are stored once a group. With n = 1 every function here but those of the choice gives
what it was given.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.parts import IndexerConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import own_heads
from minimax_jax.context_blocks import (
    MOST_TOKENS,
    best_of_parts,
    chosen_blocks,
    own_blocks,
    own_positions,
    own_scores,
)
from pallas_kernels.kv_insert import Slots
from pallas_kernels.layouts.pages import Pages, Source
from sharding.axes import MODEL
from sharding.collectives import exchanged, gathered, rank


def own_slots(slots: Slots, n: int) -> Slots:
    """Where a rank writes: nowhere what other ranks of its group have."""
    if n == 1:
        return slots
    ids = slots.block_ids
    is_own = (ids >= 0) & (ids % n == rank(MODEL) % n)
    return replace(slots, block_ids=jnp.where(is_own, ids // n, -1))


def own_part(batch: Batch, n: int, block_size: int) -> Batch:
    """A batch as a rank sees it: its own blocks as rows of its pool, and after which of their keys
    each token stands.
    """
    if n == 1:
        return batch
    r = rank(MODEL) % n
    table = own_blocks(batch.block_table, r, n) // n  # -1 stays -1
    positions = own_positions(batch.positions, r, n, block_size)
    return replace(batch, block_table=table, positions=positions)


def own_choice(block_ids: Int[Array, "B T K C"], n: int) -> Int[Array, "B T K C"]:
    """Of chosen blocks, those that a rank has, by their places among its own."""
    if n == 1:
        return block_ids
    is_own = (block_ids >= 0) & (block_ids % n == rank(MODEL) % n)
    return jnp.where(is_own, block_ids // n, -1)


def group_heads(x: Float[Array, "B T K H"], num_heads: int, n: int) -> Float[Array, "B T heads H"]:
    """All heads of a rank's group: those of its ranks in order, or their part of all heads."""
    if n == 1 or x.shape[2] * n != num_heads:
        return own_heads(x, num_heads, n)
    B, T, K, H = x.shape
    return jnp.moveaxis(gathered(x[None], MODEL, group=n), 0, 2).reshape(B, T, n * K, H)


def chosen_of_parts(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    batch: Batch,
    own: Batch,
    choice: IndexerConfig,
    n: int,
) -> Int[Array, "B T K C"]:
    """What the group's heads choose in the whole context; `own` is the rank's part of the batch."""
    if index_q.shape[1] > MOST_TOKENS:
        index_k, table = gathered_index(index_k, own, n)
        return chosen_blocks(index_q, index_k, replace(batch, block_table=table), choice)
    scores = own_scores(index_q, index_k, own.block_table, batch.positions, n)
    parts = gathered(scores[None], MODEL, group=n)
    return best_of_parts(parts, batch.positions, index_k.block_size, choice)


def gathered_index(index_k: Source, own: Batch, n: int) -> tuple[Source, Int[Array, "B P"]]:
    """The index keys of the batch's contexts, of all ranks of the group, and the block table that
    finds them. `own` is the rank's part of the batch.
    """
    assert isinstance(index_k, Pages)
    component = index_k.component
    lines = index_k.line + jnp.arange(component.lines)
    rows = jnp.maximum(own.block_table, 0)  # [B, P / n]
    pages = gathered(index_k.pool[rows[..., None], lines][None], MODEL, group=n)
    n_B_P = pages.shape[:3]
    pages = jnp.moveaxis(pages, 0, 2).reshape(-1, *pages.shape[3:])
    table = jnp.arange(len(pages), dtype=jnp.int32).reshape(n_B_P[1], -1)
    return replace(index_k, pool=pages, line=jnp.int32(0)), table


def merged(
    out: Float[Array, "B T heads H"], lse: Float[Array, "B T heads"], n: int
) -> Float[Array, "B T N H"]:
    """Attention of a rank's own heads, from the parts that the ranks of its group have of all their
    heads. Zeros where no rank has keys.
    """
    if n == 1:
        return out
    outs, lses = (exchanged(x, MODEL, dimension=2, group=n) for x in (out, lse))
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))  # [n, B, T, N]
    total = jnp.sum(weights, axis=0)
    shares = weights / jnp.where(total > 0, total, 1.0)
    return jnp.sum(shares[..., None] * outs.astype(jnp.float32), axis=0).astype(out.dtype)
