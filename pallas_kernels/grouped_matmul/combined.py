"""Outputs of the experts, weighted and added per token.

Grid: a program of one warpgroup takes 1,024 columns of a token, 8 a lane, and adds the rows of its
choices in their order, in float32.

Memory: a row of y a choice, read once; one written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.lanes import REF, SCALAR, Real, Word

_PIECE = 8  # columns of a lane
_COLUMNS = 128 * _PIECE


def combined(
    y: Float[Array, "S D"],
    place: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    shared: int | None = None,
) -> Float[Array, "T D"]:
    """sum_x weights[t, x] y[place[t, x]]; places that y does not have add nothing. To the rounded
    sum comes y[shared + t], where there is one.
    """
    assert y.dtype.itemsize == 2 and y.shape[1] % _PIECE == 0
    (T, X), D = place.shape, y.shape[1]
    kernel = plgpu.kernel(
        functools.partial(_program, X, shared),
        out_type=jax.ShapeDtypeStruct((T, D), y.dtype),
        grid=(T, -(-D // _COLUMNS)),
        grid_names=("token", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(y, place.astype(jnp.int32), weights.astype(jnp.float32))


def _program(choices: int, shared: int | None, y: Any, place: Any, weights: Any, out: Any) -> None:
    places, width = y.shape
    halves = y.dtype == jnp.float16

    @lanes.code(REF, REF, REF, REF, SCALAR, SCALAR)
    def add(_, y, place, weights, out, token, part):
        token = lanes.scalar(token)
        column = lanes.scalar(part) * _COLUMNS + (lanes.thread() << 3)
        places_at, weights_at = (lanes.address(x, token * (4 * choices)) for x in (place, weights))

        def run():
            rows = []
            for k in range(choices):
                (at,) = lanes.load_words(places_at, 4 * k, 1)
                (factor,) = lanes.load_reals(weights_at, 4 * k, 1)
                here = at.below(places)
                row = lanes.select(here, at, lanes.word(0))
                words = lanes.load_words(lanes.address(y), (row * width + column) << 1, 4)
                rows.append((here, factor, words))
            words = _total(rows, halves)
            if shared is not None:
                at = (token + shared) * width + column
                more = lanes.load_words(lanes.address(y), at << 1, 4)
                words = [_sum(*pair, halves) for pair in zip(words, more, strict=True)]
            lanes.store_words(lanes.address(out, (token * width + column) << 1), 0, words)

        lanes.when(column.below(width), run)

    add(y, place, weights, out, lax.axis_index("token"), lax.axis_index("part"))


def _total(rows: list, halves: bool) -> list[Word]:
    """The weighted sum of rows (whether it counts, weight, four words)."""
    totals = [lanes.real(0.0)] * _PIECE
    for here, factor, words in rows:
        values = [x for one in words for x in lanes.reals_of_pair(one, halves)]
        totals = [
            total + lanes.select(here, value * factor, lanes.real(0.0))
            for total, value in zip(totals, values, strict=True)
        ]
    return [_pack(totals[2 * i], totals[2 * i + 1], halves) for i in range(_PIECE // 2)]


def _sum(a: Word, b: Word, halves: bool) -> Word:
    low, high = (
        x + y
        for x, y in zip(lanes.reals_of_pair(a, halves), lanes.reals_of_pair(b, halves), strict=True)
    )
    return _pack(low, high, halves)


def _pack(low: Real, high: Real, halves: bool) -> Word:
    return lanes.half2_of_reals(low, high) if halves else lanes.bf16_of_reals(low, high)
