"""What persists between steps: the page pool, and the layout that a model, its formats and its
rank's heads give it.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from configs.model import ModelConfig
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout


def pool_layout(
    config: ModelConfig, formats: CacheFormats, local_heads: int | None = None
) -> PoolLayout:
    """The layout of a rank that holds `local_heads` key/value heads (all by default)."""
    attention, indexer, drafter = config.attention, config.indexer, config.drafter
    return PoolLayout(
        block_size=indexer.block_size,
        kv_heads=attention.num_kv_heads if local_heads is None else local_heads,
        head_dim=attention.head_dim,
        index_dim=indexer.head_dim,
        sparse_layers=config.sparse_layers,
        draft_layers=0 if drafter is None else drafter.num_layers,
        formats=formats,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """The pool `[ranks, blocks, lines, 128]`; donated to every step and given back by it."""

    pool: UInt8[Array, "ranks P lines 128"]
    layout: PoolLayout = field(metadata={"static": True})

    @classmethod
    def empty(cls, layout: PoolLayout, num_blocks: int) -> "Cache":
        """A cache of `num_blocks` blocks of zeros on one rank."""
        return cls(pool=layout.empty(num_blocks)[None], layout=layout)

    @property
    def local_pool(self) -> UInt8[Array, "P lines 128"]:
        """The pool of the one rank that this program sees."""
        assert self.pool.shape[0] == 1, "several ranks are addressed through sharding.local"
        return self.pool.reshape(self.pool.shape[1:])

    def with_pool(self, pool: UInt8[Array, "P lines 128"]) -> "Cache":
        """This cache with another pool of the same shape."""
        return replace(self, pool=pool.reshape(self.pool.shape))


def layer_pages(
    pool: UInt8[Array, "P lines 128"], layout: PoolLayout, line: Array | int, *, sparse: bool
) -> tuple[Pages, Pages, Pages | None]:
    """K, V and index key of the layer that starts at `line`."""
    compute = layout.formats.compute

    def pages(component, first):
        return Pages(pool=pool, line=jnp.asarray(first), component=component, compute=compute)

    kv = layout.kv
    index = pages(layout.index, line + 2 * kv.lines) if sparse else None
    return pages(kv, line), pages(kv, line + kv.lines), index
