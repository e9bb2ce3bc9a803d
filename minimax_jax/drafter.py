"""The DSpark drafter: a few sliding-window layers that turn [last token, noise x 6] into the hidden
states of the next 7 tokens (spec/dspark 1.3).

It never embeds the prompt. Its context keys and values are projections of the target's residual
stream after `target_layers`, written into the draft part of the same pages once a token is
committed. The block's own keys are operands of its attention and are never written. Embedding and
head are the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from configs.model import ModelConfig
from configs.parts import DrafterConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import POOL_AXES, Cache, layer_pages, own_heads
from minimax_jax.layers import MLP, GemmaNorm, Linear
from minimax_jax.rope import rope_angles
from minimax_jax.shards import of_heads, partial_sums, summed
from minimax_jax.speculative.heads import ConfidenceHead, MarkovHead
from pallas_kernels.kv_insert import KeyTransform, Rows, kv_insert, norm_rope
from pallas_kernels.layouts.pages import Pages, Source
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout, through_cache
from pallas_kernels.window_attention import window_attention
from sharding.apply import constrain, local
from sharding.rules import SERVE

# Logical axes of what a rank takes and gives.
_HEADS, _KV_HEADS = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DraftContext:
    """What all layers share in one proposal of B blocks of T rows.

    `lengths` is the position of each block's first row, and the number of tokens whose context is
    in the pages of `block_table`; -1 marks padding.
    """

    block_table: Int[Array, "B P"]
    lengths: Int[Array, "B"]
    cos: Float[Array, "B T r"]
    sin: Float[Array, "B T r"]
    formats: CacheFormats = field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        block_table: Int[Array, "B P"],
        lengths: Int[Array, "B"],
        config: DrafterConfig,
        formats: CacheFormats,
    ) -> "DraftContext":
        """The context of blocks that are `config.draft_block` rows long."""
        positions = jnp.maximum(lengths, 0)[:, None] + jnp.arange(config.draft_block)
        cos, sin = rope_angles(positions, config.attention)
        return cls(block_table=block_table, lengths=lengths, cos=cos, sin=sin, formats=formats)


class DraftAttention(nnx.Module):
    """Attention of a block over its window of context and, both ways, over itself."""

    def __init__(self, dim: int, config: DrafterConfig, rngs: nnx.Rngs):
        a = config.attention
        kv_dim = a.num_kv_heads * a.head_dim
        self.q_proj = Linear(a.num_heads * a.head_dim, dim, ("heads", "embed"), rngs)
        self.k_proj = Linear(kv_dim, dim, ("kv_heads", "embed"), rngs)
        self.v_proj = Linear(kv_dim, dim, ("kv_heads", "embed"), rngs)
        self.o_proj = Linear(dim, a.num_heads * a.head_dim, ("embed", "attended"), rngs)
        self.q_norm = GemmaNorm(a.head_dim, config.norm_eps)
        self.k_norm = GemmaNorm(a.head_dim, config.norm_eps)
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D"], k: Source, v: Source, context: DraftContext
    ) -> Float[Array, "B T D"]:
        """The output for a block's normed stream x, over context keys k and values v."""
        a, (B, T, D), eps = self.config.attention, x.shape, self.q_norm.eps
        cos, sin, formats = context.cos, context.sin, context.formats
        q = self.q_proj(x).reshape(B, T, a.num_heads, a.head_dim)
        q = norm_rope(q, self.q_norm.weight.get_value(), cos, sin, eps)
        q = through_cache(q, "fp8") if formats.rounds_queries(formats.draft) else q
        own = self.rows(x.reshape(B * T, D))
        own_k, own_v = (r.reshape(B, T, a.num_kv_heads, a.head_dim) for r in (own.k, own.v))
        own_k = norm_rope(own_k, self.k_norm.weight.get_value(), cos, sin, eps)
        attend = partial(_attended, window=self.config.window)
        if isinstance(k, Pages):
            in_axes = [_HEADS, *[POOL_AXES] * 2, *[_KV_HEADS] * 2, ("batch", None), ("batch",)]
            attend = local(attend, in_axes=in_axes, out_axes=_HEADS)
        out = attend(q, k, v, own_k, own_v, context.block_table, context.lengths)
        heads = out.reshape(B, T, a.num_heads * a.head_dim)
        return of_heads(self.o_proj, heads, None, SERVE)

    def rows(self, x: Float[Array, "T D"]) -> Rows:
        """Raw keys and values: of a block's normed stream, or of the fused context as it is."""
        shape = (-1, self.config.attention.num_kv_heads, self.config.attention.head_dim)
        return Rows(k=self.k_proj(x).reshape(shape), v=self.v_proj(x).reshape(shape), index_k=None)

    def insert(
        self,
        pool: UInt8[Array, "ranks P lines 128"],
        line: Array | int,
        fused: Float[Array, "B T D"],
        batch: Batch,
        layout: PoolLayout,
    ) -> UInt8[Array, "ranks P lines 128"]:
        """The pool with this layer's context keys and values at the batch's positions."""
        rows = self.rows(fused.reshape(-1, fused.shape[-1]))
        shape = (*fused.shape[:2], *rows.k.shape[1:])
        insert = local(
            partial(_inserted, layout=layout, config=self.config, eps=self.k_norm.eps),
            in_axes=[POOL_AXES, (), *[_KV_HEADS] * 2, (None,), ("batch", None)],
            out_axes=POOL_AXES,
        )
        k, v, norm = rows.k.reshape(shape), rows.v.reshape(shape), self.k_norm.weight.get_value()
        return insert(pool, jnp.asarray(line), k, v, norm, batch)


