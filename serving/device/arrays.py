"""A plan's rows as the arrays of a step, on the host.

The tokens of prompts are known here, so chunks are cut from them; what was generated since stays on
the device. A chunk's tiles are a block long, or shorter where the shape has few tokens a prompt, so
that no more than half of what runs is padding.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from minimax_jax.sampling import SamplingParams as RowParams
from serving.device.sampler import Asks, Rows
from serving.device.steps import Chunks
from serving.device_api import Slot
from serving.scheduling.plan import Admission, PrefillRow
from serving.scheduling.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Resident:
    """The sequence that a slot has now, as the host knows it."""

    admission: Admission
    params: RowParams

    @property
    def tokens(self) -> np.ndarray:
        """Those that were known when it came in."""
        return np.frombuffer(self.admission.tokens, np.int32)

    @cached_property
    def has_edits(self) -> bool:
        """Whether single ids are forbidden or biased; asked in each step."""
        return self.params.has_edits

    @cached_property
    def has_penalties(self) -> bool:
        """Whether tokens before it count; asked in each step."""
        return self.params.has_penalties


Residents = Mapping[Slot, Resident]


def joined(of_ranks: Sequence[Any]) -> Any:
    """Trees of arrays of each data rank as one, rank after rank."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *of_ranks)


def tiles_of(shape: Shape, block_size: int) -> tuple[int, int]:
    """How many tiles of how many tokens hold any chunks of a data rank of this prefill shape."""
    share = max(1, shape.tokens // shape.rows)
    size = min(block_size, 1 << (share.bit_length() - 1))
    return min(shape.tokens, shape.tokens // size + shape.rows), size


def decode_rows(
    slots: Sequence[Sequence[int]],
    residents: Residents,
    masked: Collection[Slot],
    *,
    num_rows: int,
    num_slots: int,
) -> Rows:
    """The rows of these slots of each data rank, padded to `num_rows` a rank with rows of nobody;
    `masked` are those with a mask.
    """
    at = np.full((len(slots), num_rows), num_slots, np.int32)
    has_mask = np.zeros(at.shape, bool)
    for rank, own in enumerate(slots):
        at[rank, : len(own)] = own
        if masked:
            has_mask[rank, : len(own)] = [(rank, slot) in masked for slot in own]
    here = [residents[rank, slot] for rank, own in enumerate(slots) for slot in own]
    return Rows(
        slots=at.reshape(at.size),
        has_mask=has_mask.reshape(at.size),
        asks=Asks(
            edits=np.array(any(one.has_edits for one in here)),
            penalties=np.array(any(one.has_penalties for one in here)),
            masks=np.array(has_mask.any()),
            logprobs=np.array(any(map(reports_logprobs, here))),
        ),
    )


def reports_logprobs(resident: Resident) -> bool:
    """Whether log-probabilities of its tokens are wanted."""
    return resident.admission.sampling.logprobs is not None


def chunks(
    rows: Sequence[Sequence[PrefillRow]],
    residents: Residents,
    masked: Collection[Slot],
    shape: Shape,
    *,
    block_size: int,
    num_slots: int,
) -> tuple[Chunks, list[list[int]]]:
    """The chunks of each data rank as tiles, and the place where each begins among all tokens."""
    num_tiles, size = tiles_of(shape, block_size)
    tiles = Tiles.empty(len(rows), num_tiles, size, shape.rows, num_slots)
    places = [
        [tiles.add(rank, index, row, residents[rank, row.slot]) for index, row in enumerate(own)]
        for rank, own in enumerate(rows)
    ]
    pairs = [(row, residents[rank, row.slot]) for rank, own in enumerate(rows) for row in own]
    slots = [[row.slot for row in own] for own in rows]
    made = Chunks(
        **tiles.arrays(),
        rows=decode_rows(slots, residents, masked, num_rows=shape.rows, num_slots=num_slots),
        scores_prompts=np.array(any(num_scored(*pair) for pair in pairs)),
    )
    return made, places


@dataclass(kw_only=True)
class Tiles:
    """The tiles of all data ranks while chunks are laid into them; `used` of each rank's are."""

    tokens: np.ndarray  # [ranks, tiles x size], as the next two
    positions: np.ndarray
    targets: np.ndarray
    tile_slots: np.ndarray  # [ranks, tiles]
    last: np.ndarray  # [ranks, R]
    used: list[int]

    @classmethod
    def empty(cls, ranks: int, num_tiles: int, size: int, rows: int, num_slots: int) -> "Tiles":
        """Tiles of padding."""
        tokens = np.zeros((ranks, num_tiles * size), np.int32)
        return cls(
            tokens=tokens,
            positions=np.full_like(tokens, -1),
            targets=np.zeros_like(tokens),
            tile_slots=np.full((ranks, num_tiles), num_slots, np.int32),
            last=np.full((ranks, rows), -1, np.int32),
            used=[0] * ranks,
        )

    def add(self, rank: int, index: int, row: PrefillRow, resident: Resident) -> int:
        """Lays a rank's next chunk into tiles; the place of its first token among all ranks'."""
        (_, num_tokens), num_tiles = self.tokens.shape, self.tile_slots.shape[1]
        size, tile = num_tokens // num_tiles, self.used[rank]
        known, first, end = resident.tokens, tile * size, row.start + row.length
        self.used[rank] = tile - (-row.length // size)
        assert self.used[rank] <= num_tiles, "more tiles than the shape has"
        self.tokens[rank, first : first + row.length] = known[row.start : end]
        self.positions[rank, first : first + row.length] = np.arange(row.start, end)
        after = known[row.start + 1 : end + 1]
        self.targets[rank, first : first + len(after)] = after
        self.last[rank, index] = first + row.length - 1 if row.is_last else -1
        self.tile_slots[rank, tile : self.used[rank]] = row.slot
        return rank * num_tokens + first

    def arrays(self) -> dict[str, np.ndarray]:
        """As the fields of `Chunks`, rank after rank."""
        ranks, num_tiles = self.tile_slots.shape
        tiles = ranks * num_tiles, self.tokens.shape[1] // num_tiles
        return {
            "tokens": self.tokens.reshape(tiles),
            "positions": self.positions.reshape(tiles),
            "targets": self.targets.reshape(tiles),
            "tile_slots": self.tile_slots.reshape(self.tile_slots.size),
            "last": self.last.reshape(self.last.size),
        }


def num_scored(row: PrefillRow, resident: Resident) -> int:
    """How many prompt tokens a chunk scores: those after its own, up to the prompt's end."""
    if resident.admission.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(row.length, resident.admission.prompt_length - 1 - row.start))
