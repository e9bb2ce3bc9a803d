"""Partial results of a query, one a slot, become one (`merge_slots` of `pairs`): by a kernel of its
own, at the rate of a copy, or by the end of another one (`finish`).

Grid: a warpgroup for each query and KV head. A thread has 8 dimensions of head h and of head h + 8,
16 bytes of either in every slot, and adds up the slots in their own order.

Memory: 4 KB a slot read, 4 KB of results written.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import lanes
from pallas_kernels.lanes import REF, SCALAR, Real, Word

_HEADS, _WIDTH = 16, 128
_CHUNK = 8  # dimensions of a thread
_RESULT_BYTES = _HEADS * _WIDTH * 2
_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453
_Halves = list[list]  # of a thread's two heads: each slot's


def merge(
    out: Float[Array, "B T K C G H"], lse: Float[Array, "B T K C G"]
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K G"]]:
    """The results in bfloat16 and their log-sum-exp; slots with a log-sum-exp of -inf hold
    anything.
    """
    *queries, _, G, H = out.shape
    kernel = plgpu.kernel(
        lanes.named("merge_slots", _program),
        out_type=(
            jax.ShapeDtypeStruct((*queries, G, H), jnp.bfloat16),
            jax.ShapeDtypeStruct((*queries, G), jnp.float32),
        ),
        grid=(queries[0] * queries[1] * queries[2],),
        grid_names=("query",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(out, lse)


def _program(parts, part_lse, out, lse):
    slots = parts.shape[3]

    @lanes.code(*[REF] * 4, SCALAR)
    def run(_, parts, part_lse, out, lse, query):
        number = lanes.scalar(query)
        tops = load_tops(part_lse, number, slots)
        merge_query(load_parts(parts, number, slots), tops, number, out, lse)

    run(parts, part_lse, out, lse, lax.axis_index("query"))


def load_parts(parts: Any, number: Word, slots: int) -> _Halves:
    """This thread's words of the `number`-th query and KV head: of two heads, each slot's."""
    source = lanes.element(lanes.address(parts), number, slots * _RESULT_BYTES)
    return [
        [lanes.load_words(source, _place(half) + slot * _RESULT_BYTES, 4) for slot in range(slots)]
        for half in (0, 1)
    ]


def load_tops(part_lse: Any, number: Word, slots: int) -> _Halves:
    """The log-sum-exps that belong to them, as words."""
    source = lanes.element(lanes.address(part_lse), number, slots * _HEADS * 4)
    return [
        [
            lanes.load_words(source, (_head(half) << 2) + slot * (_HEADS * 4), 1)[0]
            for slot in range(slots)
        ]
        for half in (0, 1)
    ]


def merge_query(parts: _Halves, tops: _Halves, number: Word, out: Any, lse: Any) -> None:
    """Writes the result of the `number`-th query and KV head, and its log-sum-exp."""
    to = lanes.element(lanes.address(out), number, _RESULT_BYTES)
    to_lse = lanes.element(lanes.address(lse), number, _HEADS * 4)
    for half in (0, 1):
        weights, total = _weights([lanes.real_of_bits(x) for x in tops[half]])
        values = [lanes.real(0.0)] * _CHUNK
        for words, weight in zip(parts[half], weights, strict=True):
            values = _add(values, words, weight)
        words = [lanes.bf16_of_reals(values[i], values[i + 1]) for i in range(0, _CHUNK, 2)]
        lanes.store_words(to, _place(half), words)
        first = (lanes.thread() & 15).equals(0)
        lanes.when(first, partial(lanes.store_reals, to_lse, _head(half) << 2, [total]))


def _place(half: int) -> Word:
    """The byte of a result at which this thread's 8 dimensions begin."""
    return (lanes.thread() << 4) + half * (_RESULT_BYTES // 2)


def _head(half: int) -> Word:
    return (lanes.thread() >> 4) + half * (_HEADS // 2)


def _weights(values: list[Real]) -> tuple[list[Real], Real]:
    """Each slot's share of a head's result, and the log-sum-exp of all."""
    nothing = lanes.real(0.0)
    top = values[0]
    for one in values[1:]:
        top = lanes.maximum(top, one)
    some = top.above(lanes.real(float("-inf")))
    reference = lanes.select(some, top, nothing)
    weights = [lanes.exp2((one - reference) * lanes.real(_LOG2E)) for one in values]
    total = weights[0]
    for one in weights[1:]:
        total = total + one
    inverse = lanes.select(some, lanes.real(1.0) / total, nothing)
    return [one * inverse for one in weights], reference + lanes.log2(total) * lanes.real(_LN2)


def _add(values: list[Real], words: list[Word], weight: Real) -> list[Real]:
    """`values` and a slot's eight, times its weight; one without weight holds anything."""
    some = weight.above(lanes.real(0.0))
    pieces = [
        x for one in words for x in lanes.reals_of_half2(lanes.select(some, one, lanes.word(0)))
    ]
    return [lanes.multiply_add(x, weight, y) for x, y in zip(pieces, values, strict=True)]
