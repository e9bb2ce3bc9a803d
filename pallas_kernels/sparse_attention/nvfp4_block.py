"""An NVFP4 page as float16 operands of wgmma (`half_block`): a token in each of 128 threads.

The page's codes lie as 128-byte lines of two tokens, swizzled by the copy engine (16-byte piece p
of line l at p ^ (l % 8)): a thread's 64 bytes are four loads without a bank conflict, its eight
scales one. Decoded values are the true ones divided by `nvfp4_lanes.DECODED`, exact.
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels import half_block, lanes
from pallas_kernels.half_block import Order
from pallas_kernels.lanes import Word, load_words, multiply_half2
from pallas_kernels.nvfp4_lanes import code_pairs, scale_pairs

ORDER: Order = ((0, 4), (1, 5), (2, 6), (3, 7))  # what `code_pairs` gives without moving a bit


def decode_keys(codes: Any, scales: Any, to: Any) -> None:
    """This thread's token of a page of keys."""
    _decode_row(codes, scales, to, half_block.place_key)


def decode_values(codes: Any, scales: Any, to: Any, limit: Word) -> None:
    """This thread's token of a page of values; tokens from `limit` on become zeros, since a weight
    of zero would not hide a NaN.
    """
    _decode_row(codes, scales, to, half_block.place_value, limit)


def _decode_row(
    codes: Any,
    scales: Any,
    to: Any,
    place: Callable[[Word, int], Word],
    limit: Word | None = None,
) -> None:
    token = lanes.thread()
    line = token >> 1
    both = load_words(scales, token << 3, 2)
    if limit is not None:
        seen = token.below(limit)
        both = [lanes.select(seen, x, lanes.word(0)) for x in both]
    steps = [step for x in both for step in (*scale_pairs(x & 0xFFFF), *scale_pairs(x >> 16))]
    for w in range(4):
        piece = (((token & 1) << 2) + w) ^ (line & 7)
        raw = load_words(codes, (line << 7) + (piece << 4), 4)
        pieces = [
            [multiply_half2(x, steps[2 * w + t // 2]) for x in code_pairs(raw[t])] for t in range(4)
        ]
        for i in range(4):
            lanes.store_words(to, place(token, 4 * w + i), [pieces[t][i] for t in range(4)])
