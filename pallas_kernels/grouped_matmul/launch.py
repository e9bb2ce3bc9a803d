"""What both kernels know of a launch: its shapes, its units of work, its memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.matching_rows import SLAB
from pallas_kernels.layouts.nvfp4_pages import COLUMNS, LINE, LINES

MULTIPROCESSORS = 132  # of an H200
MEMORY = 225 * 1024  # bytes of a CTA's shared memory, barriers apart
SWIZZLED = (plgpu.TilingTransform((EIGHT, SLAB)), plgpu.SwizzleTransform(128))
PAGE_BYTES = LINES * LINE


class Units(NamedTuple):
    """Units of `teams` x 64 weight rows: a team's are a page of the first rows and one of the
    second ones.
    """

    count: int  # of one expert
    stride: int  # pages from one unit's first rows to the next one's
    apart: int  # pages from a unit's first rows to its second ones


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Products of groups of rows, which have `columns` columns."""

    widths: tuple[int, ...]  # N's of the products, of which each group takes the least that fits
    columns: int  # K
    pages: int  # of a matrix, along its rows
    matrices: int  # 2: gate and up; 1: down, of which a unit has rows from two places
    store: Any  # (sums, out, page, place, start, end, scale, another scale or pages apart)
    out: Any  # what is stored

    @property
    def rows(self) -> int:
        """Of the largest group."""
        return self.widths[-1]

    def units(self, teams: int) -> Units:
        """How the weight rows are dealt out."""
        if self.matrices == 2:
            return Units(self.pages // teams, teams, 0)
        return Units(self.pages // (2 * teams), 2 * teams, teams)

    def steps(self, wide: int) -> int:
        """Of a unit, of `wide` pages along K each."""
        return self.columns // (COLUMNS * wide)

    def last(self, second_scale: Any, apart: int) -> Any:
        """The last operand of `store`."""
        return second_scale if self.matrices == 2 else jnp.int32(apart)
