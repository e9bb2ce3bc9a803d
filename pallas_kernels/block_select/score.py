"""Block scores from NVFP4 index pages: B[row, page] = max over the page's tokens of <q_row, k>.

Grid: persistent programs of one warpgroup (`programs`), each with an equal part of the steps
(`schedule`). A step is four pages of an item, one a warp (`page_tiles`), which the copy engine
fetches some steps ahead (`Shape`). The maximum over tokens stays in registers until a few shuffles
end it.

Memory: 9,216 bytes a page and 8 of the schedule read once, 4 bytes a row and page written, the
queries (256 bytes a row) read whenever a program comes to another item. Scores are those of
scaled queries (`query_rows`).

Pages at and after the newest block of an item's last query are not scored (their scores are
undefined): the newest block is always chosen, so no page needs a causal mask.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import lanes
from pallas_kernels.block_select.page_tiles import Few, Many
from pallas_kernels.block_select.query_rows import store_maxima, unpack
from pallas_kernels.block_select.schedule import (
    IDS,
    ITEM,
    PAGE,
    STEP,
    Schedule,
    items_of_sequence,
    rows_of_item,
)
from pallas_kernels.lanes import REF, SCALAR

TOKENS, WIDTH = 128, 128  # of a page, of a key
PAGE_LINES = 72
_FEW_ROWS = 16
_MULTIPROCESSORS = 132  # of an H200


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How programs share a multiprocessor."""

    ctas: int  # that it holds
    teams: int = 1  # programs of a CTA: of three, the compiler gives a lane 168 registers at most
    stages: int = 2  # steps in flight for a program, 37 KB each

    @property
    def programs(self) -> int:
        """Of all multiprocessors: one wave."""
        return _MULTIPROCESSORS * self.ctas * self.teams


_TWO = Shape(ctas=2)
SHAPES = {8: Shape(ctas=3), 16: _TWO, 32: _TWO, 64: _TWO, 128: _TWO}  # by N


def programs(rows: int) -> int:
    """G for sequences of that many rows: one wave."""
    return SHAPES[rows_of_item(rows)].programs


def block_scores(
    q: Float[Array, "B R I"],
    pool: UInt8[Array, "blocks lines 128"],
    line: Int[Array, ""],
    schedule: Schedule,
    blocks: int,
) -> Float[Array, "items N P4"]:
    """Scores of each item's rows for the pages of its schedule; the rest is undefined."""
    batch, rows, _ = q.shape
    num_rows = rows_of_item(rows)
    tiles = Few if num_rows <= _FEW_ROWS else Many
    width = -(-blocks // STEP) * STEP
    shape = SHAPES[num_rows]
    slots = shape.teams * shape.stages
    kernel = plgpu.kernel(
        lanes.named("block_scores", _program, tiles, num_rows, shape),
        out_type=jax.ShapeDtypeStruct(
            (batch * items_of_sequence(rows), num_rows, width), jnp.float32
        ),
        grid=(schedule.counts.shape[0] // shape.teams,),
        grid_names=("cta",),
        num_threads=shape.teams,
        thread_name="team",
        scratch_types=[
            plgpu.SMEM((slots, STEP, PAGE_LINES, 128), jnp.uint8),
            tiles.scratch(num_rows, shape.teams),
            plgpu.Barrier(num_arrivals=STEP, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # those that are needed stand in the code
        ),
    )
    return kernel(q, pool, line.reshape(1), schedule.counts, schedule.entries)


def _program(
    tiles, num_rows, shape, q, pool, line, counts, entries, scores, pages, all_queries, arrived
):
    """Scores this program's steps one after the other."""
    team = lax.axis_index("team")
    program, first_line = lax.axis_index("cta") * shape.teams + team, line[0]
    steps, longest = counts[program], entries.shape[1]
    queries = tiles.of_team(all_queries, num_rows, team)

    def slot_of(step):
        return team * shape.stages + lax.rem(step, shape.stages)

    def page_ids(step):
        step = jnp.minimum(step, longest - 1)
        return tuple(entries[program, step, IDS + i] for i in range(STEP))

    def fetch(slot, ids):
        for i in range(STEP):  # the copy engine reads zeros for a block of -1
            source = pool.at[ids[i], pl.ds(first_line, PAGE_LINES)]
            plgpu.copy_gmem_to_smem(source, pages.at[slot, i], arrived.at[slot])

    for step in range(shape.stages):
        ids = page_ids(step)
        pl.when(step < steps)(partial(fetch, slot_of(step), ids))

    def score(step, carry):
        loaded, ids = carry
        slot = slot_of(step)
        item, page = entries[program, step, ITEM], entries[program, step, PAGE]

        @pl.when(item != loaded)
        def _():
            tiles.load(q, queries, num_rows, *_rows_of(item, q.shape[1], num_rows))
            plgpu.commit_smem()

        plgpu.barrier_wait(arrived.at[slot])
        best = tiles.best(pages.at[slot], queries, num_rows)
        _sync()  # all warps are done with pages and queries
        pl.when(step + shape.stages < steps)(partial(fetch, slot, ids))
        _store(best, scores, item, page)
        return item, page_ids(step + shape.stages + 1)

    lax.fori_loop(0, steps, score, (jnp.int32(-1), page_ids(shape.stages)))


def _rows_of(item: Any, rows: int, num_rows: int) -> tuple[Any, Any]:
    """An item's first row, and the end of its sequence, in the rows of all sequences."""
    items = items_of_sequence(rows)
    sequence = item // items if items > 1 else item
    return sequence * rows + (item - sequence * items) * num_rows, (sequence + 1) * rows


def _store(best: Any, scores: Any, item: Any, page: Any) -> None:
    _, num_rows, width = scores.shape

    @lanes.code(plgpu.Layout.WGMMA, REF, SCALAR, SCALAR)
    def store(_, best, scores, item, page):
        row, column = lanes.scalar(item) * num_rows, lanes.scalar(page) + lanes.warp()
        store_maxima(unpack(best, num_rows), scores, row, width, column)

    store(best, scores, item, page)


def _sync() -> None:
    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()
