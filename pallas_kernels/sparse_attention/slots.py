"""The end of a prefill kernel: a query's partial results, one a slot, become one (`merge_slots` of
`pairs`, at the rate of a copy).

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
from pallas_kernels.logarithms import LN2, LOG2E

_HEADS, _WIDTH = 16, 128
_CHUNK = 8  # dimensions of a thread


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
        rows = _HEADS * _WIDTH * 2
        source = lanes.element(lanes.address(parts), number, slots * rows)
        tops = lanes.element(lanes.address(part_lse), number, slots * _HEADS * 4)
        to = lanes.element(lanes.address(out), number, rows)
        to_lse = lanes.element(lanes.address(lse), number, _HEADS * 4)
        for half in (0, 1):
            at = (lanes.thread() << 4) + half * (rows // 2)
            head = (lanes.thread() >> 4) + half * (_HEADS // 2)
            weights, total = _weights(tops, head, slots)
            values = [lanes.real(0.0)] * _CHUNK
            for slot, weight in enumerate(weights):
                words = lanes.load_words(source, at + slot * rows, 4)
                values = _add(values, words, weight)
            words = [lanes.bf16_of_reals(values[i], values[i + 1]) for i in range(0, _CHUNK, 2)]
            lanes.store_words(to, at, words)
            first = (lanes.thread() & 15).equals(0)
            lanes.when(first, partial(lanes.store_reals, to_lse, head << 2, [total]))

    run(parts, part_lse, out, lse, lax.axis_index("query"))


def _weights(tops: Any, head: Word, slots: int) -> tuple[list[Real], Real]:
    """Each slot's share of a head's result, and the log-sum-exp of all."""
    nothing = lanes.real(0.0)
    places = [(head << 2) + slot * (_HEADS * 4) for slot in range(slots)]
    values = [lanes.load_reals(tops, place, 1)[0] for place in places]
    top = values[0]
    for one in values[1:]:
        top = lanes.maximum(top, one)
    some = top.above(lanes.real(float("-inf")))
    reference = lanes.select(some, top, nothing)
    weights = [lanes.exp2((one - reference) * lanes.real(LOG2E)) for one in values]
    total = weights[0]
    for one in weights[1:]:
        total = total + one
    inverse = lanes.select(some, lanes.real(1.0) / total, nothing)
    return [one * inverse for one in weights], reference + lanes.log2(total) * lanes.real(LN2)


def _add(values: list[Real], words: list[Word], weight: Real) -> list[Real]:
    """`values` and a slot's eight, times its weight; one without weight holds anything."""
    some = weight.above(lanes.real(0.0))
    pieces = [
        x for one in words for x in lanes.reals_of_half2(lanes.select(some, one, lanes.word(0)))
    ]
    return [lanes.multiply_add(x, weight, y) for x, y in zip(pieces, values, strict=True)]
