"""A plan's rows as the arrays of a step, on the host.

The tokens of prompts are known here, so chunks are cut from them; what was generated since stays on
the device. A chunk's tiles are a block long, or shorter where the shape has few tokens a prompt, so
that no more than half of what runs is padding.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minimax_jax.sampling import SamplingParams as RowParams
from serving.device.sampler import Asks, Rows
from serving.device.steps import Chunks
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


Residents = Mapping[int, Resident]  # by slot


def tiles_of(shape: Shape, block_size: int) -> tuple[int, int]:
    """How many tiles of how many tokens hold any chunks of this prefill shape."""
    share = max(1, shape.tokens // shape.rows)
    size = min(block_size, 1 << (share.bit_length() - 1))
    return min(shape.tokens, shape.tokens // size + shape.rows), size


def decode_rows(
    slots: Sequence[int],
    residents: Residents,
    masked: Collection[int],
    *,
    num_rows: int,
    num_slots: int,
) -> Rows:
    """The rows of these slots, padded with rows of nobody; `masked` are slots with a mask."""
    padding = [num_slots] * (num_rows - len(slots))
    has_mask = [slot in masked for slot in slots] + [False] * len(padding)
    here = [residents[slot] for slot in slots]
    return Rows(
        slots=np.array([*slots, *padding], np.int32),
        has_mask=np.array(has_mask, bool),
        asks=Asks(
            edits=np.array(any(one.params.has_edits for one in here)),
            penalties=np.array(any(one.params.has_penalties for one in here)),
            masks=np.array(any(has_mask)),
            logprobs=np.array(any(reports_logprobs(one) for one in here)),
        ),
    )


def reports_logprobs(resident: Resident) -> bool:
    """Whether log-probabilities of its tokens are wanted."""
    return resident.admission.sampling.logprobs is not None


def chunks(
    rows: Sequence[PrefillRow],
    residents: Residents,
    masked: Collection[int],
    shape: Shape,
    *,
    block_size: int,
    num_slots: int,
) -> tuple[Chunks, list[int]]:
    """The chunks as tiles, and the flat place where each begins."""
    num_tiles, size = tiles_of(shape, block_size)
    tokens = np.zeros(num_tiles * size, np.int32)
    positions = np.full(num_tiles * size, -1, np.int32)
    targets = np.zeros(num_tiles * size, np.int32)
    tile_slots = np.full(num_tiles, num_slots, np.int32)
    last, places, tile = np.full(shape.rows, -1, np.int32), [], 0
    for index, row in enumerate(rows):
        known, first, end = residents[row.slot].tokens, tile * size, row.start + row.length
        tokens[first : first + row.length] = known[row.start : end]
        positions[first : first + row.length] = np.arange(row.start, end)
        after = known[row.start + 1 : end + 1]
        targets[first : first + len(after)] = after
        last[index] = first + row.length - 1 if row.is_last else -1
        places.append(first)
        used = -(-row.length // size)
        tile_slots[tile : tile + used] = row.slot
        tile += used
    assert tile <= num_tiles, "more tiles than the shape has"
    slots = [row.slot for row in rows]
    made = Chunks(
        tokens=tokens.reshape(num_tiles, size),
        positions=positions.reshape(num_tiles, size),
        targets=targets.reshape(num_tiles, size),
        tile_slots=tile_slots,
        last=last,
        rows=decode_rows(slots, residents, masked, num_rows=shape.rows, num_slots=num_slots),
        scores_prompts=np.array(any(num_scored(row, residents[row.slot]) for row in rows)),
    )
    return made, places


def num_scored(row: PrefillRow, resident: Resident) -> int:
    """How many prompt tokens a chunk scores: those after its own, up to the prompt's end."""
    if resident.admission.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(row.length, resident.admission.prompt_length - 1 - row.start))
