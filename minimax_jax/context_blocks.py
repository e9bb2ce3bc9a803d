"""Which blocks each query attends to; for long contexts with the scoring split between ranks.

Index keys are whole on every rank, and each rank chooses for its own heads. With `index_ranks` = n
(decode context parallelism) neighbouring ranks split that work by context instead: rank r of a
group scores the blocks with `block % n == r` for all of the group's heads, and sends each head's
scores, four bytes a block, to the head's owner. A block's score is the same wherever it is made,
and the owner's choice is the op's own second half, so forced blocks and ties (the lower id) are
decided as on one device.

The products are as many as before, but an index key is read by one rank of the group in place of
all, and reading is what scoring one token is bound by. Many tokens at once (prefill) share what is
read, and are not split.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.parts import IndexerConfig
from minimax_jax.batch import Batch
from pallas_kernels.block_select import best_blocks, block_scores, block_select
from pallas_kernels.layouts.pages import Source
from sharding.axes import MODEL
from sharding.collectives import exchanged, gathered, rank, ranks

MOST_TOKENS = 8  # of a sequence in a step that splits contexts: one, or a draft to verify


def chosen_blocks(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    batch: Batch,
    choice: IndexerConfig,
    index_ranks: int = 1,
) -> Int[Array, "B T K C"]:
    """`block_select` for the heads that are here; -1 in unused places."""
    n, (B, T, K, I) = index_ranks, index_q.shape
    if n == 1 or ranks(MODEL) == 1 or T > MOST_TOKENS:
        table, positions = batch.block_table, batch.positions
        return block_select(index_q, index_k, table, positions, **_forced(choice))
    queries = jnp.moveaxis(gathered(index_q[None], MODEL, group=n), 0, 2).reshape(B, T, n * K, I)
    table = own_blocks(batch.block_table, rank(MODEL) % n, n)
    scores = own_scores(queries, index_k, table, batch.positions, n)
    parts = exchanged(scores, MODEL, dimension=2, group=n)
    return best_of_parts(parts, batch.positions, index_k.block_size, choice)


def own_scores(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    own_table: Int[Array, "B P_n"],
    positions: Int[Array, "B T"],
    n: int,
) -> Float[Array, "B T K P4"]:
    """The scores of a rank's every n-th block, all of them that come before a query's newest."""
    r, size = rank(MODEL) % n, index_k.block_size
    places = own_positions(positions, r, n, size)
    # Another rank's newest block is past all that are here, so these are all before it.
    is_past = (places >= 0) & ((positions // size - r) % n != 0)
    return block_scores(index_q, index_k, own_table, places + is_past)


def best_of_parts(
    parts: Float[Array, "n B T K P4"],
    positions: Int[Array, "B T"],
    block_size: int,
    choice: IndexerConfig,
) -> Int[Array, "B T K C"]:
    """The choice among all blocks, from the scores of n ranks that have every n-th each."""
    scores = jnp.moveaxis(parts, 0, -1)
    scores = scores.reshape(*scores.shape[:3], -1)
    return best_blocks(scores, positions, block_size=block_size, **_forced(choice))


def own_blocks(table: Int[Array, "B P"], r: Array | int, n: int) -> Int[Array, "B P_n"]:
    """The physical ids of the blocks r, r + n, r + 2 n, ...; -1 past the last."""
    B, P = table.shape
    padded = jnp.pad(table, [(0, 0), (0, -P % n)], constant_values=-1)
    return jnp.take(padded.reshape(B, -1, n), r, axis=2)


def own_positions(
    positions: Int[Array, "B T"], r: Array | int, n: int, size: int
) -> Int[Array, "B T"]:
    """Where a token stands in a list of every n-th block of its context, from block r on: after the
    same keys of that list. -1 where it sees none.
    """
    newest = positions // size
    count = (newest - r) // n + 1  # own blocks that it sees
    is_own = (newest - r) % n == 0
    place = jnp.where(is_own, (count - 1) * size + positions % size, count * size - 1)
    return jnp.where((positions < 0) | (count <= 0), -1, place)


def _forced(choice: IndexerConfig) -> dict[str, Any]:
    return {
        "top_k": choice.top_k,
        "init_blocks": choice.init_blocks,
        "local_blocks": choice.local_blocks,
    }
