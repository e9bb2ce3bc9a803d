"""Examples into packs of a fixed shape: B tiles of Z tokens, each example on whole tiles, a block
table of fixed width.

One shape is one compiled program. An example's tiles are its blocks, so a pack is its own cache
(`minimax_jax.batch`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from minimax_jax.batch import Batch


@dataclass(frozen=True)
class Example:
    """A tokenised conversation, and which of its tokens are to be learned."""

    tokens: Int[np.ndarray, "T"]
    learned: Bool[np.ndarray, "T"]


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """B tiles, Z tokens a tile, and P tiles an example at most."""

    tiles: int
    tile_tokens: int
    blocks: int

    @classmethod
    def of(cls, longest: int, pack_tokens: int, block_size: int) -> "PackShape":
        """Of `pack_tokens` places, for examples of at most `longest` tokens; few widths of tables
        for all lengths.
        """
        needed = -(-longest // block_size)
        blocks = 1 << (needed - 1).bit_length()
        return cls(tiles=pack_tokens // block_size, tile_tokens=block_size, blocks=blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pack:
    """A `Batch` with the next token of each place, and 1.0 where that token counts in the loss.

    Arrays of numpy where it is made, of JAX in a step.
    """

    tokens: Int[Any, "B Z"]
    positions: Int[Any, "B Z"]
    block_table: Int[Any, "B P"]
    targets: Int[Any, "B Z"]
    weights: Float[Any, "B Z"]

    @property
    def batch(self) -> Batch:
        """What the model takes; inside a jitted step, where all arrays are JAX's."""
        return Batch(
            tokens=self.tokens,
            positions=self.positions,
            block_table=self.block_table,
        )


def pack_examples(streams: Iterable[Iterable[Example]], shape: PackShape) -> Pack:
    """Takes from each stream until one of its examples does not fit the tiles that are left; the
    rest is padding.

    Raises ValueError for an example that no pack of this shape could hold, or that has nothing to
    learn.
    """
    examples, free = [], shape.tiles
    for stream in streams:
        for example in stream:
            needed = tiles_needed(example, shape)
            if needed > free:
                break
            examples.append(example)
            free -= needed
    return _lay_out(examples, shape)


def tiles_needed(example: Example, shape: PackShape) -> int:
    """How many tiles an example takes. Raises ValueError for one that no pack of this shape could
    hold, or that has nothing to learn.
    """
    length = len(example.tokens)
    needed = -(-length // shape.tile_tokens)
    most = min(shape.blocks, shape.tiles)
    if needed > most:
        raise ValueError(
            f"an example of {length} tokens needs {needed} blocks, more than the {most} of a pack"
        )
    if example.learned[0] or not example.learned.any():
        first = "the first" if example.learned[0] else "none"
        raise ValueError(f"of an example of {length} tokens {first} is to be learned")
    return needed


def _lay_out(examples: list[Example], shape: PackShape) -> Pack:
    places = (shape.tiles, shape.tile_tokens)
    tokens, targets = np.zeros(places, np.int32), np.zeros(places, np.int32)
    positions, weights = np.full(places, -1, np.int32), np.zeros(places, np.float32)
    table = np.full((shape.tiles, shape.blocks), -1, np.int32)
    first = 0
    for example in examples:
        length, tiles = len(example.tokens), tiles_needed(example, shape)
        rows = slice(first, first + tiles)
        tokens[rows].reshape(-1)[:length] = example.tokens
        positions[rows].reshape(-1)[:length] = np.arange(length)
        targets[rows].reshape(-1)[: length - 1] = example.tokens[1:]
        weights[rows].reshape(-1)[: length - 1] = example.learned[1:]
        table[rows, :tiles] = np.arange(first, first + tiles)
        first += tiles
    return Pack(
        tokens=tokens, positions=positions, block_table=table, targets=targets, weights=weights
    )
