"""The drafter without a cache, as it is trained: many blocks of drafts at once over the contexts of
a pack.

The pack's own tiles are the pages (`minimax_jax.batch`), seen through the cache format, so a block
attends to what it would read from the pool: the same layers and the same `window_attention`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minimax_jax.batch import Batch
from minimax_jax.drafter import DraftAttention, DraftContext, Drafter
from minimax_jax.rope import rope_angles
from pallas_kernels.kv_insert import norm_rope
from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.layouts.pool import CacheFormats, through_cache

ContextKeys = tuple[Blocks, Blocks]  # keys and values of one layer


def packed_context(
    drafter: Drafter, taps: Sequence[Float[Array, "B Z D"]], batch: Batch, formats: CacheFormats
) -> list[ContextKeys]:
    """Each draft layer's context keys and values of a pack, a tile a block, as the draft cache
    would give them back; `taps` as `Drafter.fused` takes them.
    """
    fused = drafter.fused(taps)
    return [_context_keys(layer.attention, fused, batch, formats) for layer in drafter.layers]


def packed_hidden(
    drafter: Drafter,
    x: Float[Array, "A T D"],
    keys: Sequence[ContextKeys],
    block_table: Int[Array, "A P"],
    lengths: Int[Array, "A"],
    formats: CacheFormats,
) -> Float[Array, "A T D"]:
    """`Drafter.hidden` of A embedded blocks, each after the first `length` tokens of the segment
    whose tiles are in its row of the table. Length -1 is padding: that block sees itself alone.
    """
    context = DraftContext.of(block_table, lengths, drafter.config, formats)
    for layer, (k, v) in zip(drafter.layers, keys, strict=True):
        x = layer(x, k, v, context)
    return drafter.norm(x)


def _context_keys(
    attention: DraftAttention,
    fused: Float[Array, "B Z D"],
    batch: Batch,
    formats: CacheFormats,
) -> ContextKeys:
    B, Z, D = fused.shape
    rows, norm = attention.rows(fused.reshape(B * Z, D)), attention.k_norm
    cos, sin = rope_angles(batch.positions.reshape(B * Z), attention.config.attention)
    k = norm_rope(rows.k, norm.weight.get_value(), cos, sin, norm.eps)
    k, v = (through_cache(x, formats.draft, formats.compute) for x in (k, rows.v))
    return Blocks(_tiles(k, B)), Blocks(_tiles(v, B))


def _tiles(x: Float[Array, "T K H"], num_tiles: int) -> Float[Array, "B Z K H"]:
    return jnp.reshape(x, (num_tiles, x.shape[0] // num_tiles, *x.shape[1:]))
