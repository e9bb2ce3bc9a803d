"""Teaches the indexer where the heads look: its choice is hard, so the language-model loss never
reaches it.

The teacher is the heads' own attention over every visible key, detached: its mass on block b, the
mean over the query heads of key head k, and without the blocks that are always chosen, is m[b]. The
student is the softmax of the block scores B[b] (maximum over a block's keys of the index product,
spec/model 2.8), scaled by I^-1/2. The loss of a query and a key head is

    sum_b m[b] (log m[b] / |m| - log softmax_b(B))        |m| = sum_b m[b]

which is |m| times a KL divergence: a query counts as much as it looks beyond its forced blocks.
Everything but the indexer's own parameters is detached, inputs included. It is computed for sampled
queries, so that its cost does not grow with the pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from configs.parts import IndexerConfig
from minimax_jax.attention import Attention, norm_rope, through_cache
from minimax_jax.batch import Batch
from minimax_jax.context import Context
from minimax_jax.layers import Linear
from minimax_jax.model import Model

TINY = 1e-20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """n sampled places of a batch: tile and place in the tile."""

    tiles: Int[Array, "n"]
    places: Int[Array, "n"]

    @classmethod
    def sample(cls, key: Array, batch: Batch, number: int) -> "Queries":
        """Uniform, with repetition; padding may be drawn and then counts nothing."""
        B, Z = batch.tokens.shape
        keys = jax.random.split(key)
        tiles = jax.random.randint(keys[0], (number,), 0, B)
        return cls(tiles, jax.random.randint(keys[1], (number,), 0, Z))

    def of(self, x: Array) -> Array:
        """Rows [n, ...] of an array [B, Z, ...]."""
        return x[self.tiles, self.places]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerLoss:
    """Of one layer, or their mean. `looked` is the attention that queries with more than C blocks
    pay beyond the forced ones, and `caught` the part of it that falls on blocks the indexer
    chooses; both are sums over the queries.
    """

    loss: Float[Array, ""]
    looked: Float[Array, ""]
    caught: Float[Array, ""]


def indexer_loss(
    model: Model,
    inputs: Sequence[Float[Array, "B Z D"]],
    context: Context,
    queries: Queries,
    choice: IndexerConfig,
) -> IndexerLoss:
    """The mean over the sparse layers.

    `inputs` is the residual stream before each layer, `choice` how many blocks are chosen, which
    ones always.
    """
    results = []
    for layer, x in zip(model.layers, inputs, strict=True):
        if layer.attention.indexer is not None:
            normed = lax.stop_gradient(layer.input_norm(x))
            results.append(_of_layer(layer.attention, normed, context, queries, choice))
    if not results:
        nothing = jnp.float32(0)
        return IndexerLoss(loss=nothing, looked=nothing, caught=nothing)
    return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values)), *results)


def _of_layer(
    attention: Attention, x, context: Context, queries: Queries, choice: IndexerConfig
) -> IndexerLoss:
    visible_nP = jnp.any(_causal(context, queries), axis=-1)
    free_nP = visible_nP & ~_forced(visible_nP.shape[1], context, queries, choice)
    mass_nKP = jnp.where(free_nP[:, None], block_mass(attention, x, context, queries), 0.0)
    mass_nKP = lax.stop_gradient(mass_nKP)
    scores_nKP = index_scores(attention, x, context, queries)
    scores_nKP = jnp.where(free_nP[:, None], scores_nKP, -jnp.inf)
    some_n = jnp.any(free_nP, axis=-1)
    loss_nK = jnp.where(some_n[:, None], _divergence(mass_nKP, scores_nKP, some_n), 0.0)
    num_free = choice.top_k - choice.init_blocks - choice.local_blocks
    _, chosen = lax.top_k(scores_nKP, min(num_free, scores_nKP.shape[-1]))
    caught_nK = jnp.sum(jnp.take_along_axis(mass_nKP, chosen, axis=-1), axis=-1)
    hard_n1 = (jnp.sum(visible_nP, axis=-1) > choice.top_k)[:, None]
    return IndexerLoss(
        loss=jnp.sum(loss_nK) / jnp.maximum(jnp.sum(some_n) * loss_nK.shape[1], 1),
        looked=jnp.sum(jnp.sum(mass_nKP, axis=-1) * hard_n1),
        caught=jnp.sum(caught_nK * hard_n1),
    )


def _divergence(mass_nKP, scores_nKP, some_n) -> Float[Array, "n K"]:
    """sum_b m[b] (log m[b] / |m| - log softmax_b(B)); a row without blocks is meaningless."""
    log_student = jax.nn.log_softmax(jnp.where(some_n[:, None, None], scores_nKP, 0.0), axis=-1)
    total = jnp.maximum(jnp.sum(mass_nKP, axis=-1, keepdims=True), TINY)
    log_teacher = jnp.log(jnp.maximum(mass_nKP, TINY) / total)
    terms = mass_nKP * (log_teacher - jnp.where(mass_nKP > 0, log_student, 0.0))
    return jnp.sum(terms, axis=-1)


def block_mass(
    attention: Attention, x: Float[Array, "B Z D"], context: Context, queries: Queries
) -> Float[Array, "n K P"]:
    """The share of each block in the attention over all causal keys, mean over the G query heads of
    a key head.
    """
    c, formats = attention.config, context.layout.formats
    q = _heads(attention.q_proj, attention.q_norm, queries.of(x), c.num_heads, queries, context)
    q_nKGH = q.reshape(q.shape[0], c.num_kv_heads, -1, c.head_dim)
    k = _heads(attention.k_proj, attention.k_norm, x, c.num_kv_heads, None, context)
    k_nPZKH = _blocks(through_cache(k, formats.kv, formats.compute), context, queries)
    scores = (
        jnp.einsum("nKGH,nPZKH->nKGPZ", q_nKGH, k_nPZKH, precision="highest") * c.head_dim**-0.5
    )
    scores = jnp.where(_causal(context, queries)[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=(-2, -1), keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.maximum(jnp.sum(weights, axis=(-2, -1)), TINY)
    return jnp.mean(jnp.sum(weights, axis=-1) / total[..., None], axis=2)


def index_scores(
    attention: Attention, x: Float[Array, "B Z D"], context: Context, queries: Queries
) -> Float[Array, "n K P"]:
    """The indexer's block scores x I^-1/2, with a gradient; -inf where no key is causal."""
    indexer, formats = attention.indexer, context.layout.formats
    assert indexer is not None
    c = indexer.config
    q_nKI = _heads(indexer.q_proj, indexer.q_norm, queries.of(x), c.num_heads, queries, context)
    k = _heads(indexer.k_proj, indexer.k_norm, x, 1, None, context)
    k_nPZI = _blocks(through_cache(k, formats.index, formats.compute), context, queries)[..., 0, :]
    scores = jnp.einsum("nKI,nPZI->nKPZ", q_nKI, k_nPZI, precision="highest") * c.head_dim**-0.5
    causal = _causal(context, queries)[:, None]
    return jnp.max(jnp.where(causal, scores, -jnp.inf), axis=-1)


