"""Softmax of scores that come page by page, in the registers of a warpgroup: arrays of 64 rows, 16
of each warp, in `Layout.WGMMA`, of any number of columns.
"""

from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import Real

SLACK = 8.0  # in powers of two: float16 weights stay below 256


def soften(scores: Any, unit: float, sums: Any, tops: Any, totals: Any) -> tuple[Any, ...]:
    """float16 weights exp2(scores * unit - top) in their order, and sums (64, 128), tops (64,) and
    totals (64,) brought to the maxima of these scores; `unit` > 0. Every lane has totals of its own
    columns.

    A maximum is followed only once it grows by `SLACK`, so that most pages leave sums as they are.
    """
    tiles, flat = lanes.tiles_of(scores), [x for tile in lanes.tiles_of(sums) for x in tile]
    old, counts = lanes.rows_of(tops), lanes.rows_of(totals)
    found = [_row_maximum(tiles, half) * lanes.real(unit) for half in (0, 1)]
    grown = [new.above(top + lanes.real(SLACK)) for new, top in zip(found, old, strict=True)]

    def follow() -> list[Real]:
        new = [lanes.select(*x) for x in zip(grown, found, old, strict=True)]
        factors = [
            lanes.select(more, lanes.exp2(a - b), lanes.real(1.0))
            for more, a, b in zip(grown, old, new, strict=True)
        ]
        moved = [x * y for x, y in zip(counts, factors, strict=True)]
        return [*new, *moved, *(x * factors[i // 2 % 2] for i, x in enumerate(flat))]

    state = lanes.branch(lanes.any_lane(grown), follow, [*old, *counts, *flat])
    new, counts, flat = state[:2], state[2:4], state[4:]
    weights, counts = _weigh(tiles, unit, new, counts)
    return (
        weights,
        lanes.array_of([flat[i : i + 4] for i in range(0, len(flat), 4)]),
        lanes.with_rows(tops, new),
        lanes.with_rows(totals, counts),
    )


def _weigh(
    tiles: list[list[Real]], unit: float, tops: list[Real], totals: list[Real]
) -> tuple[Any, list[Real]]:
    """The float16 weights, and this lane's totals with them."""
    nothing, hidden = lanes.real(0.0), lanes.real(float("-inf"))
    minus = [lanes.select(x.above(hidden), nothing - x, nothing) for x in tops]
    scale = lanes.real(unit)
    weights = [
        [lanes.exp2(lanes.multiply_add(x, scale, minus[i // 2])) for i, x in enumerate(tile)]
        for tile in tiles
    ]
    for tile in weights:
        totals = [totals[half] + (tile[2 * half] + tile[2 * half + 1]) for half in (0, 1)]
    pairs = [[lanes.half2_of_reals(*tile[i : i + 2]) for i in (0, 2)] for tile in weights]
    return lanes.half_accumulator(pairs), totals


def _row_maximum(tiles: list[list[Real]], half: int) -> Real:
    """Over the columns of a row in the four lanes that have it."""
    values = [x for tile in tiles for x in tile[2 * half : 2 * half + 2]]
    largest = values[0]
    for one in values[1:]:
        largest = lanes.maximum(largest, one)
    for distance in (1, 2):
        largest = lanes.maximum(largest, lanes.shuffle_xor(largest, distance))
    return largest


def all_columns(totals: list[Real]) -> list[Real]:
    """A row's totals over the four lanes that have its columns."""
    for distance in (1, 2):
        totals = [x + lanes.shuffle_xor(x, distance) for x in totals]
    return totals
