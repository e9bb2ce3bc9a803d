"""FP8 and BF16 rows as float16 operands of wgmma (`half_block`): a token in each of 128 threads.

Pages lie as 128-byte lines (one token of FP8, half a token of BF16), swizzled by the copy engine
(16-byte piece p of line l at p ^ (l % 8)). FP8 is exact in float16; BF16 is rounded to it: 3 more
bits of fraction, but nothing beyond 65,504.
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels import lanes
from pallas_kernels.half_block import NEIGHBOURS, reals_of_bf16
from pallas_kernels.lanes import Word, half2_of_e4m3, load_words

ORDER = NEIGHBOURS
Keep = Callable[[Word], Word]  # a word of a row as it is stored, or zero
Piece = Callable[[int, Keep], list[Word]]  # w -> the 16 half2 of dimensions 32 w .. 32 w + 31
Place = Callable[[Word, int], Word]


def page_row(codes: Any, fmt: str) -> Piece:
    """This thread's token of a page in shared memory."""
    read = {"fp8": _fp8_piece, "bf16": _bf16_piece}[fmt]
    return lambda w, keep: read(codes, lanes.thread(), w, keep)


def plain_row(row: Any) -> Piece:
    """A bfloat16 row of 128 values at a pointer of this thread."""

    def piece(w: int, keep: Keep) -> list[Word]:
        words = [keep(x) for i in range(4) for x in load_words(row, 64 * w + 16 * i, 4)]
        return [lanes.half2_of_reals(*reals_of_bf16(x)) for x in words]

    return piece


def write_row(piece: Piece, to: Any, place: Place, limit: Word) -> None:
    """This thread's token as an operand; zeros from token `limit` on, since a weight of zero would
    not hide a NaN.
    """
    token = lanes.thread()
    seen = token.below(limit)
    for w in range(4):
        pairs = piece(w, lambda x: lanes.select(seen, x, lanes.word(0)))
        for i in range(4):
            lanes.store_words(to, place(token, 4 * w + i), pairs[i::4])


def _fp8_piece(codes: Any, token: Word, w: int, keep: Keep) -> list[Word]:
    words = [
        keep(x)
        for piece in (2 * w, 2 * w + 1)
        for x in load_words(codes, (token << 7) + (((token & 7) ^ piece) << 4), 4)
    ]
    return [half2_of_e4m3(x >> shift) for x in words for shift in (0, 16)]


def _bf16_piece(codes: Any, token: Word, w: int, keep: Keep) -> list[Word]:
    line = (token << 1) + w // 2
    words = [
        keep(x)
        for piece in range(4 * (w % 2), 4 * (w % 2) + 4)
        for x in load_words(codes, (line << 7) + (((line & 7) ^ piece) << 4), 4)
    ]
    return [lanes.half2_of_reals(*reals_of_bf16(x)) for x in words]


def own_row(rows: Any, first: Word, stride: int, count: int) -> Piece:
    """Token i < `count` of a block whose rows lie `stride` bytes apart from byte `first` on; the
    last one in the threads behind.
    """
    token = lanes.thread()
    token = lanes.select(token.below(count), token, lanes.word(count - 1))
    return plain_row(lanes.address(rows, first + token * stride))
