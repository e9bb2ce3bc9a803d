"""Block scores of 32 rows from pieces (`pieces`): the four warps of a program together, wgmma, one
tile in flight. Four programs a multiprocessor decode while others multiply.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.block_select import pieces
from pallas_kernels.block_select.page_tiles import (
    HALF_OPERAND,
    Many,
    decode_row,
    fold_array,
    load_row,
    operands_of,
    sync_warps,
)
from pallas_kernels.block_select.pieces import AHEAD, PIECES, ROWS, TEAMS
from pallas_kernels.block_select.query_rows import store_packed
from pallas_kernels.block_select.schedule import IDS, ITEM, PAGE, STEP, rows_of
from pallas_kernels.lanes import REF, SCALAR


def scratch(num_rows: int) -> list[Any]:
    """Shared memory of a CTA."""
    return [Many.scratch(num_rows, TEAMS), pieces.scratch()]


def program(num_rows, q, pool, line, counts, entries, scores, queries, rings):
    """Scores this program's steps one after the other."""
    team = lax.axis_index("team")
    number, first_line = lax.axis_index("cta") * TEAMS + team, line[0]
    queries, ring = Many.of_team(queries, num_rows, team), rings.at[team]
    steps, longest = counts[number], entries.shape[1]

    def blocks_of(step):
        at = jnp.minimum(step, longest - 1)
        ids = (entries[number, at, IDS + i] for i in range(STEP))
        return tuple(jnp.where(step < steps, one, -1) for one in ids)

    def score(step, carry):
        loaded, *blocks = carry
        item, page = entries[number, step, ITEM], entries[number, step, PAGE]

        @pl.when(item != loaded)
        def _():
            sync_warps()
            Many.load(q, queries, num_rows, *rows_of(item, q.shape[1], num_rows))
            plgpu.commit_smem()

        after = blocks_of(step + len(blocks))
        found: list[Any] = []
        for n in range(PIECES):
            _wait(AHEAD - 1)
            further, piece = divmod(n + AHEAD, PIECES)
            _fetch(pool, ring, first_line, blocks[further], piece)
            for tile in range(ROWS // 2):
                found = [fold_array(num_rows, _product(ring, queries, n, tile), *found)]
        store_packed(found[0], scores, item, page)
        return item, *blocks[1:], after

    blocks = [blocks_of(jnp.int32(i)) for i in range(2)]  # of a step and the next one
    for piece in range(AHEAD):
        _fetch(pool, ring, first_line, blocks[0], piece)
    lax.fori_loop(0, steps, score, (jnp.int32(-1), *blocks))
    _wait(0)


def _fetch(pool: Any, ring: Any, line: Any, blocks: tuple[Any, ...], piece: int) -> None:
    """Starts each warp's copy of a piece of its block."""
    block_bytes = pool.shape[1] * pool.shape[2]

    @lanes.code(REF, REF, *[SCALAR] * (1 + STEP))
    def run(_, pool, ring, line, *blocks):
        to, warp = pieces.slot(pieces.slots(ring), piece), lanes.warp()
        blocks = [lanes.scalar(x) for x in blocks]
        low = lanes.select(warp.equals(0), blocks[0], blocks[1])
        high = lanes.select(warp.equals(2), blocks[2], blocks[3])
        block = lanes.select(warp.below(2), low, high)
        source = pieces.Source(lanes.address(pool), block_bytes, lanes.scalar(line) << 7)
        pieces.fetch(to, source, block, piece)

    run(pool, ring, line, *blocks)


def _wait(under_way: int) -> None:
    @lanes.code()
    def run(_):
        pieces.wait(under_way)

    run()


def _product(ring: Any, queries: Any, piece: int, tile: int) -> Any:
    """Sums (64, N) of a tile of each warp's piece."""
    num_rows = queries.shape[1]

    @lanes.code(REF, returns=(HALF_OPERAND, HALF_OPERAND))
    def decode(_, ring):
        codes = pieces.slot(pieces.slots(ring), piece)
        low, high = (decode_row(load_row(codes, 2 * tile + i, ROWS)) for i in (0, 1))
        return operands_of(low, high)

    def multiply(sums):
        for half, a in enumerate(decode(ring)):
            plgpu.wgmma(sums, a, queries.at[half].transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((64, num_rows), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
