"""What the lanes of `products` do: pages become register operands, rows are laid out to match, sums
become activations and outputs.

A lane (g, t) = (lane / 4, lane % 4) of warp w has the row 8 w + g of two pages, 32 columns from
32 t of each (`layouts.nvfp4_pages`). Decoded these are rows g and g + 8 of the A operand of wgmma:
pair j of the 16 is columns 8 j + 2 t and the next one. The contraction's order is free, so rows of
x are permuted to match: of 128 columns, 32 t + 2 j + e lies at 8 j + 2 t + e (`matching_rows`).
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, nvfp4_lanes
from pallas_kernels.grouped_matmul.activation import Activation
from pallas_kernels.grouped_matmul.matching_rows import SLAB
from pallas_kernels.lanes import REF, SCALAR, Real, Word
from pallas_kernels.layouts.nvfp4_pages import CODE_BYTES, LINE, LINES, PLACES
from pallas_kernels.logarithms import LOG2E

PAGE_BYTES = LINES * LINE
DECODED = nvfp4_lanes.DECODED  # a true value divided by a decoded one, in both dtypes

_WGMMA = plgpu.Layout.WGMMA
_LOWEST = {jnp.dtype(jnp.bfloat16): 6, jnp.dtype(jnp.float16): 9}  # bit of a code's rest


def decoded(page: int, first: Any, second: Any, dtype: Any) -> Any:
    """Page `page` of some pages of either reference as two A operands (64, 64): rows of `first`
    and of `second` take turns by 8.
    """
    dtype = jnp.dtype(dtype)
    operand = plgpu.ShapeDtypeStruct((64, SLAB), dtype, layout=_WGMMA)

    @lanes.code(REF, REF, returns=(operand, operand))
    def decode(_, *pages):
        rows = [_decoded_row(lanes.address(one, page * PAGE_BYTES), dtype) for one in pages]
        columns = [list(pair) for pair in zip(*rows, strict=True)]
        operand_of = lanes.bf16_accumulator if dtype == jnp.bfloat16 else lanes.half_accumulator
        return operand_of(columns[:8]), operand_of(columns[8:])

    return decode(first, second)


def _decoded_row(page: Any, dtype: Any) -> list[Word]:
    """This lane's 16 pairs of a page, each value / `DECODED`."""
    place = (lanes.warp() << 5) + lanes.lane()
    words = lanes.load_words(page, place << 4, 4)
    scales = scale_pairs(lanes.load_bits(page, (place << 1) + CODE_BYTES, 16), dtype)
    multiply = lanes.multiply_bf16 if dtype == jnp.bfloat16 else lanes.multiply_half2
    return [
        multiply(pair, scales[i // 2])
        for i, one in enumerate(words)
        for pair in code_pairs(one, dtype)
    ]


def code_pairs(codes: Word, dtype: Any) -> list[Word]:
    """Eight codes -> their pairs, each value * 2^-126 (bfloat16) or 2^-14 (float16)."""
    lowest = _LOWEST[jnp.dtype(dtype)]
    sign, rest = 0x80008000, (7 << lowest) * 0x10001
    pairs = []
    for sign_at, rest_at in PLACES:
        up, along = 15 - sign_at, lowest - rest_at
        if up == along:
            pairs.append((codes << up) & (sign | rest))
        elif along > 0:  # one product is both shifts: no two of its bits meet
            own = (1 << sign_at | 7 << rest_at) * 0x10001
            pairs.append(((codes & own) * (1 << up | 1 << along)) & (sign | rest))
        else:
            pairs.append(((codes << up) & sign) | ((codes << along) & rest))
    return pairs


def scale_pairs(scales: Word, dtype: Any) -> list[Word]:
    """Two E4M3 bytes (the low half), none of them NaN -> each one twice, times 2^119 (bfloat16) or
    2^7 (float16).
    """
    if jnp.dtype(dtype) == jnp.float16:
        return nvfp4_lanes.scale_pairs(scales)
    both = lanes.permute_bytes(scales, lanes.word(0), 0x4140) << 4  # times 2^-120
    both = lanes.multiply_bf16(both, lanes.word(0x7F007F00))  # 2^127
    both = lanes.multiply_bf16(both, lanes.word(0x77807780))  # 2^112
    return [lanes.permute_bytes(both, both, selector) for selector in (0x1010, 0x3232)]


def store_activations(
    shape: tuple[int, ...],
    dtype: Any,
    activation: Activation,
    rounded: bool = False,
    divide: tuple[bool, bool] = (False, False),
) -> Any:
    """Stores the activations of one page of features, gate in the first rows of the sums and up in
    the second, as `matching_rows` has them: out [slabs, S, 64]. Column n of the sums is the row at
    place `first` + n, if `start` <= n < `end`. Gate and up are first rounded as well, if `rounded`;
    `divide` says of which of them the outer scale divides.
    """
    _, places, _ = shape

    @lanes.code(_WGMMA, REF, *[SCALAR] * 6)
    def store(_, sums, out, page, first, start, end, gate_scale, up_scale):
        page, first = lanes.scalar(page), lanes.scalar(first)
        scales = [_factor(*one) for one in zip((gate_scale, up_scale), divide, strict=True)]
        g, w = lanes.lane() >> 2, lanes.warp()
        slab = ((page >> 2) << 1) + (w >> 1)  # row 8 w + g is element e = g % 2 of pair 4 w + g / 2
        word = ((((w & 1) << 2) + (g >> 1)) << 2) + (page & 3)
        to = lanes.address(out, (slab * places + first << 7) + (word << 2))
        for i, tile in enumerate(lanes.tiles_of(sums)):
            gates, ups = [x * scales[0] for x in tile[:2]], [x * scales[1] for x in tile[2:]]
            if rounded:
                gates, ups = (_rounded(*pair, jnp.dtype(dtype)) for pair in (gates, ups))
            values = [_activated(*both, activation) for both in zip(gates, ups, strict=True)]
            _store_pair(to, SLAB, 8 * i, values, (lanes.scalar(start), lanes.scalar(end)), dtype)

    return store


def store_outputs(shape: tuple[int, ...], dtype: Any, divides: bool = False) -> Any:
    """Stores the sums of two pages of outputs: out [S, D]; columns as in `store_activations`."""
    _, width = shape
    size = jnp.dtype(dtype).itemsize

    @lanes.code(_WGMMA, REF, *[SCALAR] * 6)
    def store(_, sums, out, page, first, start, end, scale, apart):
        column = (lanes.scalar(page) << 5) + (lanes.warp() << 3) + ((lanes.lane() >> 2) & 6)
        to = lanes.address(out, (lanes.scalar(first) * width + column) * size)
        to = to, lanes.at(to, lanes.scalar(apart) * (32 * size))
        scale = _factor(scale, divides)
        for i, tile in enumerate(lanes.tiles_of(sums)):
            for half in (0, 1):
                values = [x * scale for x in tile[2 * half : 2 * half + 2]]
                kept = lanes.scalar(start), lanes.scalar(end)
                _store_pair(to[half], width, 8 * i, values, kept, dtype)

    return store


def _factor(scale: Any, divides: bool) -> Real:
    """What sums of decoded values are multiplied with, of the bits of an outer scale."""
    outer = lanes.real_of_bits(lanes.scalar(scale))
    return (lanes.real(1.0) / outer if divides else outer) * lanes.real(DECODED)


def _activated(gate: Real, up: Real, activation: Activation) -> Real:
    limit = lanes.real(activation.limit)
    gate = lanes.minimum(gate, limit)
    up = lanes.maximum(lanes.minimum(up, limit), lanes.real(-activation.limit))
    decay = lanes.exp2(gate * lanes.real(-activation.alpha * LOG2E))
    return gate * (up + lanes.real(activation.beta)) / (decay + lanes.real(1.0))


def _store_pair(
    to: Any, width: int, token: int, values: list[Real], kept: tuple[Word, Word], dtype: Any
) -> None:
    """A row's values of tokens 2 t and 2 t + 1 after `token`, whose rows are `width` elements
    apart: lanes of an even row and of the next one swap, so that each has both rows of one token,
    which are neighbours, and stores them at once.
    """
    odd = (lanes.lane() >> 2) & 1
    is_odd = odd.equals(1)
    got = lanes.shuffle_xor(lanes.select(is_odd, values[0], values[1]), 4)
    low, high = lanes.select(is_odd, got, values[0]), lanes.select(is_odd, values[1], got)
    words = _words_of(low, high, jnp.dtype(dtype))
    mine = ((lanes.lane() & 3) << 1) + odd + token
    at = mine * (width * jnp.dtype(dtype).itemsize)
    start, end = kept
    inside = lanes.both(mine.below(end), lanes.negate(mine.below(start)))
    lanes.when(inside, lambda: lanes.store_words(to, at, words))


def _rounded(low: Real, high: Real, dtype: Any) -> list[Real]:
    (pair,) = _words_of(low, high, dtype)
    return lanes.reals_of_pair(pair, dtype == jnp.float16)


def _words_of(low: Real, high: Real, dtype: Any) -> list[Word]:
    if dtype == jnp.float32:
        return [lanes.bits_of_real(low), lanes.bits_of_real(high)]
    pack = lanes.bf16_of_reals if dtype == jnp.bfloat16 else lanes.half2_of_reals
    return [pack(low, high)]
