"""From partial logits to experts and weights: a warp for each row.

Grid: a CTA of four rows. A lane has four neighbouring experts; it sums their parts in order, and
the warp finds the largest biased score `count` times, the lower id among equals.

Memory: 4 bytes a part, row and expert read, 8 bytes a choice written.
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
from pallas_kernels.logarithms import LOG2E

EXPERTS = 128  # four a lane
_OF_LANE, _ROWS = 4, 4
_TOGETHER = 8  # parts whose loads are under way at once
_TINY = 1.1754943508222875e-38  # the smallest normal float32


def choose_experts(
    logits: Float[Array, "parts T E"], bias: Float[Array, "E"], count: int, scale: float
) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
    """Ids and weights of the sum of the parts."""
    rows = logits.shape[1]
    kernel = plgpu.kernel(
        lanes.named("route_choice", _program, count, scale),
        out_type=(
            jax.ShapeDtypeStruct((rows, count), jnp.int32),
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
        ),
        grid=(-(-rows // _ROWS),),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=False
        ),
    )
    return kernel(logits, bias.astype(jnp.float32))


def _program(count: int, scale: float, logits, bias, experts, weights):
    parts, rows, _ = logits.shape

    @lanes.code(*[REF] * 4, SCALAR)
    def choose(_, logits, bias, experts, weights, first):
        row = lanes.scalar(first) * _ROWS + lanes.warp()

        def of_row():
            sums = _summed(lanes.address(logits), parts, rows, row)
            scores = [_sigmoid(x) for x in sums]
            biases = lanes.load_reals(lanes.address(bias), lanes.lane() << 4, _OF_LANE)
            biased = [s + b for s, b in zip(scores, biases, strict=True)]
            found = _best(scores, biased, count)
            total = functools.reduce(lambda a, b: a + b, [score for _, score in found])
            factor = lanes.real(scale) / lanes.maximum(total, lanes.real(_TINY))
            for i, (expert, score) in enumerate(found):
                at = (row * count + i) << 2
                lanes.when(
                    lanes.lane().equals(i),
                    functools.partial(_write, experts, weights, at, expert, score * factor),
                )

        lanes.when(row.below(rows), of_row)

    choose(logits, bias, experts, weights, lax.axis_index("rows"))


def _write(experts: Any, weights: Any, at: Word, expert: Word, weight: Real) -> None:
    lanes.store_words(lanes.address(experts), at, [expert])
    lanes.store_reals(lanes.address(weights), at, [weight])


def _summed(logits: Any, parts: int, rows: int, row: Word) -> list[Real]:
    """This lane's four logits, summed over the parts in their order."""
    sums = [lanes.real(0.0)] * _OF_LANE
    base = (row * EXPERTS + (lanes.lane() << 2)) << 2
    for first in range(0, parts, _TOGETHER):
        some = range(first, min(first + _TOGETHER, parts))
        loaded = [lanes.load_reals(logits, base + part * rows * EXPERTS * 4, 4) for part in some]
        for four in loaded:
            sums = [a + b for a, b in zip(sums, four, strict=True)]
    return sums


def _sigmoid(x: Real) -> Real:
    return lanes.real(1.0) / (lanes.real(1.0) + lanes.exp2(x * lanes.real(-LOG2E)))


def _best(scores: list[Real], biased: list[Real], count: int) -> list[tuple[Word, Real]]:
    """The experts of the largest biased scores, in order, and their scores; all lanes know them."""
    found = []
    for _ in range(count):
        best = _largest(functools.reduce(lanes.maximum, biased))
        expert = _lowest_id([lanes.negate(best.above(one)) for one in biased])
        is_it = [(expert + -i).equals(lanes.lane() << 2) for i in range(_OF_LANE)]
        mine = [lanes.select(it, s, lanes.real(0.0)) for it, s in zip(is_it, scores, strict=True)]
        found.append((expert, _largest(functools.reduce(lanes.maximum, mine))))
        lost = lanes.real(float("-inf"))
        biased = [lanes.select(it, lost, one) for it, one in zip(is_it, biased, strict=True)]
    return found


def _lowest_id(conditions: list[Any]) -> Word:
    """The lowest expert for which its lane's condition holds; it holds for some."""
    lowest = lanes.word(EXPERTS)
    for i, condition in enumerate(conditions):
        expert = (lanes.first_lane(condition) << 2) + i
        lowest = lanes.select(expert.below(lowest), expert, lowest)
    return lowest


def _largest(x: Real) -> Real:
    """Over the warp."""
    for distance in (1, 2, 4, 8, 16):
        x = lanes.maximum(x, lanes.shuffle_xor(x, distance))
    return x
