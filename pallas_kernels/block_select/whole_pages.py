"""Block scores from whole index pages, which the copy engine fetches some steps ahead: the four of
a step arrive together, and the four warps of a program go on together.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_select.page_tiles import Few, Many, sync_warps
from pallas_kernels.block_select.query_rows import store_packed
from pallas_kernels.block_select.schedule import IDS, ITEM, PAGE, STEP, rows_of

PAGE_LINES = 72
TEAMS = 1  # programs of a CTA
STAGES = 2  # steps in flight for a program, 37 KB each
_FEW_ROWS = 16


def tiles(num_rows: int) -> type[Few] | type[Many]:
    """How that many rows are multiplied."""
    return Few if num_rows <= _FEW_ROWS else Many


def scratch(num_rows: int) -> list[Any]:
    """Shared memory of a CTA."""
    slots = TEAMS * STAGES
    return [
        plgpu.SMEM((slots, STEP, PAGE_LINES, 128), jnp.uint8),
        tiles(num_rows).scratch(num_rows, TEAMS),
        plgpu.Barrier(num_arrivals=STEP, num_barriers=slots),
    ]


def program(num_rows, q, pool, line, counts, entries, scores, pages, all_queries, arrived):
    """Scores this program's steps one after the other."""
    way, team = tiles(num_rows), lax.axis_index("team")
    number, first_line = lax.axis_index("cta") * TEAMS + team, line[0]
    steps, longest = counts[number], entries.shape[1]
    queries = way.of_team(all_queries, num_rows, team)

    def slot_of(step):
        return team * STAGES + lax.rem(step, STAGES)

    def page_ids(step):
        step = jnp.minimum(step, longest - 1)
        return tuple(entries[number, step, IDS + i] for i in range(STEP))

    def fetch(slot, ids):
        for i in range(STEP):  # the copy engine reads zeros for a block of -1
            source = pool.at[ids[i], pl.ds(first_line, PAGE_LINES)]
            plgpu.copy_gmem_to_smem(source, pages.at[slot, i], arrived.at[slot])

    for step in range(STAGES):
        ids = page_ids(step)
        pl.when(step < steps)(partial(fetch, slot_of(step), ids))

    def score(step, carry):
        loaded, ids = carry
        slot = slot_of(step)
        item, page = entries[number, step, ITEM], entries[number, step, PAGE]

        @pl.when(item != loaded)
        def _():
            way.load(q, queries, num_rows, *rows_of(item, q.shape[1], num_rows))
            plgpu.commit_smem()

        plgpu.barrier_wait(arrived.at[slot])
        best = way.best(pages.at[slot], queries, num_rows)
        sync_warps()  # all warps are done with pages and queries
        pl.when(step + STAGES < steps)(partial(fetch, slot, ids))
        store_packed(best, scores, item, page)
        return item, page_ids(step + STAGES + 1)

    lax.fori_loop(0, steps, score, (jnp.int32(-1), page_ids(STAGES)))
