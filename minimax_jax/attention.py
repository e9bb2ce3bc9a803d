"""MSA attention: an indexer picks blocks, the heads attend to just those; every key is seen through
the cache format.

Without a cache the keys are this batch's own tiles, passed through the format; with one they are
written to pages and read back. Everything after that is the same code.
"""

from dataclasses import dataclass, field

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from configs.model import ModelConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import layer_pages
from minimax_jax.layers import GemmaNorm, Linear
from minimax_jax.lora import Adapter, part
from minimax_jax.rope import rope_angles
from pallas_kernels.block_select import block_select
from pallas_kernels.kv_insert import KeyTransform, Rows, kv_insert, norm_rope
from pallas_kernels.layouts.pages import Blocks, Source
from pallas_kernels.layouts.pool import PoolLayout, through_cache
from pallas_kernels.sparse_attention import dense_attention, sparse_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Context:
    """What all layers of one step share: the batch, its angles, and how the cache stores."""

    batch: Batch
    cos: Float[Array, "B T r"]
    sin: Float[Array, "B T r"]
    layout: PoolLayout = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: Batch, config: ModelConfig, layout: PoolLayout) -> "Context":
        """The context of a batch."""
        cos, sin = rope_angles(batch.positions, config.attention)
        return cls(batch=batch, cos=cos, sin=sin, layout=layout)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Where attention reads from."""

    k: Source
    v: Source
    index_k: Source | None


class Attention(nnx.Module):
    """One layer's attention; a dense layer (M3's first three) has no indexer."""

    def __init__(self, config: ModelConfig, *, sparse: bool, rngs: nnx.Rngs):
        a, dim, eps = config.attention, config.hidden_size, config.norm_eps
        kv_dim = a.num_kv_heads * a.head_dim
        self.q_proj = Linear(a.num_heads * a.head_dim, dim, ("heads", "embed"), rngs)
        self.k_proj = Linear(kv_dim, dim, ("kv_heads", "embed"), rngs)
        self.v_proj = Linear(kv_dim, dim, ("kv_heads", "embed"), rngs)
        self.o_proj = Linear(dim, a.num_heads * a.head_dim, ("embed", "heads"), rngs)
        self.q_norm = GemmaNorm(a.head_dim, eps)
        self.k_norm = GemmaNorm(a.head_dim, eps)
        self.indexer = Indexer(config, rngs) if sparse else None
        self.config = a

    def __call__(
        self,
        x: Float[Array, "B T D"],
        pool: UInt8[Array, "P lines 128"] | None,
        line: Array | int,
        context: Context,
        adapter: Adapter = None,
    ) -> tuple[Float[Array, "B T D"], UInt8[Array, "P lines 128"] | None]:
        """The layer's output and the pool with this batch's keys in it (None stays None)."""
        c, formats = self.config, context.layout.formats
        if pool is None:
            keys = self.packed_keys(x, context, adapter)
        else:
            pool = self._insert(pool, line, self._rows(x, adapter), context)
            k, v, index_k = layer_pages(pool, context.layout, line, sparse=self.indexer is not None)
            keys = Keys(k=k, v=v, index_k=index_k)
        q = self.q_proj(x, part(adapter, "q_proj"))
        q = q.reshape(*x.shape[:2], c.num_heads, c.head_dim)
        q = norm_rope(q, self.q_norm.weight.get_value(), context.cos, context.sin, self.q_norm.eps)
        q = through_cache(q, "fp8") if formats.rounds_queries(formats.kv) else q
        table, positions = context.batch.block_table, context.batch.positions
        scale = c.head_dim**-0.5
        if self.indexer is None or keys.index_k is None:
            out, _ = dense_attention(q, keys.k, keys.v, table, positions, scale=scale)
        else:
            ids = self.indexer(x, keys.index_k, context, part(adapter, "indexer"))
            out, _ = sparse_attention(q, keys.k, keys.v, ids, table, positions, scale=scale)
        out = out.reshape(*x.shape[:2], c.num_heads * c.head_dim)
        return self.o_proj(out, part(adapter, "o_proj")), pool

    def packed_keys(
        self, x: Float[Array, "B T D"], context: Context, adapter: Adapter = None
    ) -> Keys:
        """The batch's own tiles, cut into blocks, as the cache would give them back."""
        rows, t, formats = self._rows(x, adapter), self._transform(context), context.layout.formats
        Z = context.layout.block_size
        assert x.shape[1] % Z == 0, "without a cache a tile is whole blocks"

        def blocks(x_ThW, fmt):
            seen = through_cache(x_ThW, fmt, formats.compute)
            return Blocks(seen.reshape(x_ThW.shape[0] // Z, Z, *x_ThW.shape[1:]))

        k = norm_rope(rows.k, t.k_norm, t.cos, t.sin, t.eps)
        index_k = None
        if rows.index_k is not None and t.index_norm is not None:
            index_k = blocks(
                norm_rope(rows.index_k, t.index_norm, t.cos, t.sin, t.eps), formats.index
            )
        return Keys(k=blocks(k, formats.kv), v=blocks(rows.v, formats.kv), index_k=index_k)

    def _rows(self, x: Float[Array, "B T D"], adapter: Adapter) -> Rows:
        """Raw keys and values of the batch, its tokens flattened to one axis."""
        flat_TD = x.reshape(-1, x.shape[-1])
        shape = (-1, self.config.num_kv_heads, self.config.head_dim)
        return Rows(
            k=self.k_proj(flat_TD, part(adapter, "k_proj")).reshape(shape),
            v=self.v_proj(flat_TD, part(adapter, "v_proj")).reshape(shape),
            index_k=None
            if self.indexer is None
            else self.indexer.index_key(flat_TD, part(adapter, "indexer")),
        )

    def _transform(self, context: Context) -> KeyTransform:
        return KeyTransform(
            k_norm=self.k_norm.weight.get_value(),
            index_norm=None if self.indexer is None else self.indexer.k_norm.weight.get_value(),
            cos=context.cos.reshape(-1, context.cos.shape[-1]),
            sin=context.sin.reshape(-1, context.sin.shape[-1]),
            eps=self.k_norm.eps,
        )

    def _insert(self, pool, line, rows: Rows, context: Context):
        slots = context.batch.slots(context.layout.block_size)
        return kv_insert(pool, context.layout, line, rows, slots, self._transform(context))


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

    def index_key(self, x: Float[Array, "T D"], adapter: Adapter) -> Float[Array, "T 1 I"]:
        """The raw index key, before norm and rotation."""
        return self.k_proj(x, part(adapter, "k_proj"))[:, None]

    def __call__(
        self, x: Float[Array, "B T D"], index_k: Source, context: Context, adapter: Adapter = None
    ) -> Int[Array, "B T K C"]:
        """The blocks that each query attends to."""
        c, formats = self.config, context.layout.formats
        q = self.q_proj(x, part(adapter, "q_proj")).reshape(*x.shape[:2], c.num_heads, c.head_dim)
        q = norm_rope(q, self.q_norm.weight.get_value(), context.cos, context.sin, self.q_norm.eps)
        q = through_cache(q, "fp8") if formats.rounds_queries(formats.index) else q
        return block_select(
            q,
            index_k,
            context.batch.block_table,
            context.batch.positions,
            top_k=c.top_k,
            init_blocks=c.init_blocks,
            local_blocks=c.local_blocks,
        )
