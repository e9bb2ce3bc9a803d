"""Block scores of at most 8 rows from pieces (`pieces`): each warp by itself, mma.m16n8k16.

A program's whole life is lane code: only the queries of an item are brought in by its four warps
together. The next step's blocks are loaded from the schedule two steps before their last use.
"""

from functools import partial
from typing import Any

from jax import lax

from pallas_kernels import lanes
from pallas_kernels.block_select import pieces
from pallas_kernels.block_select.page_tiles import Few, decode_row, load_row, multiply
from pallas_kernels.block_select.pieces import AHEAD, PIECES, ROWS, TEAMS
from pallas_kernels.block_select.query_rows import fold, place_rows, store_maxima
from pallas_kernels.block_select.schedule import FIELDS, IDS, ITEM, PAGE, rows_of
from pallas_kernels.lanes import REF, SCALAR, Word, word


def scratch(num_rows: int) -> list[Any]:
    """Shared memory of a CTA."""
    return [Few.scratch(num_rows, TEAMS), pieces.scratch()]


def program(num_rows, q, pool, line, counts, entries, scores, queries, rings):
    """Scores this program's steps one after the other."""
    team = lax.axis_index("team")
    number = lax.axis_index("cta") * TEAMS + team
    queries, ring = Few.of_team(queries, num_rows, team), rings.at[team]
    longest, block_bytes = entries.shape[1], pool.shape[1] * pool.shape[2]
    rows, width, dtype = q.shape[1], scores.shape[2], q.dtype

    @lanes.code(*[REF] * 6, *[SCALAR] * 3)
    def run(_, q, pool, entries, scores, queries, ring, number, steps, line):
        steps, first_byte = lanes.scalar(steps), lanes.scalar(line) << 7
        start = lanes.scalar(number) * (longest * FIELDS * 4)
        mine = lanes.address(entries, start)
        source = pieces.Source(lanes.address(pool), block_bytes, first_byte)
        to = lanes.address(queries)
        slots = pieces.slots(ring)

        def entry(step, field):
            step = lanes.select(step.below(longest), step, word(longest - 1))
            return lanes.load_words(mine, (step << 5) + field, 1)[0]

        def block_of(step):
            block = entry(step, (lanes.warp() + IDS) << 2)
            return lanes.select(step.below(steps), block, word(-1))

        def load_queries(item):
            lanes.sync_warpgroup()
            place_rows(q, dtype, num_rows, rows_of(item, rows, num_rows), Few.place(to))
            lanes.sync_warpgroup()

        def score(step, loaded, *blocks):
            item, page = entry(step, ITEM << 2), entry(step, PAGE << 2)
            after = block_of(step + len(blocks))
            lanes.when(lanes.negate(item.equals(loaded)), partial(load_queries, item))
            b, found = Few.words(to, num_rows), None
            for n in range(PIECES):
                pieces.wait(AHEAD - 1)
                further, piece = divmod(n + AHEAD, PIECES)
                pieces.fetch(pieces.slot(slots, piece), source, blocks[further], piece)
                found = _best(pieces.slot(slots, n), b, found)
            assert found is not None
            column = page + lanes.warp()
            store_maxima(found, scores, item * num_rows, width, column)
            return [item, *blocks[1:], after]

        blocks = [block_of(word(i)) for i in range(2)]  # of a step and the next one
        for piece in range(AHEAD):
            pieces.fetch(pieces.slot(slots, piece), source, blocks[0], piece)
        lanes.repeat(0, steps, 1, score, [word(-1), *blocks])
        pieces.wait(0)

    run(q, pool, entries, scores, queries, ring, number, counts[number], line[0])


def _best(piece: Any, b: list[list[list[Word]]], found: list | None) -> list:
    """The maximum over the tokens of a piece and over `found`; all its loads come first."""
    rows = [load_row(piece, row, ROWS) for row in range(ROWS)]
    for low, high in zip(rows[::2], rows[1::2], strict=True):
        found = fold(multiply(decode_row(low), decode_row(high), b), found)
    assert found is not None
    return found