class DraftLayer(nnx.Module):
    """h += attention(norm(h)); h += mlp(norm(h))."""

    def __init__(self, dim: int, config: DrafterConfig, rngs: nnx.Rngs):
        self.input_norm = GemmaNorm(dim, config.norm_eps)
        self.attention = DraftAttention(dim, config, rngs)
        self.post_attention_norm = GemmaNorm(dim, config.norm_eps)
        self.mlp = MLP(dim, config.mlp.dense_dim, config.mlp, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], k: Source, v: Source, context: DraftContext
    ) -> Float[Array, "B T D"]:
        x = x + self.attention(self.input_norm(x), k, v, context)
        x = constrain(x, "batch", None, "embed")
        normed, into = self.post_attention_norm(x), ("batch", None, "embed")
        x = x + summed([partial_sums(self.mlp, normed, None, into=into, rules=SERVE)], SERVE)
        return constrain(x, *into)


class Drafter(nnx.Module):
    """The drafter of a target, `config.drafter`; its pages are the `draft_part` of the layout."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        if config.drafter is None:
            raise ValueError("the model has no drafter: there is no dspark/config.json beside it")
        drafter, dim, rank = config.drafter, config.hidden_size, config.drafter.markov_rank
        self.fc = Linear(dim, dim * len(drafter.target_layers), ("embed", None), rngs)
        self.hidden_norm = GemmaNorm(dim, drafter.norm_eps)
        self.layers = nnx.List([DraftLayer(dim, drafter, rngs) for _ in range(drafter.num_layers)])
        self.norm = GemmaNorm(dim, drafter.norm_eps)
        self.markov = MarkovHead(config.vocab_size, rank, rngs)
        self.confidence = ConfidenceHead(dim, rank, rngs) if drafter.confidence_head else None
        self.config = drafter

    def fused(self, taps: Sequence[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        """What all layers' context keys and values are projections of: the target's stream after
        each of `target_layers`, in that order, projected and normed once.
        """
        return self.hidden_norm(self.fc(jnp.concatenate(taps, axis=-1)))

    def insert(self, cache: Cache, fused: Float[Array, "B T D"], batch: Batch) -> Cache:
        """The cache with each token's context in every draft layer, at the token's position.

        Rows of position -1 (padding, or drafts that were rejected) write nothing.
        """
        layout, pool = cache.layout.draft_part, cache.pool
        for i, layer in enumerate(self.layers):
            line = jnp.int32(layout.layer_line(i))
            pool = _insert_layer(layer.attention, pool, line, fused, batch, layout)
        return cache.with_pool(pool)

    def block(self, anchors: Int[Array, "B"]) -> Int[Array, "B T"]:
        """The ids of each sequence's block: its newest token, then noise."""
        noise = jnp.full((len(anchors), self.config.draft_block - 1), self.config.noise_token)
        return jnp.concatenate([anchors[:, None], noise.astype(anchors.dtype)], axis=1)

    def hidden(
        self,
        x: Float[Array, "B T D"],
        cache: Cache,
        block_table: Int[Array, "B P"],
        lengths: Int[Array, "B"],
    ) -> Float[Array, "B T D"]:
        """The final, normed states of embedded blocks that start at position `length`.

        Row k is about the token at length + k + 1: the anchor's row proposes, too.
        """
        layout, pool = cache.layout.draft_part, cache.pool
        context = DraftContext.of(block_table, lengths, self.config, cache.layout.formats)
        for i, layer in enumerate(self.layers):
            k, v, _ = layer_pages(pool, layout, layout.layer_line(i), sparse=False)
            x = _run_layer(layer, x, k, v, context)
        return self.norm(x)


def _attended(q, k: Source, v: Source, own_k, own_v, block_table, lengths, *, window: int):
    """Attention of one rank's heads."""
    if isinstance(k, Pages) and isinstance(v, Pages):
        k, v = k.of_rank(), v.of_rank()
        own_k, own_v = own_heads(own_k, k.num_heads), own_heads(own_v, k.num_heads)
    scale = q.shape[-1] ** -0.5
    return window_attention(q, k, v, own_k, own_v, block_table, lengths, window=window, scale=scale)


def _inserted(
    pool, line, k_BTKH, v_BTKH, k_norm, batch: Batch, *, layout: PoolLayout, config, eps: float
):
    """The pool of one rank with its heads' context keys and values."""
    k_BTKH, v_BTKH = (own_heads(x, layout.kv_heads) for x in (k_BTKH, v_BTKH))
    heads = k_BTKH.shape[2:]
    rows = Rows(k=k_BTKH.reshape(-1, *heads), v=v_BTKH.reshape(-1, *heads), index_k=None)
    cos, sin = rope_angles(batch.positions.reshape(-1), config.attention)
    transform = KeyTransform(k_norm=k_norm, index_norm=None, cos=cos, sin=sin, eps=eps)
    slots = batch.slots(layout.block_size)
    pages = kv_insert(pool.reshape(pool.shape[1:]), layout, line, rows, slots, transform)
    return pages.reshape(pool.shape)


# All layers of a drafter share one trace.
_insert_layer = jax.jit(DraftAttention.insert, static_argnames=("layout",))
_run_layer = jax.jit(DraftLayer.__call__)
