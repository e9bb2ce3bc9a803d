"""The end of a decode kernel: the 4 warps of each of S CTAs of a cluster hold partial softmax sums
of the same 16 heads; together they write one output.

Every partial result has the same lane and register for the same head and dimension, so they are
merged where they lie, as 16-byte pieces, always in the same order: warps first, then CTAs.
"""

from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import Real, Word, load_reals, real, store_reals

_LN2 = 0.6931471805599453
_PART = 16 * 32 * 16  # bytes of one warp's sums: [16 column tiles][32 lanes][4 float32]
_OWN = 4 * _PART  # the CTA's sums, after the four warps'
_ROWS = 5 * _PART  # [4 warps and the CTA][top, total][16 heads]
SCRATCH_BYTES = _ROWS + 5 * 2 * 16 * 4


def merge(
    sums: Any,
    tops: Any,
    totals: Any,
    scratch: Any,
    splits: int,
    rank: Word,
    unit: float,
    out: Any,
    lse: Any,
) -> None:
    """Writes softmax(x) @ v as 16 bfloat16 rows of 128 at `out`, and log-sum-exp at `lse`.

    `sums` (64, 128), `tops` and `totals` (64,) are as the warps left them: sums of exp2(x - top)
    v / unit with dimension 16 n + j in column 8 j + n, the greatest x, sums of exp2(x - top).
    `scratch` is shared memory, free in every CTA; `rank` is this CTA's of `splits`.
    """
    base = lanes.address(scratch)
    _publish(base, sums, tops, totals)
    lanes.sync_warpgroup()
    _merge_warps(base)
    lanes.sync_cluster() if splits > 1 else lanes.sync_warpgroup()
    tiles = 16 // splits  # of this CTA
    parts = [lanes.in_cluster(base, i) for i in range(splits)] if splits > 1 else [base]
    lanes.when(lanes.warp().below(tiles), lambda: _merge_ctas(parts, rank, tiles, unit, out, lse))
    if splits > 1:
        lanes.sync_cluster()  # nobody leaves while its shared memory is read


def _publish(base: Any, sums: Any, tops: Any, totals: Any) -> None:
    at = lanes.warp() * _PART + lanes.lane() * 16
    for j, values in enumerate(lanes.tiles_of(sums)):
        store_reals(base, at + 512 * j, values)
    rows = (lanes.rows_of(tops), lanes.rows_of(totals))
    at = lanes.warp() * 128 + ((lanes.lane() >> 2) << 2) + _ROWS

    def write() -> None:
        for kind, values in enumerate(rows):
            for half, value in enumerate(values):
                store_reals(base, at + (64 * kind + 32 * half), [value])

    lanes.when((lanes.lane() & 3).below(1), write)


def _merge_warps(base: Any) -> None:
    """Four warps' sums -> the CTA's; warp w does column tiles w, w + 4, .."""
    weights = []
    for half in (0, 1):
        top, total, scaled = _weigh([base] * 4, [128 * w for w in range(4)], half)
        weights.append(scaled)
        at = ((lanes.lane() >> 2) << 2) + (_ROWS + 512 + 32 * half)
        store_reals(base, at, [top])  # the same value from every lane of the row
        store_reals(base, at + 64, [total])
    for i in range(4):
        at = (lanes.warp() + 4 * i) * 512 + lanes.lane() * 16
        store_reals(
            base, at + _OWN, _weighted([base] * 4, [at + _PART * w for w in range(4)], weights)
        )


def _merge_ctas(parts: list[Any], rank: Word, tiles: int, unit: float, out: Any, lse: Any) -> None:
    """The CTAs' sums -> results; CTA r does column tiles from r * tiles on."""
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    offsets = [512] * len(parts)
    weights = []
    for half in (0, 1):
        top, total, scaled = _weigh(parts, offsets, half)
        some = total.above(real(0.0))
        inverse = lanes.select(some, real(unit) / total, real(0.0))
        weights.append([x * inverse for x in scaled])
        store_reals(lse, (g + 8 * half) << 2, [(top + lanes.log2(total)) * real(_LN2)])
    for i in range(max(1, tiles // 4)):
        tile = rank * tiles + lanes.warp() + 4 * i
        at = tile * 512 + lanes.lane() * 16 + _OWN
        values = _weighted(parts, [at] * len(parts), weights)
        for half in (0, 1):
            for n in (0, 1):
                place = (g + 8 * half) * 256 + (t * 2 + n) * 32 + (tile << 1)
                lanes.store_bf16(out, place, values[2 * half + n])


def _weigh(parts: list[Any], offsets: list[int], half: int) -> tuple[Real, Real, list[Real]]:
    """(top, total, factor of each part) of this lane's row g + 8 half."""
    at = ((lanes.lane() >> 2) << 2) + (_ROWS + 32 * half)
    tops = [load_reals(part, at + o, 1)[0] for part, o in zip(parts, offsets, strict=True)]
    totals = [load_reals(part, at + (o + 64), 1)[0] for part, o in zip(parts, offsets, strict=True)]
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


def _weighted(parts: list[Any], places: list[Word], weights: list[list[Real]]) -> list[Real]:
    """The weighted sum of one 16-byte piece of each part: two values of row g, two of g + 8."""
    sums = [real(0.0)] * 4
    for i, (part, at) in enumerate(zip(parts, places, strict=True)):
        values = load_reals(part, at, 4)
        sums = [
            x + y * weights[j // 2][i] for j, (x, y) in enumerate(zip(sums, values, strict=True))
        ]
    return sums
