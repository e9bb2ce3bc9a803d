"""Which blocks each query attends to; for long contexts with the scoring split between ranks.

Index keys are whole on every rank, and each rank chooses for its own heads. With `index_ranks` = n
(decode context parallelism) neighbouring ranks split that work by context instead: rank r of a
group scores the blocks with `block % n == r` for all of the group's heads and sends each head's
best to the head's owner. The owner scores those few again and chooses among them, so scores need
not travel, and forced blocks and ties (the lower id) are decided by the op that decides them on one
device. A head's best C are among the ranks' best C each, so the choice is the same.

The products are as many as before, but an index key is read by one rank of the group in place of
all, and reading is what scoring one token is bound by. Many tokens at once (prefill) share what is
read, and are not split.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.parts import IndexerConfig
from minimax_jax.batch import Batch
from pallas_kernels.block_select import block_select
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
    table, positions = batch.block_table, batch.positions
    if index_ranks == 1 or ranks(MODEL) == 1 or index_q.shape[1] > MOST_TOKENS:
        return _select(index_q, index_k, table, positions, choice, choice.top_k)
    return _split(index_q, index_k, table, positions, choice, index_ranks)


def _split(
    index_q, index_k: Source, table, positions, choice: IndexerConfig, n: int
) -> Int[Array, "B T K C"]:
    """The choice for a rank's own heads, of n ranks that share the scoring."""
    B, T, K, I = index_q.shape
    r, size = rank(MODEL) % n, index_k.block_size
    queries = gathered(index_q[None], MODEL, group=n)  # [n, B, T, K, I]
    queries = jnp.moveaxis(queries, 0, 2).reshape(B, T, n * K, I)
    # The forced blocks of a rank's own list may not be forced in the whole: they come on top.
    best = choice.top_k + choice.local_blocks + -(-choice.init_blocks // n)
    own = own_positions(positions, r, n, size)
    places = _select(queries, index_k, own_blocks(table, r, n), own, choice, best)
    ids = jnp.where(places < 0, -1, places * n + r)  # [B, T, n K, best]
    ids = exchanged(ids.reshape(B, T, n, K, best), MODEL, dimension=2, group=n)
    candidates = jnp.moveaxis(ids[:, :, :, 0], 0, 3).reshape(B, T, K, n * best)
    return _among(index_q, index_k, table, positions, candidates, choice)


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


def _among(
    index_q, index_k: Source, table, positions, candidates, choice: IndexerConfig
) -> Int[Array, "B T K C"]:
    """The choice among some blocks for each query and head, which hold all that are forced."""
    (B, T, K, I), size, P = index_q.shape, index_k.block_size, table.shape[1]
    last = jnp.sort(jnp.where(candidates < 0, P, candidates), axis=-1)  # as in the context, P: none
    physical = jnp.pad(table, [(0, 0), (0, 1)], constant_values=-1)
    lists = jnp.take_along_axis(physical[:, None, None], last, axis=-1)
    count = jnp.sum(last < P, axis=-1)
    places = jnp.where(count > 0, (count - 1) * size + (positions % size)[..., None], -1)
    rows = B * T * K
    found = _select(
        index_q.reshape(rows, 1, 1, I),
        index_k,
        lists.reshape(rows, -1),
        places.reshape(rows, 1),
        choice,
        choice.top_k,
    ).reshape(B, T, K, choice.top_k)
    ids = jnp.take_along_axis(last, jnp.maximum(found, 0), axis=-1)
    return jnp.where(found < 0, -1, ids)


def _select(index_q, index_k: Source, table, positions, choice: IndexerConfig, top_k: int):
    return block_select(
        index_q,
        index_k,
        table,
        positions,
        top_k=top_k,
        init_blocks=choice.init_blocks,
        local_blocks=choice.local_blocks,
    )
