"""MSA attention: an indexer picks blocks, the heads attend to just those; every key is seen through
the cache format.

Without a cache the keys are this batch's own tiles, passed through the format (or what another run
stored for them); with one they are written to pages and read back. Everything after that is the
same code. Every device works on its own heads and its own rank of the pool (`sharding.local`), for
all tokens wherever they are split.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from configs.model import ModelConfig
from configs.parts import IndexerConfig
from minimax_jax.cache import POOL_AXES, layer_pages
from minimax_jax.context import Context
from minimax_jax.context_blocks import chosen_blocks
from minimax_jax.layers import GemmaNorm, Linear
from minimax_jax.lora import Adapter, part
from minimax_jax.micro_batches import after_read
from minimax_jax.projections import Norms, Projections
from minimax_jax.shards import columns, gathered_tokens, of_heads
from minimax_jax.split_pages import chosen_of_parts, merged, own_choice, own_part, own_slots
from pallas_kernels.kv_insert import KeyTransform, Query, Rows, norm_rope, with_queries
from pallas_kernels.layouts.pages import Blocks, Source
from pallas_kernels.layouts.pool import through_cache, through_record
from pallas_kernels.sparse_attention import dense_attention, sparse_attention
from sharding.apply import local
from sharding.rules import SERVE, Rules


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Where attention reads from."""

    k: Source
    v: Source
    index_k: Source | None


# Logical axes of what `_through_pages` takes and gives.
_HEADS, _OF_BATCH = ("batch", None, "heads", None), ("batch", None, None, None)
_KV_HEADS, _INDEX_HEADS = ("batch", None, "kv_heads", None), ("batch", None, "index_heads", None)
_PROJECTIONS = Projections._make([_HEADS, _KV_HEADS, _KV_HEADS, _INDEX_HEADS, _OF_BATCH])


class Attention(nnx.Module):
    """One layer's attention; a dense layer (M3's first three) has no indexer."""

    def __init__(self, config: ModelConfig, *, sparse: bool, rngs: nnx.Rngs):
        a, dim, eps = config.attention, config.hidden_size, config.norm_eps
        kv_dim = a.num_kv_heads * a.head_dim
        self.q_proj = Linear(a.num_heads * a.head_dim, dim, ("heads", "embed"), rngs)
        self.k_proj = Linear(kv_dim, dim, ("kv_heads", "embed"), rngs)
        self.v_proj = Linear(kv_dim, dim, ("kv_heads", "embed"), rngs)
        self.o_proj = Linear(dim, a.num_heads * a.head_dim, ("embed", "attended"), rngs)
        self.q_norm = GemmaNorm(a.head_dim, eps)
        self.k_norm = GemmaNorm(a.head_dim, eps)
        self.indexer = Indexer(config, rngs) if sparse else None
        self.config = a

    def __call__(
        self,
        x: Float[Array, "B T D"],
        pool: UInt8[Array, "ranks P lines 128"] | None,
        line: Array | int,
        context: Context,
        adapter: Adapter = None,
    ) -> tuple[Float[Array, "B T D"], UInt8[Array, "ranks P lines 128"] | None]:
        """The layer's output and the pool with this batch's keys in it (None stays None)."""
        x = gathered_tokens(x, context.rules)
        raw, norms = self._projections(x, adapter, context.rules), self._norms()
        choice = None if self.indexer is None else self.indexer.config
        if pool is None:
            keys = _packed_keys(raw, norms, context, line)
            out, _ = _attended(_turned(raw, norms, context), keys, context, choice)
        else:
            through_pages = local(
                partial(_through_pages, choice=choice),
                in_axes=[POOL_AXES, (), _PROJECTIONS, (None,), ("batch", None, None)],
                out_axes=[_HEADS, POOL_AXES],
                rules=context.rules,
            )
            out, pool = through_pages(pool, jnp.asarray(line), raw, norms, context)
        out = out.reshape(*x.shape[:2], self.config.num_heads * self.config.head_dim)
        return of_heads(self.o_proj, out, part(adapter, "o_proj"), context.rules), pool

    def packed_keys(
        self, x: Float[Array, "B T D"], context: Context, adapter: Adapter = None
    ) -> Keys:
        """The batch's own tiles, cut into blocks, as the cache would give them back."""
        return _packed_keys(self._projections(x, adapter), self._norms(), context, 0)

    def _projections(
        self, x: Float[Array, "B T D"], adapter: Adapter, rules: Rules = SERVE
    ) -> Projections:
        of: list[tuple[Linear, Any]] = [
            (self.q_proj, part(adapter, "q_proj")),
            (self.k_proj, part(adapter, "k_proj")),
            (self.v_proj, part(adapter, "v_proj")),
        ]
        if self.indexer is not None:
            of_index = part(adapter, "indexer")
            of.append((self.indexer.q_proj, part(of_index, "q_proj")))
            of.append((self.indexer.k_proj, part(of_index, "k_proj")))
        rows = columns(x, of, rules)
        H, I = self.config.head_dim, rows[-1].shape[-1]
        widths = [H, H, H, I, I][: len(of)]
        heads = [
            y.reshape(*x.shape[:2], y.shape[-1] // width, width)
            for y, width in zip(rows, widths, strict=True)
        ]
        return Projections(*heads, *[None] * (5 - len(of)))

    def _norms(self) -> Norms:
        indexer = self.indexer
        return Norms(
            q=self.q_norm.weight.get_value(),
            k=self.k_norm.weight.get_value(),
            index_q=None if indexer is None else indexer.q_norm.weight.get_value(),
            index_k=None if indexer is None else indexer.k_norm.weight.get_value(),
            eps=self.q_norm.eps,
        )


class Indexer(nnx.Module):
    """K index heads and one shared index key; head g chooses for key/value head g (spec/model
    2.8).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, dim = config.indexer, config.hidden_size
        self.q_proj = Linear(c.num_heads * c.head_dim, dim, ("index_heads", "embed"), rngs)
        self.k_proj = Linear(c.head_dim, dim, (None, "embed"), rngs)
        self.q_norm = GemmaNorm(c.head_dim, config.norm_eps)
        self.k_norm = GemmaNorm(c.head_dim, config.norm_eps)
        self.config = c

    def queries(self, x: Float[Array, "B T D"], adapter: Adapter) -> Float[Array, "B T K I"]:
        """The raw index queries, before norm and rotation."""
        c = self.config
        return self.q_proj(x, part(adapter, "q_proj")).reshape(
            *x.shape[:2], c.num_heads, c.head_dim
        )

    def __call__(
        self, x: Float[Array, "B T D"], index_k: Source, context: Context, adapter: Adapter = None
    ) -> Int[Array, "B T K C"]:
        """The blocks that each query attends to."""
        q, norm = self.queries(x, adapter), self.q_norm
        q = norm_rope(q, norm.weight.get_value(), context.cos, context.sin, norm.eps)
        q = _rounded(q, context, context.layout.formats.index)
        return chosen_blocks(q, index_k, context.batch, self.config)


def _through_pages(
    pool: UInt8[Array, "1 P lines 128"],
    line: Array,
    raw: Projections,
    norms: Norms,
    context: Context,
    *,
    choice: IndexerConfig | None,
) -> tuple[Float[Array, "B T N H"], UInt8[Array, "1 P lines 128"]]:
    """Writes one rank's keys into its pages and attends to what they give back."""

    def flat(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])

    layout, n = context.layout, context.rules.page_ranks
    raw = raw.of_rank(layout.kv_heads, n)
    index_k = None if raw.index_k is None else flat(raw.index_k)
    rows = Rows(k=flat(raw.k), v=flat(raw.v), index_k=index_k)
    cos, sin = flat(context.cos), flat(context.sin)
    transform = KeyTransform(
        k_norm=norms.k, index_norm=norms.index_k, cos=cos, sin=sin, eps=norms.eps
    )
    slots = own_slots(context.batch.slots(layout.block_size), n)
    queries = [Query(flat(one.heads), one.weight) for one in raw.queries(norms)]
    pages = pool.reshape(pool.shape[1:])
    pages, turned = with_queries(pages, layout, line, rows, slots, transform, queries)
    queries = [x.reshape(*raw.q.shape[:2], *x.shape[1:]) for x in turned]
    k, v, index_k = layer_pages(pages, layout, line, sparse=choice is not None)
    keys, pool = Keys(k=k, v=v, index_k=index_k), pages[None]
    out = merged(*_attended(queries, keys, context, choice, n), n)
    return out, after_read(pool, out, line) if context.alternates else pool


