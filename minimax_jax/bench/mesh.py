"""Two things that a mesh of several devices is chosen by: how long a small sum over the ranks
takes, of which a decode step has two a layer, and how long a layer's choice of blocks, whole on
every rank or split between them (`minimax_jax.context_blocks`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from configs.parts import IndexerConfig
from minimax_jax.batch import Batch
from minimax_jax.bench.steps import Measured, on_a_rank, on_mesh, random_cache, tables
from minimax_jax.cache import POOL_AXES, layer_pages
from minimax_jax.context_blocks import chosen_blocks
from pallas_kernels.layouts.pool import LINE, PoolLayout
from pallas_kernels.timing import Chain, time_of_a_call
from sharding.apply import local
from sharding.axes import MODEL
from sharding.collectives import total
from sharding.rules import Rules

_SUMS = 60  # of the chain, as in a step of 30 layers; a third of them is its other length
_QUERIES = ("batch", None, "index_heads", None)
_PARTS = ("partials", None, None)


def measure_sum(config: ModelConfig, dtype: str, tokens: int) -> Measured:
    """The sum over the tensor-parallel ranks of so many tokens' activations, one after another."""
    ranks = jax.sharding.get_mesh().shape[MODEL]
    shape = (ranks, tokens, config.hidden_size)
    # A factor that the compiler cannot know to be the same everywhere: else no sum has to travel.
    factors = [on_mesh(jnp.full((ranks, 1, 1), 1 / ranks, dtype), *_PARTS) for _ in range(_SUMS)]
    add = local(lambda x, factor: total(x, [MODEL]) * factor, in_axes=[_PARTS] * 2, out_axes=_PARTS)

    def call(_, x, factor):
        return add(x, factor), ()

    x = on_mesh(jax.random.normal(jax.random.key(0), shape, dtype), *_PARTS)
    time = time_of_a_call(Chain(call, (), x, factors))
    return Measured(
        name=f"sum {tokens} x {config.hidden_size} over {ranks}",
        seconds=time.whole / 1e6,
        tokens=tokens,
        bytes=2 * x.nbytes // ranks,
        flops=0,
        timeline=time.timeline,
        fallbacks=(),
        first_call=time.first_calls,
    )


def measure_choice(
    config: ModelConfig, rules: Rules, layout: PoolLayout, batch: int, context: int
) -> Measured:
    """The choice of blocks of one new token of each sequence, by all heads; layer after layer."""
    choice = config.indexer
    table, blocks = tables(batch, -(-context // layout.block_size))
    places = jnp.full((batch, 1), context - 1, jnp.int32)
    tokens = Batch(tokens=jnp.zeros_like(places), positions=places, block_table=table)
    shape = (batch, 1, choice.num_heads, choice.head_dim)
    index_q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    choose = local(
        partial(_chosen, layout=layout, choice=choice, ranks=rules.index_ranks),
        in_axes=[_QUERIES, POOL_AXES, (), ("batch", None)],
        out_axes=_QUERIES,
    )

    def call(constants, index_q, line):
        pool, tokens = constants
        return index_q, choose(index_q, pool, line, tokens)

    lines = [jnp.int32(layout.layer_line(i)) for i in range(len(layout.sparse_layers))]
    constants = random_cache(layout, blocks).pool, on_mesh(tokens, "batch", None)
    queries = on_mesh(index_q, *_QUERIES)
    time = time_of_a_call(Chain(call, constants, queries, lines))
    return Measured(
        name=f"choice {batch} x {context}",
        seconds=time.whole / 1e6,
        tokens=batch,
        bytes=on_a_rank(batch) * table.shape[1] * layout.index.lines * LINE // rules.index_ranks,
        flops=0,
        timeline=time.timeline,
        fallbacks=(),
        first_call=time.first_calls,
    )


def _chosen(index_q, pool, line, batch: Batch, *, layout, choice: IndexerConfig, ranks: int):
    pages = pool.reshape(pool.shape[1:])
    _, _, index_k = layer_pages(pages, layout, line, sparse=True)
    assert index_k is not None
    return chosen_blocks(index_q, index_k, batch, choice, ranks)
