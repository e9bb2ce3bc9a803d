"""grouped_matmul in plain jnp: cut the sorted rows into tiles of one expert each, multiply tile by
tile.

Every group is padded up to whole tiles, so the work is at most (M + E x tile) rows, not M x E;
`jax.lax.ragged_dot` would compute every row with every expert. The tile is about the mean group, so
that neither padding nor copied weights dominate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.rows import matrices_at, move_rows
from pallas_kernels.scaled_matmul import Weight
from pallas_kernels.scaled_matmul.reference import expand

_SMALLEST_TILE, _LARGEST_TILE = 8, 128
_TILES_AT_ONCE = 32  # in `gradient_of_rows`: 1.2 GB of bfloat16 weights at M3's width


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Weight,
    group_sizes: Int[Array, "E"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "M F"]:
    """See the package."""
    M = x.shape[0]
    tiles = _tiles(M, group_sizes)
    num_tiles, tile = tiles.rows.shape
    rows, inside = tiles.rows.reshape(num_tiles * tile), tiles.inside.reshape(num_tiles * tile)
    products = jnp.einsum(
        "tmD,tFD->tmF",
        move_rows(x, rows, tiles.place, tiles.grouped).reshape(num_tiles, tile, -1),
        _expanded(weights, tiles.expert, x.dtype),
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    flat = products.reshape(num_tiles * tile, -1)
    return move_rows(flat, tiles.place, rows, inside).astype(out_dtype)


def gradient_of_rows(
    gradient: Float[Array, "M F"],
    weights: Weight,
    group_sizes: Int[Array, "E"],
    dtype: DTypeLike,
) -> Float[Array, "M D"]:
    """What `grouped_matmul` passes back to rows of this dtype: each row times its own matrix.

    What autodiff makes of that product multiplies float32 gradients by float32 copies of the
    weights. Here both are of the rows' dtype, and the weights of some tiles at a time are expanded,
    so that 16 bits stay on matrix units, and M is not bounded by the memory of expanded weights.
    """
    M = len(gradient)
    tiles = _tiles(M, group_sizes)
    num_tiles, tile = tiles.rows.shape
    rows, inside = tiles.rows.reshape(num_tiles * tile), tiles.inside.reshape(num_tiles * tile)
    sorted_rows = move_rows(gradient.astype(dtype), rows, tiles.place, tiles.grouped)

    def product(operands: tuple[Array, Array]) -> Array:
        rows_mF, expert = operands
        matrix = _expanded(weights, expert, rows_mF.dtype)
        how = {"preferred_element_type": jnp.float32, "precision": "highest"}
        return jnp.einsum("mF,FD->mD", rows_mF, matrix, **how).astype(dtype)

    operands = sorted_rows.reshape(num_tiles, tile, -1), tiles.expert
    products = lax.map(product, operands, batch_size=min(_TILES_AT_ONCE, num_tiles))
    found = move_rows(products.reshape(num_tiles * tile, -1), tiles.place, rows, inside)
    return jnp.where(tiles.grouped[:, None], found, 0)


def _expanded(weights: Weight, expert: Int[Array, "..."], dtype: DTypeLike) -> Array:
    """The matrices of some experts."""
    if isinstance(weights, jax.Array) and expert.ndim:
        return expand(matrices_at(weights, expert), dtype)
    return expand(jax.tree.map(lambda leaf: leaf[expert], weights), dtype)


class _Tiles(NamedTuple):
    """Where M sorted rows lie in tiles of one expert each."""

    expert: Int[Array, "tiles"]
    rows: Int[Array, "tiles tile"]  # the row at each place, some row at a place that is empty
    inside: Bool[Array, "tiles tile"]  # whether the place holds a row
    place: Int[Array, "M"]  # of each row, in the flattened tiles
    grouped: Bool[Array, "M"]  # whether the row falls in a group


def _tiles(M: int, group_sizes: Int[Array, "E"]) -> _Tiles:
    E = group_sizes.shape[0]
    tile = _tile_rows(M, E)
    num_tiles = M // tile + min(E, M)  # full tiles, and at most one partial tile a non-empty group
    tiles_per_group = -(-group_sizes // tile)
    tile_end, row_end = jnp.cumsum(tiles_per_group), jnp.cumsum(group_sizes)
    tile_start, row_start = tile_end - tiles_per_group, row_end - group_sizes
    expert = jnp.minimum(_ended(tile_end, num_tiles), E - 1)  # tiles past the last hold no rows
    first = row_start[expert] + (jnp.arange(num_tiles) - tile_start[expert]) * tile
    rows = first[:, None] + jnp.arange(tile)
    group = jnp.minimum(_ended(row_end, M), E - 1)
    place = tile_start[group] * tile + jnp.arange(M) - row_start[group]
    return _Tiles(
        expert=expert,
        rows=jnp.minimum(rows, M - 1),
        inside=rows < row_end[expert][:, None],
        place=jnp.minimum(place, num_tiles * tile - 1),
        grouped=jnp.arange(M) < row_end[-1],
    )


def _ended(ends: Int[Array, "E"], count: int) -> Int[Array, "n"]:
    """How many of the ends are at or before each number below `count`: one fused sum, where a
    search is a loop of small kernels.
    """
    return jnp.sum(ends[None] <= jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)


def _tile_rows(num_rows: int, num_groups: int) -> int:
    mean = max(1, num_rows // num_groups)
    return max(_SMALLEST_TILE, min(_LARGEST_TILE, 1 << (mean.bit_length() - 1)))
