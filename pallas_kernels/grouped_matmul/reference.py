"""grouped_matmul in plain jnp: cut the sorted rows into tiles of one expert each, multiply tile by
tile.

Every group is padded up to whole tiles, so the work is at most (M + E x tile) rows, not M x E;
`jax.lax.ragged_dot` would compute every row with every expert. The tile is about the mean group, so
that neither padding nor copied weights dominate.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.scaled_matmul.reference import expand

_SMALLEST_TILE, _LARGEST_TILE = 8, 128


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Array | MXFP8Tensor | NVFP4Tensor,
    group_sizes: Int[Array, "E"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "M F"]:
    """See the package."""
    M, E = x.shape[0], group_sizes.shape[0]
    tile = _tile_rows(M, E)
    num_tiles = M // tile + min(E, M)  # full tiles, and at most one partial tile a non-empty group
    tiles_per_group = -(-group_sizes // tile)
    tile_end = jnp.cumsum(tiles_per_group)
    row_end = jnp.cumsum(group_sizes)
    expert = jnp.searchsorted(tile_end, jnp.arange(num_tiles), side="right")
    expert = jnp.minimum(expert, E - 1)  # tiles past the last group hold no rows
    row_start = (row_end - group_sizes)[expert]
    tile_start = (tile_end - tiles_per_group)[expert]
    first = row_start + (jnp.arange(num_tiles) - tile_start) * tile
    rows = jnp.minimum(first[:, None] + jnp.arange(tile), M - 1)  # [tiles, tile]
    products = jnp.einsum(
        "tmD,tFD->tmF",
        x[rows],
        expand(jax.tree.map(lambda leaf: leaf[expert], weights), x.dtype),
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    group = jnp.minimum(jnp.searchsorted(row_end, jnp.arange(M), side="right"), E - 1)
    place = (tile_end - tiles_per_group)[group] * tile
    place += jnp.arange(M) - (row_end - group_sizes)[group]
    return products.reshape(num_tiles * tile, -1)[place].astype(out_dtype)


def _tile_rows(num_rows: int, num_groups: int) -> int:
    mean = max(1, num_rows // num_groups)
    return max(_SMALLEST_TILE, min(_LARGEST_TILE, 1 << (mean.bit_length() - 1)))
