"""What persists between steps: the page pool, and the layout that a model, its formats and its
rank's heads give it.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float, Int, UInt8

from configs.model import ModelConfig
from configs.parts import check
from minimax_jax.batch import Batch
from minimax_jax.routes import Routes
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import LINE, CacheFormats, PoolLayout
from sharding.apply import named_sharding
from sharding.axes import DATA, MODEL
from sharding.collectives import rank, ranks
from sharding.rules import SERVE

POOL_AXES = ("ranks", None, None, None)
NO_ROUTE = 255  # in a record of expert ids: none is known


def local_heads(config: ModelConfig, mesh: Mesh | AbstractMesh | None, page_ranks: int = 1) -> int:
    """Key/value heads of a rank of this mesh; ValueError as `heads_of_rank`."""
    return heads_of_rank(config, 1 if mesh is None else mesh.shape[MODEL], page_ranks)


def heads_of_rank(config: ModelConfig, tp: int, page_ranks: int = 1) -> int:
    """Key/value heads in the pages of one of `tp` ranks; more ranks than heads share copies of
    them. Ranks that share out the pages of a context hold all heads of these ranks. ValueError
    where some rank's query heads would need key heads that other ranks have.
    """
    heads, kv_heads = config.attention.num_heads, config.attention.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"tp={tp} neither divides the {kv_heads} key/value heads nor is a multiple of them"
        )
    if heads % tp:
        raise ValueError(f"tp={tp} does not divide the {heads} query heads")
    return max(1, kv_heads * page_ranks // tp)


def formats_of(
    config: ModelConfig, otherwise: str, *, kv: str | None = None, index: str | None = None
) -> CacheFormats:
    """Formats of keys, values and index keys: those asked for, else those that the config's
    checkpoint names, else `otherwise`.
    """
    stored = config.quantization
    return CacheFormats(
        kv=kv or stored.kv_cache or otherwise, index=index or stored.index_cache or otherwise
    )


def own_heads(x_BTKH: Array, num_heads: int, page_ranks: int = 1) -> Float[Array, "B T heads H"]:
    """Of the key heads that reach a rank, those in its pages: all, or one where ranks share it, or
    those of all the ranks among which it shares out pages.
    """
    if x_BTKH.shape[2] == num_heads:
        return x_BTKH
    first = rank(MODEL) // page_ranks * page_ranks * x_BTKH.shape[2] // ranks(MODEL)
    return lax.dynamic_slice_in_dim(x_BTKH, first, num_heads, axis=2)


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
    # The experts chosen for each token, only where they are recorded; whole on every device. Block
    # ids count within a data rank: the P blocks of data rank d are d P, d P + 1, ... here.
    choices: UInt8[Array, "dP L Z X"] | None = None
    # Neighbouring ranks that share out the blocks of each context (`minimax_jax.split_pages`).
    page_ranks: int = field(default=1, metadata={"static": True})

    @classmethod
    def empty(
        cls, layout: PoolLayout, num_rows: int, mesh: Mesh | None = None, page_ranks: int = 1
    ) -> "Cache":
        """A cache of `num_rows` blocks of zeros on each rank of a mesh; where `page_ranks`
        neighbours share out a context, of so many times as many blocks on them together.
        """
        shape = (1 if mesh is None else mesh.size, num_rows, layout.lines, LINE)
        sharding = None if mesh is None else named_sharding(mesh, POOL_AXES, SERVE, shape)
        pool = jnp.zeros(shape, jnp.uint8, device=sharding)
        return cls(pool=pool, layout=layout, page_ranks=page_ranks)

    @property
    def blocks_of_data_rank(self) -> int:
        """P: what block ids count, the blocks of all ranks that share out a context."""
        return self.pool.shape[1] * self.page_ranks

    def blocks_of(self, rows: Int[Array, "B R"]) -> Int[Array, "B P"]:
        """The block table of sequences that own whole rows of the pool, -1 for none: row r is the
        blocks n r to n r + n - 1 of the n ranks that share out a context, one on each.
        """
        n = self.page_ranks
        if n == 1:
            return rows
        blocks = jnp.where(rows[..., None] < 0, -1, rows[..., None] * n + jnp.arange(n))
        return blocks.reshape(len(rows), -1)

    def check_shared_out(self, page_ranks: int) -> None:
        """ValueError unless whoever made these pages knows among how many ranks a context's lie."""
        check(
            self.page_ranks == page_ranks,
            f"a context's pages lie on {page_ranks} ranks by the model's rules, but these were "
            f"made for {self.page_ranks}",
        )

    def recording(self, config: ModelConfig) -> "Cache":
        """This cache with room for the experts of each token, none of them known yet."""
        moe, layers = config.moe, sum(config.moe_layers)
        check(moe.num_experts <= NO_ROUTE, f"{moe.num_experts} experts are too many for a byte")
        lies = self.pool.sharding
        mesh = lies.mesh if isinstance(lies, NamedSharding) else None
        blocks = self.blocks_of_data_rank * (1 if mesh is None else mesh.shape[DATA])
        shape = (blocks, layers, self.layout.block_size, moe.experts_per_token)
        whole = None if mesh is None else named_sharding(mesh, (None,) * 4, SERVE, shape)
        return replace(self, choices=jnp.full(shape, NO_ROUTE, jnp.uint8, device=whole))

    def with_pool(self, pool: UInt8[Array, "ranks P lines 128"]) -> "Cache":
        """This cache with another pool of the same shape."""
        return replace(self, pool=pool)

    def with_choices(self, choices: Int[Array, "L B T X"], batch: Batch) -> "Cache":
        """This cache with the experts of a batch's tokens written at their slots, if it records.

        Data ranks share a batch's sequences in order; those that they cannot share all ranks have.
        """
        if self.choices is None:
            return self
        routes = Routes.of(choices, batch, self.layout.block_size)
        num_blocks = self.blocks_of_data_rank
        data_ranks, (B, T) = len(self.choices) // num_blocks, batch.positions.shape
        owners = jnp.arange(data_ranks)[:, None]
        if B % data_ranks == 0:
            owners = jnp.repeat(jnp.arange(data_ranks), B // data_ranks * T)[None]
        blocks = owners * num_blocks + routes.blocks  # once, or once for each rank
        blocks = jnp.where(routes.blocks < 0, len(self.choices), blocks)
        written = self.choices
        for of_copy in blocks:
            written = written.at[of_copy, :, routes.places].set(routes.experts, mode="drop")
        return replace(self, choices=written)


def layer_pages(
    pool: UInt8[Array, "*ranks P lines 128"], layout: PoolLayout, line: Array | int, *, sparse: bool
) -> tuple[Pages, Pages, Pages | None]:
    """K, V and index key of the layer that starts at `line`."""
    compute = layout.formats.compute

    def pages(component, first):
        return Pages(pool=pool, line=jnp.asarray(first), component=component, compute=compute)

    kv = layout.kv
    index = pages(layout.index, line + 2 * kv.lines) if sparse else None
    return pages(kv, line), pages(kv, line + kv.lines), index
