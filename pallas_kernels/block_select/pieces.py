"""Quarters of index pages ("pieces") that each warp fetches for itself, some of them ahead.

A warp's share of shared memory is one page; piece n of every page lies in its n-th quarter: the
codes of 32 tokens, then their scales. A warp waits for its own copies alone, so no barrier holds up
the four of a program, a first key is two loads away, and what is decoded after the last copy is a
quarter of a page. The three pieces on their way are 6.9 KB a warp, 110 KB a multiprocessor.

One CTA of `TEAMS` programs a multiprocessor: 16 warps, of 128 registers a lane at most.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.block_select.page_tiles import CODE_BYTES, PAGE_BYTES, ROW_CODES, ROW_SCALES
from pallas_kernels.block_select.schedule import STEP
from pallas_kernels.lanes import Word, copies, word

# On an H200: 13.9 us at 1 x 512K and 53.0 at 16 x 128K x 8 queries. Three programs and 168
# registers: 16.6 with seven pieces ahead, and 53.8 with products of two tiles in flight.
TEAMS = 4
AHEAD = 3  # pieces on their way: the fourth quarter is being read
PIECES = 4  # of a page
ROWS = 4  # of eight tokens, in a piece
PIECE_BYTES = PAGE_BYTES // PIECES


@dataclass(frozen=True)
class Source:
    """Where blocks lie: a pointer to the pool, bytes of a block, the index page's first byte."""

    pool: Any
    block_bytes: int
    first_byte: Word


def scratch() -> Any:
    """A page for each warp of a CTA's programs."""
    return plgpu.SMEM((TEAMS, STEP * PAGE_BYTES), jnp.uint8)


def slots(ring: Any) -> Any:
    """A pointer to this warp's page, in the memory of its program."""
    return lanes.address(ring, lanes.warp() * PAGE_BYTES)


def slot(slots: Any, piece: int) -> Any:
    """A pointer to its n-th quarter."""
    return lanes.at(slots, piece * PIECE_BYTES)


def fetch(to: Any, source: Source, block: Word, piece: int) -> None:
    """Starts this warp's copy of a piece; of block -1 it is zeros, and nothing is read."""
    missing = block.below(0)
    known = lanes.select(missing, word(0), block)
    size = lanes.select(missing, word(0), word(16))
    page = lanes.at(lanes.element(source.pool, known, source.block_bytes), source.first_byte)
    lane16 = lanes.lane() << 4
    for row in range(ROWS):
        at = lane16 + ROW_CODES * row
        copies.copy_async(lanes.at(to, at), lanes.at(page, at + ROW_CODES * ROWS * piece), size)

    def copy_scales():
        scales = lanes.at(page, lane16 + (CODE_BYTES + ROW_SCALES * ROWS * piece))
        copies.copy_async(lanes.at(to, lane16 + ROW_CODES * ROWS), scales, size)

    lanes.when(lanes.lane().below(ROW_SCALES * ROWS // 16), copy_scales)
    copies.commit_copies()


def wait(under_way: int) -> None:
    """Waits until this warp has all its pieces but that many."""
    copies.wait_for_copies(under_way)
    lanes.sync_warp()