def _packed_keys(raw: Projections, norms: Norms, context: Context, line: Array | int) -> Keys:
    layout, record = context.layout, context.record
    Z, compute = layout.block_size, layout.formats.compute
    B, T = raw.k.shape[:2]
    assert T % Z == 0, "without a cache a tile is whole blocks"

    def blocks(x_BTKH, component, first):
        x = x_BTKH.reshape(B * T // Z, Z, *x_BTKH.shape[2:])
        if record is None:
            return Blocks(through_cache(x, component.format, compute))
        return Blocks(through_record(x, record, component, first, compute))

    def turned(x_BTKH, weight):
        return norm_rope(x_BTKH, weight, context.cos, context.sin, norms.eps)

    index_k = None
    if raw.index_k is not None:
        first = line + 2 * layout.kv.lines
        index_k = blocks(turned(raw.index_k, norms.index_k), layout.index, first)
    k = blocks(turned(raw.k, norms.k), layout.kv, line)
    v = blocks(raw.v, layout.kv, line + layout.kv.lines)
    return Keys(k=k, v=v, index_k=index_k)


def _turned(raw: Projections, norms: Norms, context: Context) -> list[Float[Array, "B T _ _"]]:
    """Queries as they meet keys, normed and rotated."""
    angles = context.cos, context.sin, norms.eps
    return [norm_rope(*query, *angles) for query in raw.queries(norms)]


def _attended(
    queries: list[Float[Array, "B T _ _"]],
    keys: Keys,
    context: Context,
    choice: IndexerConfig | None,
    n: int = 1,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """What the heads take from the keys that are here, of the chosen blocks or of all, and its
    log-sum-exp. With n > 1 other ranks have the other keys. The queries are those of the heads, and
    with a choice those of the index.
    """
    formats = context.layout.formats
    q = _rounded(queries[0], context, formats.kv)
    scale = q.shape[-1] ** -0.5
    own = own_part(context.batch, n, keys.k.block_size)
    places = own.block_table, own.positions
    if choice is None or keys.index_k is None:
        return dense_attention(q, keys.k, keys.v, *places, scale=scale)
    index_q = _rounded(queries[1], context, formats.index)
    if n == 1:
        ids = chosen_blocks(index_q, keys.index_k, own, choice, context.rules.index_ranks)
    else:
        ids = own_choice(chosen_of_parts(index_q, keys.index_k, context.batch, own, choice, n), n)
    return sparse_attention(q, keys.k, keys.v, ids, *places, scale=scale)


def _rounded(q: Float[Array, "B T heads H"], context: Context, fmt: str) -> Array:
    """Queries as keys of this format are met: rounded if the keys are."""
    return through_cache(q, "fp8") if context.layout.formats.rounds_queries(fmt) else q
