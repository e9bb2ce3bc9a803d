"""Scored answers into packs of one fixed shape, ready for the update.

An example lies on whole tiles of its own, as in `rl.packing`; place i holds what belongs to the
token after it, which it predicts. Several packs make a batch: their gradients add up, since the
weights of tokens are those of the whole batch (`rl.aggregation`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, UInt8

from minimax_jax.batch import Batch
from minimax_jax.cache import NO_ROUTE
from rl.packing import PackShape


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One answer to learn from: the last `len(logprobs)` of the tokens were sampled. `weight` is
    that of each of them in the loss; `choices` are the experts of all tokens but the last, `pages`
    the blocks of its tokens in the rollout's cache.
    """

    tokens: Int[np.ndarray, "n"]
    logprobs: Float[np.ndarray, "s"]
    advantage: float
    weight: float
    choices: UInt8[np.ndarray, "m L X"] | None = None
    pages: UInt8[np.ndarray, "W lines 128"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExperiencePack:
    """B tiles of Z tokens. `mask` is 1.0 where the next token was sampled; the other numbers are
    that token's, 0 elsewhere. `sequences` numbers the answers of the pack.

    Arrays of numpy where it is made, of JAX in a step.
    """

    tokens: Int[Any, "B Z"]
    positions: Int[Any, "B Z"]
    block_table: Int[Any, "B P"]
    targets: Int[Any, "B Z"]
    mask: Float[Any, "B Z"]
    weights: Float[Any, "B Z"]
    advantages: Float[Any, "B Z"]
    rollout_logprobs: Float[Any, "B Z"]
    sequences: Int[Any, "B Z"]
    choices: UInt8[Any, "L B Z X"] | None
    pages: UInt8[Any, "B lines 128"] | None

    @property
    def batch(self) -> Batch:
        """What the model takes; inside a jitted step, where all arrays are JAX's."""
        return Batch(tokens=self.tokens, positions=self.positions, block_table=self.block_table)


def pack_experience(
    examples: Sequence[Experience], shape: PackShape
) -> tuple[list[ExperiencePack], list[list[int]]]:
    """Packs, and which examples each holds: the longest first, each into the first pack that has
    room.

    Raises ValueError for an example that no pack of this shape could hold.
    """
    sizes = [-(-len(example.tokens) // shape.tile_tokens) for example in examples]
    most = min(shape.tiles, shape.blocks)
    for example, size in zip(examples, sizes, strict=True):
        if size > most:
            raise ValueError(
                f"an answer with its prompt has {len(example.tokens)} tokens, more than the "
                f"{most * shape.tile_tokens} of a pack: raise pack_tokens"
            )
    members: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(examples)), key=lambda i: -sizes[i]):
        room = next((p for p, tiles in enumerate(free) if tiles >= sizes[i]), None)
        if room is None:
            room = len(free)
            members.append([])
            free.append(shape.tiles)
        members[room].append(i)
        free[room] -= sizes[i]
    return [_lay_out([examples[i] for i in one], shape) for one in members], members


def _lay_out(examples: Sequence[Experience], shape: PackShape) -> ExperiencePack:
    places = (shape.tiles, shape.tile_tokens)
    whole: dict[str, np.ndarray] = {
        "tokens": np.zeros(places, np.int32),
        "positions": np.full(places, -1, np.int32),
        "targets": np.zeros(places, np.int32),
        "sequences": np.zeros(places, np.int32),
    }
    for name in ("mask", "weights", "advantages", "rollout_logprobs"):
        whole[name] = np.zeros(places, np.float32)
    table = np.full((shape.tiles, shape.blocks), -1, np.int32)
    recorded = [example.choices for example in examples if example.choices is not None]
    choices = None
    if recorded:
        layers, per_token = recorded[0].shape[1:]
        choices = np.full((layers, *places, per_token), NO_ROUTE, np.uint8)
    stored = [example.pages for example in examples if example.pages is not None]
    pages = np.zeros((shape.tiles, *stored[0].shape[1:]), np.uint8) if stored else None
    first = 0
    for number, example in enumerate(examples):
        tiles = -(-len(example.tokens) // shape.tile_tokens)
        rows = slice(first, first + tiles)
        _lay_out_one(example, number, {name: x[rows].reshape(-1) for name, x in whole.items()})
        table[rows, :tiles] = np.arange(first, first + tiles)
        if choices is not None and example.choices is not None:
            fed = len(example.choices)
            flat = choices[:, rows].reshape(len(choices), -1, choices.shape[-1])
            flat[:, :fed] = np.moveaxis(example.choices, 1, 0)
            choices[:, rows] = flat.reshape(choices[:, rows].shape)
        if pages is not None and example.pages is not None:
            pages[rows] = example.pages
        first += tiles
    return ExperiencePack(**whole, block_table=table, choices=choices, pages=pages)


def _lay_out_one(example: Experience, number: int, places: dict[str, np.ndarray]) -> None:
    """Fills an example's places, views into the pack's arrays."""
    length, sampled = len(example.tokens), len(example.logprobs)
    places["tokens"][:length] = example.tokens
    places["positions"][:length] = np.arange(length)
    places["targets"][: length - 1] = example.tokens[1:]
    places["sequences"][:] = number
    of_sampled = slice(length - 1 - sampled, length - 1)
    places["mask"][of_sampled] = 1.0
    places["weights"][of_sampled] = example.weight
    places["advantages"][of_sampled] = example.advantage
    places["rollout_logprobs"][of_sampled] = example.logprobs
