"""The end of the prefill kernel: the last program of a row (a tile and KV head) merges the slots of
its queries (`slots`), one query after the other, while other rows are computed.

Which program that is depends on the moment, what it adds and in which order does not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import REF, SCALAR, Word, word
from pallas_kernels.sparse_attention.slots import load_parts, load_tops, merge_query

_NOTHING = 0xFF800000  # -inf


def merge_when_last(programs: int, shape: tuple[int, ...]) -> Callable[..., None]:
    """`run(done, shared, parts, part_lse, some, out, lse, row)`: `done` counts the programs of each
    row that came here, of `programs`; `shape` is that of the parts, [B, T, K, C, G, H].

    `some` [B, T, K, C] is 0 for a slot whose part was not written; `shared` is a word of shared
    memory that nobody needs any more.
    """

    @lanes.code(*[REF] * 7, SCALAR)
    def run(_, done, shared, parts, part_lse, some, out, lse, row):
        row, ticket = lanes.scalar(row), lanes.address(shared)

        def arrive() -> None:
            lanes.store_words(ticket, 0, [lanes.arrive(lanes.address(done, row << 2))])

        lanes.sync_warpgroup()  # all of this program's parts are stored
        lanes.when(lanes.thread().equals(0), arrive)
        lanes.sync_warpgroup()
        [before] = lanes.load_words(ticket, 0, 1)
        merge = partial(_merge_row, shape, row, (parts, part_lse, some), (out, lse))
        lanes.when(before.equals(programs - 1), merge)

    return run


def _merge_row(shape: tuple[int, ...], row: Word, partial_results: Any, results: Any) -> None:
    """A query's log-sum-exps are loaded while the query before is added up."""
    _, T, K, C, _, _ = shape
    parts, part_lse, some = partial_results
    tile = row // K
    first = tile * (T * K) + (row + tile * -K)

    def tops_of(query: Word) -> list[Word]:
        number = first + lanes.select(query.below(T), query, word(T - 1)) * K
        written = lanes.element(lanes.address(some), number, C * 4)
        counts = [lanes.load_words(written, slot * 4, 1)[0] for slot in range(C)]
        halves = load_tops(part_lse, number, C)
        return [
            lanes.select(count.equals(0), word(_NOTHING), top)
            for tops in halves
            for count, top in zip(counts, tops, strict=True)
        ]

    def merge(query: Word, *tops: Word) -> list[Word]:
        number = first + query * K
        loaded = load_parts(parts, number, C)
        following = tops_of(query + 1)
        merge_query(loaded, [list(tops[:C]), list(tops[C:])], number, *results)
        return following

    lanes.repeat(0, T, 1, merge, tops_of(word(0)))
