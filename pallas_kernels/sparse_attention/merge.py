"""The end of a decode kernel: partial softmax sums of the same 16 heads become one output.

A part of four pages leaves one partial result in each of 4 warps; the parts of a unit lie in one
CTA or in the CTAs of a cluster. Every partial result has the same lane and register for the same
head and dimension, so they are merged where they lie, always in the same order: the warps of a part
first (`merge_warps`), then all parts (`merge_parts`), wherever they are. A part is kept as float16
of its own softmax.
"""

from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import (
    Real,
    Word,
    load_reals,
    load_words,
    real,
    reals_of_half2,
    store_reals,
)
from pallas_kernels.logarithms import LN2
from pallas_kernels.online_softmax import all_columns

ROUND_BYTES = 8 * 32 * 16  # half of one warp's sums: [8 column tiles][32 lanes][4 float32]
_ROW_BYTES = 2 * 16 * 4  # [top, total][16 heads]
_SUMS_BYTES = ROUND_BYTES  # of a part, float16
PART_BYTES = _SUMS_BYTES + _ROW_BYTES
ROWS_BYTES = 4 * _ROW_BYTES  # of the four warps


def merge_warps(
    sums: Any, tops: Any, totals: Any, spare: list[Any], own: Any, rows: Any, part: Any
) -> None:
    """Writes the merged result of a part to `part`, in shared memory: half of the column tiles,
    then the others.

    `sums` (64, 128), `tops` and `totals` (64,) are as the warps left them: sums of exp2(x - top) v,
    the greatest x, sums of exp2(x - top). `spare` points to `ROUND_BYTES` for each warp, and `own`
    to this warp's, that nobody else reads or writes any more; `rows` to `ROWS_BYTES`.
    """
    _publish_rows(rows, tops, totals)
    tiles, weights = lanes.tiles_of(sums), []
    for turn in (0, 1):
        for j, values in enumerate(tiles[8 * turn : 8 * turn + 8]):
            store_reals(own, lanes.lane() * 16 + 512 * j, values)
        lanes.sync_warpgroup()
        weights = weights or _warp_weights(rows, part)
        for i in range(2):
            place = (lanes.warp() + 4 * i) * 32 + lanes.lane()
            values = _weighted([load_reals(x, place << 4, 4) for x in spare], weights)
            words = [lanes.half2_of_reals(values[j], values[j + 1]) for j in (0, 2)]
            lanes.store_words(part, (place << 3) + turn * (_SUMS_BYTES // 2), words)
        if not turn:
            lanes.sync_warpgroup()


def _warp_weights(rows: Any, part: Any) -> list[list[Real]]:
    """Each warp's share of a part's rows g and g + 8; writes the part's tops and totals."""
    g, weights = lanes.lane() >> 2, []
    for half in (0, 1):
        mine = [lanes.at(rows, _ROW_BYTES * w + 32 * half) for w in range(4)]
        top, total, factors = _weigh(mine)
        inverse = _inverse(total, 1.0)
        weights.append([x * inverse for x in factors])
        # the same value from every lane and warp
        store_reals(part, (g << 2) + (_SUMS_BYTES + 32 * half), [top])
        store_reals(part, (g << 2) + (_SUMS_BYTES + 32 * half + 64), [total])
    return weights


def merge_parts(parts: list[Any], first: Word, tiles: int, unit: float, out: Any, lse: Any) -> None:
    """Writes `tiles` (2, 4, 8 or 16) column tiles, from the `first` on, of softmax(x) @ v as 16
    bfloat16 rows of 128 at `out`, and log-sum-exp at `lse`. Values are multiplied by `unit`;
    dimension 16 n + j is in column 8 j + n.

    A warp has the rows g, or g + 8, of some neighbouring tiles: in a lane these are neighbouring
    dimensions. To be run by the warps below `warps(tiles)`.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    half, together = lanes.warp() & 1, _together(tiles)
    rows = [lanes.at(x, (half << 5) + _SUMS_BYTES) for x in parts]
    top, total, factors = _weigh(rows)
    inverse = _inverse(total, unit)
    totals = [load_reals(row, (g << 2) + 64, 1)[0] for row in rows]
    weights = [x * y * inverse for x, y in zip(factors, totals, strict=True)]
    row = g + (half << 3)
    store_reals(lse, row << 2, [(top + lanes.log2(total)) * real(LN2)])
    for i in range(max(1, tiles // together // 2)):
        tile = first + ((lanes.warp() >> 1) + 2 * i) * together
        values = [_tile_values(parts, tile + j, half, weights) for j in range(together)]
        for n in (0, 1):
            pairs = [(values[j][n], values[j + 1][n]) for j in range(0, together, 2)]
            place = (row << 8) + (t * 2 + n) * 32 + (tile << 1)
            lanes.store_words(out, place, [lanes.bf16_of_reals(*pair) for pair in pairs])


def warps(tiles: int) -> int:
    """How many warps have work in `merge_parts`."""
    return min(4, 2 * tiles // _together(tiles))


def _together(tiles: int) -> int:
    """Tiles that a lane stores at once."""
    return min(4, tiles)


def _tile_values(parts: list[Any], tile: Word, half: Word, weights: list[Real]) -> list[Real]:
    """The merged values of a lane's two columns of a tile, in one of its rows."""
    at = ((tile * 32 + lanes.lane()) << 3) + (half << 2)
    sums = [real(0.0)] * 2
    for part, weight in zip(parts, weights, strict=True):
        values = reals_of_half2(load_words(part, at, 1)[0])
        sums = [x + y * weight for x, y in zip(sums, values, strict=True)]
    return sums


def _publish_rows(rows: Any, tops: Any, totals: Any) -> None:
    """Each warp's rows beside those of the others; a lane's totals are of its own columns."""
    counts = all_columns(lanes.rows_of(totals))
    at = lanes.warp() * _ROW_BYTES + ((lanes.lane() >> 2) << 2)

    def write() -> None:
        for kind, values in enumerate((lanes.rows_of(tops), counts)):
            for half, value in enumerate(values):
                store_reals(rows, at + (64 * kind + 32 * half), [value])

    lanes.when((lanes.lane() & 3).below(1), write)


def _weigh(rows: list[Any]) -> tuple[Real, Real, list[Real]]:
    """(top, total, factor of each) of this lane's row g of some [top, total][16] of which the
    pointers name the right 8 rows.
    """
    at = (lanes.lane() >> 2) << 2
    tops = [load_reals(row, at, 1)[0] for row in rows]
    totals = [load_reals(row, at + 64, 1)[0] for row in rows]
    top = tops[0]
    for one in tops[1:]:
        top = lanes.maximum(top, one)
    some = top.above(real(float("-inf")))
    reference = lanes.select(some, top, real(0.0))
    factors = [lanes.exp2(one - reference) for one in tops]
    total = real(0.0)
    for factor, one in zip(factors, totals, strict=True):
        total = total + factor * one
    return top, total, factors


def _inverse(total: Real, unit: float) -> Real:
    """unit / total, or 0 where nothing was seen."""
    return lanes.select(total.above(real(0.0)), real(unit) / total, real(0.0))


def _weighted(pieces: list[list[Real]], weights: list[list[Real]]) -> list[Real]:
    """The weighted sum of pieces of four values: two of row g, two of g + 8."""
    sums = [real(0.0)] * 4
    for i, values in enumerate(pieces):
        sums = [
            x + y * weights[j // 2][i] for j, (x, y) in enumerate(zip(sums, values, strict=True))
        ]
    return sums
