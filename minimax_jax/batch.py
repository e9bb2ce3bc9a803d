"""What goes into a step: tiles of tokens with positions and block tables; and how packed segments
become tiles.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.kv_insert import Slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """B tiles of T tokens; a tile belongs to one sequence. Position -1 marks padding.

    `block_table` maps a sequence's logical blocks to physical ones (-1: none): pages of the pool,
    or, without a cache, the blocks that the batch's own flattened tiles make.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    block_table: Int[Array, "B P"]

    def slots(self, block_size: int) -> Slots:
        """Where each token's keys are written, tile by tile."""
        logical = jnp.maximum(self.positions, 0) // block_size
        physical = jnp.take_along_axis(self.block_table, logical, axis=1)
        physical = jnp.where(self.positions < 0, -1, physical)
        return Slots(
            block_ids=physical.reshape(-1), places=(self.positions % block_size).reshape(-1)
        )


def pack(
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    block_size: int,
    *,
    num_tiles: int = 0,
    table_width: int = 0,
) -> tuple[Batch, Int[np.ndarray, "T"]]:
    """Tiles of one block each from a pack [T], and each token's place in the flattened tiles.

    A segment is a run of equal ids; each starts on a tile of its own, so block grids restart with
    it. Segment id -1 is padding. `num_tiles` and `table_width` pad the shapes up to at least that,
    so that packs share a compiled program. Raises ValueError when the two arrays do not match or a
    segment id comes back after another.
    """
    if tokens.shape != segment_ids.shape or tokens.ndim != 1:
        raise ValueError(
            f"tokens {tokens.shape} and segment_ids {segment_ids.shape} are not one [T]"
        )
    if not len(tokens):
        raise ValueError("a pack of no tokens has no tiles")
    starts = np.flatnonzero(np.diff(segment_ids, prepend=segment_ids[:1] - 1))
    ids = segment_ids[starts][segment_ids[starts] != -1]
    if len(np.unique(ids)) != len(ids):
        raise ValueError(
            "a segment id comes back after another segment: segments must be contiguous"
        )
    lengths = np.diff(np.append(starts, len(tokens)))
    tiles = -(-lengths // block_size)
    first = np.cumsum(tiles) - tiles
    within = np.arange(len(tokens)) - np.repeat(starts, lengths)
    places = np.repeat(first * block_size, lengths) + within
    num_tiles = max(num_tiles, int(tiles.sum()))
    real = segment_ids != -1
    tile_tokens = np.zeros(num_tiles * block_size, np.int32)
    tile_positions = np.full(num_tiles * block_size, -1, np.int32)
    tile_tokens[places] = np.where(real, tokens, 0)
    tile_positions[places] = np.where(real, within, -1)
    table = np.full((num_tiles, max(table_width, tiles.max())), -1, np.int32)
    _fill_tables(table, first, tiles)
    batch = Batch(
        tokens=jnp.asarray(tile_tokens.reshape(num_tiles, block_size)),
        positions=jnp.asarray(tile_positions.reshape(num_tiles, block_size)),
        block_table=jnp.asarray(table),
    )
    return batch, places


def _fill_tables(table: np.ndarray, first: np.ndarray, tiles: np.ndarray) -> None:
    """Each tile's segment as a row of tile ids, -1 beyond its end."""
    logical = np.arange(table.shape[1])
    rows = np.where(logical < tiles[:, None], first[:, None] + logical, -1)
    table[: tiles.sum()] = np.repeat(rows, tiles, axis=0)
