"""One warp and 32 tokens of an NVFP4 page: scores of 16 query heads, and their weighted values.

The warp reads codes from shared memory and decodes them in registers, where they already are the
fragments of `mma.m16n8k16`: nothing is converted through memory. Both products choose their own
order of tokens and dimensions, so that every lane reads whole 8- or 16-byte pieces of a row:

    lane (g, t) = (lane / 4, lane % 4) of warp w; its tokens are 32 w + 16 s + j, s = 0, 1
    scores   column 16 s + 8 r + c is token j = 4 (c / 2) + c % 2 + 2 r; a lane decodes the row of
             c = g: 32 dimensions from 32 t. Dimensions 8 c .. 8 c + 7 meet as (0,4) (1,5) (2,6)
             (3,7), the order in which `code_pairs` gives them.
    values   a lane decodes its tokens 4 t .. 4 t + 3, dimensions 16 g .. 16 g + 15: output column
             8 j + g is dimension 16 g + j.

Codes lie as the pool has them, 128-byte lines of two tokens, with the 128-byte swizzle of the copy
engine (16-byte piece p of line l at p ^ (l % 8)): no two lanes of a load then share a bank.

Decoded values are the true ones divided by `nvfp4_lanes.DECODED`, exact.
"""

from typing import Any

from pallas_kernels import lanes
from pallas_kernels.lanes import Real, Word, load_bits, load_words, multiply_half2, word
from pallas_kernels.nvfp4_lanes import code_pairs, scale_pair, scale_pairs

_BLOCK = 128


def query_fragments(q: Any, row_bytes: int, to: Any) -> None:
    """Writes 16 query rows (bfloat16, `row_bytes` apart) as float16 A fragments: [4][32 lanes][8
    words] in shared memory. Warp w writes those of dimensions 32 t + 8 w + (0..7).
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    rows = []
    for head in (g, g + 8):
        at = head * row_bytes + t * 64 + lanes.warp() * 16
        values = [x for pair in load_words(q, at, 4) for x in _reals_of_bf16(pair)]
        rows.append([lanes.half2_of_reals(values[i], values[i + 4]) for i in range(4)])
    words = [rows[half][i] for i in range(4) for half in (0, 1)]
    at = lanes.warp() * 1024 + lanes.lane() * 16
    lanes.store_words(to, at, words[:4])
    lanes.store_words(to, at + 512, words[4:])


def scores(q: Any, codes: Any, scales: Any, limit: Word) -> Any:
    """float32 (64, 32) in `Layout.WGMMA`: per warp, q · k / 128 of its 16 heads and its 32 tokens;
    -inf for tokens from `limit` on.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    token = _first_token() + ((g >> 1) << 2) + (g & 1)
    line = token >> 1  # an even one: the next one's pieces are swizzled by one more bit
    piece = (((g & 1) << 2) + t) ^ (line & 7)
    even = (line << 7) + (piece << 4)
    rows = even, (even ^ 16) + 128  # of columns 0 and 1; two more columns are 16 tokens further on
    raw, steps = [], []
    for column in range(4):
        raw.append(load_words(codes, rows[column % 2] + 1024 * (column // 2), 4))
        at = (token << 3) + (t << 1) + (128 * (column // 2) + 16 * (column % 2))
        steps.append(scale_pairs(load_bits(scales, at, 16)))
    sums = [[lanes.real(0.0)] * 4 for _ in range(4)]
    for part in range(4):
        at = lanes.lane() * 16 + 1024 * part
        a = (load_words(q, at, 4), load_words(q, at + 512, 4))
        for column in range(4):
            halves = code_pairs(raw[column][part])
            b = [multiply_half2(x, steps[column][part // 2]) for x in halves]
            sums[column] = lanes.multiply_tile(sums[column], a[0], b[:2])
            sums[column] = lanes.multiply_tile(sums[column], a[1], b[2:])
    flat = [x for values in sums for x in values]
    flat = lanes.branch(limit.below(_BLOCK), lambda: _hide(sums, limit), flat)
    return lanes.array_of([flat[i : i + 4] for i in range(0, len(flat), 4)])


def add_values(sums: Any, weights: Any, codes: Any, scales: Any, limit: Word) -> Any:
    """`sums` (64, 128) plus weights (float16, (64, 32), as `scores` has its columns) times v / 128.

    Tokens from `limit` on are read as zeros, since a weight of zero would not hide a NaN.
    """
    g, t = lanes.lane() >> 2, lanes.lane() & 3
    p, out = lanes.half_fragments(weights), lanes.tiles_of(sums)
    token = _first_token() + (t << 2)
    line = token >> 1
    start = (line << 7) + (((g >> 1) ^ (line & 7)) << 4) + ((g & 1) << 3)
    rows = [(start ^ (64 * (j % 2) + 16 * (j // 2))) + 128 * (j // 2) for j in range(4)]
    for step in range(2):
        first = token + 16 * step
        raw = [load_words(codes, row + 1024 * step, 2) for row in rows]
        at = (token << 3) + g
        bits = [load_bits(scales, at + (128 * step + 8 * j), 8) for j in range(4)]
        steps = [scale_pair(bits[j] | (bits[j + 1] << 8)) for j in (0, 2)]
        steps = _seen(steps, first, limit)
        a = [*p[2 * step], *p[2 * step + 1]]
        for quarter in range(4):  # 4 dimensions of the 16
            selector = 0x7632 if quarter % 2 else 0x5410
            halves = []
            for pair in (0, 1):
                x, y = (raw[2 * pair + j][quarter // 2] for j in (0, 1))
                decoded = code_pairs(lanes.permute_bytes(x, y, selector))
                halves.append([multiply_half2(h, steps[pair]) for h in decoded])
            for k in range(4):
                tile = 4 * quarter + k
                out[tile] = lanes.multiply_tile(out[tile], a, [halves[0][k], halves[1][k]])
    return lanes.array_of(out)


def _first_token() -> Word:
    """Of this warp; as the compiler keeps it through a loop."""
    return lanes.thread() & 96


def _seen(steps: list[Word], first: Word, limit: Word) -> list[Word]:
    """Zeros in place of the scales, two a word, of tokens from `limit` on; nothing is done where a
    page is seen to its end.
    """

    def hidden() -> list[Real]:
        found = []
        for i, step in enumerate(steps):
            low, high = ((first + 2 * i + j).below(limit) for j in (0, 1))
            low = lanes.select(low, word(0xFFFF), word(0))
            found.append(step & (low | lanes.select(high, word(0xFFFF0000), word(0))))
        return [lanes.real_of_bits(x) for x in found]

    same = [lanes.real_of_bits(step) for step in steps]
    return [lanes.bits_of_real(x) for x in lanes.branch(limit.below(_BLOCK), hidden, same)]


def _hide(sums: list[list[Real]], limit: Word) -> list[Real]:
    """-inf in place of scores from `limit` on."""
    t = lanes.lane() & 3
    left = limit + (_first_token() * -1 + t * -4)  # tokens seen from this lane's first on
    hidden = lanes.real(float("-inf"))
    out = []
    for column, values in enumerate(sums):
        for i, value in enumerate(values):
            token = 16 * (column // 2) + 2 * (column % 2) + i % 2
            out.append(lanes.select(word(token).below(left), value, hidden))
    return out


def _reals_of_bf16(pair: Word) -> list[Real]:
    return [lanes.real_of_bits(pair << 16), lanes.real_of_bits(pair & 0xFFFF0000)]
