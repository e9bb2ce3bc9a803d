"""Block scores from NVFP4 index pages: B[row, page] = max over the page's tokens of <q_row, k>.

Grid: persistent programs of one warpgroup (`programs`), each with an equal part of the steps
(`schedule`). A step is four pages of an item, one a warp (`page_tiles`). The maximum over tokens
stays in registers until a few shuffles end it. Three kernels do the same and differ in how pages
come: `few_pieces`, `many_pieces` and `whole_pages`; `_kernel` chooses.

Memory: 9,216 bytes a page and 8 of the schedule read once, 4 bytes a row and page written, the
queries (256 bytes a row) read whenever a program comes to another item. Scores are those of
scaled queries (`query_rows`).

Pages at and after the newest block of an item's last query are not scored (their scores are
undefined): the newest block is always chosen, so no page needs a causal mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import lanes
from pallas_kernels.block_select import few_pieces, many_pieces, pieces, whole_pages
from pallas_kernels.block_select.schedule import (
    STEP,
    Schedule,
    items_of_sequence,
    max_steps,
    rows_of_item,
)

TOKENS, WIDTH = 128, 128  # of a page, of a key
_MULTIPROCESSORS = 132  # of an H200
_FEW_STEPS = 4  # of a program: a million tokens of one sequence


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A kernel, and how its programs share a multiprocessor."""

    name: str  # that profilers show
    program: Callable[..., None]  # of N and references
    scratch: Callable[[int], list[Any]]  # of N
    ctas: int  # that a multiprocessor holds
    teams: int  # programs of a CTA

    @property
    def programs(self) -> int:
        """Of all multiprocessors: one wave."""
        return _MULTIPROCESSORS * self.ctas * self.teams


_FEW = _Kernel(
    name="block_scores_few",
    program=few_pieces.program,
    scratch=few_pieces.scratch,
    ctas=1,
    teams=pieces.TEAMS,
)
_MANY = _Kernel(
    name="block_scores_many",
    program=many_pieces.program,
    scratch=many_pieces.scratch,
    ctas=1,
    teams=pieces.TEAMS,
)


def _whole(ctas: int) -> _Kernel:
    return _Kernel(
        name="block_scores",
        program=whole_pages.program,
        scratch=whole_pages.scratch,
        ctas=ctas,
        teams=whole_pages.TEAMS,
    )


def programs(batch: int, rows: int, blocks: int) -> int:
    """G for a batch of sequences of that many rows and blocks at most: one wave."""
    return _kernel(batch, rows, blocks).programs


def block_scores(
    q: Float[Array, "B R I"],
    pool: UInt8[Array, "blocks lines 128"],
    line: Int[Array, ""],
    schedule: Schedule,
    blocks: int,
) -> Float[Array, "items N P4"]:
    """Scores of each item's rows for the pages of its schedule; the rest is undefined.

    `schedule` is for as many programs as `programs` says.
    """
    batch, rows, _ = q.shape
    num_rows, kernel = rows_of_item(rows), _kernel(batch, rows, blocks)
    assert schedule.counts.shape == (kernel.programs,), (schedule.counts.shape, kernel)
    width = -(-blocks // STEP) * STEP
    run = plgpu.kernel(
        lanes.named(kernel.name, kernel.program, num_rows),
        out_type=jax.ShapeDtypeStruct(
            (batch * items_of_sequence(rows), num_rows, width), jnp.float32
        ),
        grid=(kernel.programs // kernel.teams,),
        grid_names=("cta",),
        num_threads=kernel.teams,
        thread_name="team",
        scratch_types=kernel.scratch(num_rows),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # those that are needed stand in the code
        ),
    )
    return run(q, pool, line.reshape(1), schedule.counts, schedule.entries)


def _kernel(batch: int, rows: int, blocks: int) -> _Kernel:
    """By what an H200 said: pieces are faster for few pages of 8 rows (13.9 us, not 16.5, at 1 x
    512K, 2 steps a program) and for 32 rows (53.0, not 58.7, at 16 x 128K). Whole pages stay for
    many pages of 8 rows, where they run at 99 % of a copy's rate; for 128 rows, which do not fit
    the registers of four programs; and for 16 and 64, where pieces were not run.
    """
    num_rows = rows_of_item(rows)
    if num_rows == 32:
        return _MANY
    if num_rows == 8 and max_steps(batch, rows, blocks) <= _FEW_STEPS * _FEW.programs:
        return _FEW
    return _whole(ctas=3 if num_rows == 8 else 2)
