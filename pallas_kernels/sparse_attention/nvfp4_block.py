"""An NVFP4 page as float16 operands of wgmma: for kernels that use a page for many queries.

128 threads decode a page once, a token each, into shared memory. Within a row, the chunk of 8
columns c = 4 w + i holds, for t = 0..3, the dimensions 32 t + 8 w + i and + 4: what `code_pairs` and
16-byte loads give without moving a bit. Queries come in the same order (`queries`), results leave in
it (`store_rows`).

    codes    128-byte lines of two tokens, swizzled by the copy engine (16-byte piece p of line l at
             p ^ (l % 8))
    keys     float16 [2, 128 tokens, 64], values float16 [128 tokens, 128]; both in 8 x 64 tiles with
             the 128-byte swizzle

Decoded values are the true ones divided by `nvfp4_lanes.DECODED`, exact.
"""

from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import Real, Word, load_words, multiply_half2
from pallas_kernels.nvfp4_lanes import code_pairs, scale_pairs

_HALF = 16384  # bytes of [128 tokens, 64]
_ROW_BYTES = 256  # of 128 bfloat16 or float16


def decode_keys(codes: Any, scales: Any, to: Any) -> None:
    """This thread's token of a page of keys."""
    token = lanes.thread()
    _decode_row(codes, scales, token, to, token << 7, _HALF)


def decode_values(codes: Any, scales: Any, to: Any, limit: Word) -> None:
    """This thread's token of a page of values; tokens from `limit` on become zeros, since a weight
    of zero would not hide a NaN.
    """
    token = lanes.thread()
    at = ((token >> 3) << 11) + ((token & 7) << 7)
    _decode_row(codes, scales, token, to, at, 1024, limit)


def queries(row: Any) -> tuple[list[list[Word]], list[list[Word]]]:
    """The A fragments of 16 bfloat16 rows at a pointer of this warp, of columns 0-63 and 64-127."""
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    tiles = []
    for w in range(4):
        pairs = []
        for head in (g, g + 8):
            words = load_words(row, head * _ROW_BYTES + (t << 6) + 16 * w, 4)
            x = [half for pair in words for half in _reals_of_bf16(pair)]
            pairs.append([lanes.half2_of_reals(x[i], x[i + 4]) for i in range(4)])
        tiles += [[pairs[0][i], pairs[1][i]] for i in range(4)]
    return tiles[:8], tiles[8:]


def store_rows(tiles: list[list[Real]], factors: list[Real], row: Any, pack: Any) -> None:
    """16 rows of 128 values, times one factor for row g and g + 8, to 16-bit rows at a pointer of
    this warp; `pack(low, high)` rounds two values into a word.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    for half, factor in enumerate(factors):
        for w in range(4):
            chunks = [tiles[4 * w + i][2 * half : 2 * half + 2] for i in range(4)]
            x = [chunks[i % 4][i // 4] * factor for i in range(8)]  # dimensions 32 t + 8 w + i
            words = [pack(x[i], x[i + 1]) for i in range(0, 8, 2)]
            at = (g + 8 * half) * _ROW_BYTES + (t << 6) + 16 * w
            lanes.store_words(row, at, words)


def hide(tiles: list[list[Real]], left: Word) -> list[list[Real]]:
    """-inf in place of the columns from `left` on (of all 16 rows of this warp)."""
    own = left + (lanes.lane() & 3) * -2
    nothing = lanes.real(float("-inf"))
    return [
        [
            lanes.select(lanes.word(8 * j + i % 2).below(own), value, nothing)
            for i, value in enumerate(values)
        ]
        for j, values in enumerate(tiles)
    ]


def _decode_row(
    codes: Any, scales: Any, token: Word, to: Any, at: Word, half: int, limit: Word | None = None
) -> None:
    """One token's 64 bytes -> 16 chunks of 16 bytes: 8 from `at`, 8 from `at + half`."""
    line = token >> 1
    raw = []
    for t in range(4):
        piece = (((token & 1) << 2) + t) ^ (line & 7)
        raw.append(load_words(codes, (line << 7) + (piece << 4), 4))
    both = load_words(scales, token << 3, 2)
    if limit is not None:
        seen = token.below(limit)
        both = [lanes.select(seen, x, lanes.word(0)) for x in both]
    steps = [step for x in both for step in (*scale_pairs(x & 0xFFFF), *scale_pairs(x >> 16))]
    for w in range(4):
        pieces = [
            [multiply_half2(x, steps[2 * t + w // 2]) for x in code_pairs(raw[t][w])]
            for t in range(4)
        ]
        for i in range(4):
            chunk = 4 * w + i
            place = at + half * (chunk // 8) + (((token & 7) ^ (chunk % 8)) << 4)
            lanes.store_words(to, place, [pieces[t][i] for t in range(4)])


def _reals_of_bf16(pair: Word) -> list[Real]:
    return [lanes.real_of_bits(pair << 16), lanes.real_of_bits(pair & 0xFFFF0000)]
