"""What the lanes of `few_rows` do: weight tiles become operands, rows are laid out to match them.

A lane (g, t) = (lane / 4, lane % 4) of warp w reads 32 bytes of weight rows 16 w + g and 8 further:
the group 32 t .. 32 t + 31 of a chunk of 128, and its exponent. Decoded, they are the A operand of
64 weight rows; the contraction's order is free, so the rows of x are permuted, not the weights:
pair q of the lane is operand q / 8, columns 8 (q % 8) + 2 t and the next one. (The same order as
that of the experts' pages, whose kernel multiplies with a shared expert in MXFP8 as well.)
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, mxfp8_lanes
from pallas_kernels.lanes import REF, SCALAR, Word

TILE, STEP, CHUNK = 64, 256, 128  # weight rows; columns of a copy, and of one decoded piece
GROUP, SLAB = 32, 64
_WARPS = 4  # of a team
_WGMMA = plgpu.Layout.WGMMA
CODES = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(128))
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_PIECE = 8  # elements of a row that a thread moves at once
_TOGETHER = 8  # how many of them it loads before it stores the first


def load_rows(rows: int, columns: int, width: int, teams: int) -> Callable:
    """Copies columns `first` .. `first + width` of x [rows, columns] to [width / 64, N, 64],
    permuted and swizzled, in all warps of the block together. Operand rows that x does not have get
    its last one; their products are stored nowhere.

    A warp moves 16 bytes of each of 8 rows in each of the four groups of a chunk at a time, so that
    its stores meet every bank once.
    """
    eighths, blocks = width // (4 * _PIECE), -(-rows // 8)
    pieces, warps = eighths * blocks, teams * _WARPS

    @lanes.code(REF, plgpu.RefType(OPERAND), SCALAR, SCALAR)
    def load(_, x, to, first, team):
        source, target = lanes.address(x), lanes.address(to)
        warp = lanes.warp() + lanes.scalar(team) * _WARPS
        group = lanes.lane() & 3
        starts = list(range(0, pieces, warps))
        for some in range(0, len(starts), _TOGETHER):
            moved = []
            for start in starts[some : some + _TOGETHER]:
                piece = _at_most(warp + start, pieces - 1)
                block = piece // eighths
                eighth = piece + block * -eighths
                row = (block << 3) + (lanes.lane() >> 2)
                column = ((eighth >> 2) << 7) + (group << 5) + ((eighth & 3) << 3)
                at = _at_most(row, rows - 1) * columns + lanes.scalar(first) + column
                moved.append((row, eighth, lanes.load_words(source, at << 1, 4)))
            for row, eighth, words in moved:
                _store_piece(target, 8 * blocks, row, eighth, group, words)

    return load


def _at_most(x: Word, bound: int) -> Word:
    return lanes.select(x.below(bound), x, lanes.word(bound))


def _store_piece(
    to: Any, padded: int, row: Word, eighth: Word, group: Word, words: list[Word]
) -> None:
    """Eight elements, as four pairs."""
    operand = ((eighth >> 2) << 1) + ((eighth >> 1) & 1)
    at = operand * (padded * 128) + (row << 7) + (group << 2)
    for i, pair in enumerate(words):
        piece = (((eighth & 1) << 2) + i) ^ (row & 7)
        lanes.store_words(to, at + (piece << 4), [pair])


def decoded(chunk: int, codes: Any, exponents: Any, place: Any) -> Any:
    """A chunk of a step's codes [64, 128 a chunk], swizzled, which is chunk `place` of its tile,
    with the exponents [64, ...] of the tile: two A operands (64, 64).
    """
    operand = plgpu.ShapeDtypeStruct((TILE, 64), jnp.bfloat16, layout=_WGMMA)
    stride, row_bytes = exponents.shape[1], 8 * codes.shape[1]

    @lanes.code(plgpu.RefType(CODES), REF, SCALAR, returns=(operand, operand))
    def decode(_, codes, exponents, place):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        base, powers = lanes.address(codes), lanes.address(exponents)
        rows = []
        for eight in (0, 1):
            row = (lanes.warp() << 4) + (g + 8 * eight)
            group = (lanes.scalar(place) << 2) + t
            factor = mxfp8_lanes.factor_pair(lanes.load_bits(powers, row * stride + group, 8))
            tile = ((lanes.warp() << 1) + eight) * row_bytes + 8 * CHUNK * chunk
            words = []
            for piece in (0, 1):
                at = tile + (g << 7) + ((((t << 1) + piece) ^ g) << 4)
                words += lanes.load_words(base, at, 4)
            rows.append([pair for one in words for pair in mxfp8_lanes.value_pairs(one, factor)])
        columns = [list(pair) for pair in zip(*rows, strict=True)]
        return lanes.bf16_accumulator(columns[:8]), lanes.bf16_accumulator(columns[8:])

    return decode(codes, exponents, place)


def store_sums(sums: Any, out: Any, part: Any, first: Any, first_row: Any) -> None:
    """A tile's sums [64, N], of part `part` of the columns, to out [parts, M, F] from weight row
    `first` and row `first_row` on.
    """
    _, rows, width = out.shape

    @lanes.code(_WGMMA, REF, *[SCALAR] * 3)
    def store(_, sums, out, part, first, first_row):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        to, scale = lanes.address(out), lanes.real(mxfp8_lanes.DECODED)
        feature = lanes.scalar(first) + (lanes.warp() << 4) + g
        for i, tile in enumerate(lanes.tiles_of(sums)):
            for at, value in enumerate(tile):
                row = lanes.scalar(first_row) + (t << 1) + (8 * i + at % 2)
                column = feature + 8 * (at // 2)
                place = ((lanes.scalar(part) * rows + row) * width + column) << 2

                def write(place=place, value=value):
                    lanes.store_reals(to, place, [value * scale])

                lanes.when(lanes.both(row.below(rows), column.below(width)), write)

    store(sums, out, part, first, first_row)
