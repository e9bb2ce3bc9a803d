"""The end of a decode kernel: partial softmax sums of the same 16 heads become one output.

A part of four pages leaves one partial result in each of 4 warps; the parts of a unit lie in one
CTA or in the CTAs of a cluster. Every partial result has the same lane and register for the same
head and dimension, so they are merged where they lie, as 16-byte pieces, always in the same order:
the warps of a part first (`merge_warps`), then all parts (`merge_parts`), wherever they are.
"""

from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import Real, Word, load_reals, real, store_reals

_LN2 = 0.6931471805599453
WARP_BYTES = 16 * 32 * 16  # one warp's sums: [16 column tiles][32 lanes][4 float32]
_ROW_BYTES = 2 * 16 * 4  # [top, total][16 heads]
PART_BYTES = WARP_BYTES + _ROW_BYTES
ROWS_BYTES = 4 * _ROW_BYTES  # of the four warps


def merge_warps(sums: Any, tops: Any, totals: Any, spare: list[Any], rows: Any, part: Any) -> None:
    """Writes the merged result of a part to `part`, in shared memory.

    `sums` (64, 128), `tops` and `totals` (64,) are as the warps left them: sums of exp2(x - top) v,
    the greatest x, sums of exp2(x - top). `spare` points to `WARP_BYTES` for each warp that other
    warps may still be reading, `rows` to `ROWS_BYTES` of its own.
    """
    lanes.sync_warpgroup()
    _publish(spare, rows, sums, tops, totals)
    lanes.sync_warpgroup()
    weights = []
    g = lanes.lane() >> 2
    for half in (0, 1):
        mine = [lanes.at(rows, _ROW_BYTES * w + 32 * half) for w in range(4)]
        top, total, factors = _weigh(mine)
        weights.append(factors)
        # the same value from every lane and warp
        store_reals(part, (g << 2) + (WARP_BYTES + 32 * half), [top])
        store_reals(part, (g << 2) + (WARP_BYTES + 32 * half + 64), [total])
    for i in range(4):
        at = (lanes.warp() + 4 * i) * 512 + lanes.lane() * 16
        store_reals(part, at, _weighted(spare, at, weights))


def merge_parts(
    parts: list[Any], first: Word, tiles: int, unit: float, out: Any, lse: Any
) -> None:
    """Writes `tiles` column tiles, from the `first` on, of softmax(x) @ v as 16 bfloat16 rows of
    128 at `out`, and log-sum-exp at `lse`. Values are multiplied by `unit`; dimension 16 n + j is
    in column 8 j + n of the sums.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    weights = []
    for half in (0, 1):
        top, total, factors = _weigh([lanes.at(x, WARP_BYTES + 32 * half) for x in parts])
        some = total.above(real(0.0))
        inverse = lanes.select(some, real(unit) / total, real(0.0))
        weights.append([x * inverse for x in factors])
        store_reals(lse, (g + 8 * half) << 2, [(top + lanes.log2(total)) * real(_LN2)])
    for i in range(max(1, tiles // 4)):
        tile = first + lanes.warp() + 4 * i
        values = _weighted(parts, tile * 512 + lanes.lane() * 16, weights)
        for half in (0, 1):
            for n in (0, 1):
                place = (g + 8 * half) * 256 + (t * 2 + n) * 32 + (tile << 1)
                lanes.store_bf16(out, place, values[2 * half + n])


def _publish(spare: list[Any], rows: Any, sums: Any, tops: Any, totals: Any) -> None:
    """Each warp's sums to its piece of spare memory, its rows beside those of the others."""
    warp = lanes.warp()
    tiles = lanes.tiles_of(sums)
    for w, piece in enumerate(spare):

        def write(piece=piece):
            for j, values in enumerate(tiles):
                store_reals(piece, lanes.lane() * 16 + 512 * j, values)

        lanes.when(warp.equals(w), write)
    at = warp * _ROW_BYTES + ((lanes.lane() >> 2) << 2)

    def write_rows() -> None:
        for kind, values in enumerate((lanes.rows_of(tops), lanes.rows_of(totals))):
            for half, value in enumerate(values):
                store_reals(rows, at + (64 * kind + 32 * half), [value])

    lanes.when((lanes.lane() & 3).below(1), write_rows)


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


def _weighted(parts: list[Any], at: Word, weights: list[list[Real]]) -> list[Real]:
    """The weighted sum of one 16-byte piece of each part: two values of row g, two of g + 8."""
    sums = [real(0.0)] * 4
    for i, part in enumerate(parts):
        values = load_reals(part, at, 4)
        sums = [
            x + y * weights[j // 2][i] for j, (x, y) in enumerate(zip(sums, values, strict=True))
        ]
    return sums