def _heads(linear: Linear, norm, x, heads: int, queries: Queries | None, context: Context):
    """A projection split into heads, normed and rotated: of sampled queries, or of all places."""
    cos, sin = context.cos, context.sin
    if queries is not None:
        cos, sin = queries.of(cos), queries.of(sin)
    y = linear(x).reshape(*x.shape[:-1], heads, -1)
    return norm_rope(y, norm.weight.get_value(), cos, sin, norm.eps).astype(jnp.float32)


def _blocks(x_BZhw: Array, context: Context, queries: Queries) -> Float[Array, "n P Z h w"]:
    """Each query's own segment, block by block; the caller masks what lies beyond its end."""
    return x_BZhw[jnp.maximum(context.batch.block_table[queries.tiles], 0)]


def _causal(context: Context, queries: Queries) -> Bool[Array, "n P Z"]:
    """Which keys of its segment each query sees; none for padding."""
    positions = queries.of(context.batch.positions)
    table_nP = context.batch.block_table[queries.tiles]
    Z = context.layout.block_size
    keys_PZ = jnp.arange(table_nP.shape[1])[:, None] * Z + jnp.arange(Z)
    return (table_nP[:, :, None] >= 0) & (keys_PZ <= positions[:, None, None])


def _forced(
    num_blocks: int, context: Context, queries: Queries, c: IndexerConfig
) -> Bool[Array, "n P"]:
    newest = jnp.maximum(queries.of(context.batch.positions), 0) // c.block_size
    ids = jnp.arange(num_blocks)
    return (ids < c.init_blocks) | (ids > newest[:, None] - c.local_blocks)
