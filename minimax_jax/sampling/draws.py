"""Random numbers and what they draw. A number is folded from purpose, seed and position, so neither
neighbours, nor the row, nor a preemption changes it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from minimax_jax.sampling.state import SamplingState

# What a random number is for: each purpose has a stream of its own.
TOKEN = 0  # the token at a position, as the target's law has it
ACCEPT = 1  # whether the draft at a position is kept
DRAFT = 2  # DRAFT + k: the draft of row k of the block whose first row is at a position

CHUNK = 512  # ids: sums of chunks are passed first, then the ids of one


def uniform(
    state: SamplingState, positions: Int[Array, "B"], purpose: int = TOKEN
) -> Float[Array, "B"]:
    """The random number in [0, 1) of each (seed, position), in the stream of a purpose."""

    def one(seed: UInt32[Array, "2"], position: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.fold_in(jax.random.key(purpose), seed[0])
        key = jax.random.fold_in(jax.random.fold_in(key, seed[1]), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(state.seed, positions)


def draw(weights: Float[Array, "B V"], uniforms: Float[Array, "B"]) -> Int[Array, "B"]:
    """The id at which the cumulative weights, in the order of ids, pass a share in [0, 1) of their
    total; never one of weight 0.
    """
    B, V = weights.shape
    size = min(CHUNK, V)
    chunks = jnp.pad(weights, ((0, 0), (0, -V % size))).reshape(B, -(-V // size), size)
    sums = jnp.sum(chunks, axis=-1)
    cumulative = jnp.cumsum(sums, axis=-1)
    target = uniforms * cumulative[:, -1]
    chunk = _passed(cumulative, sums > 0, target)
    before = jnp.take_along_axis(cumulative - sums, chunk[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    place = _passed(jnp.cumsum(inside, axis=-1), inside > 0, target - before)
    return chunk * size + place


def _passed(
    cumulative: Float[Array, "B n"], weighty: Bool[Array, "B n"], target: Float[Array, "B"]
) -> Int[Array, "B"]:
    """The first place of any weight that passes the target; the last of any weight if, by rounding,
    none does.
    """
    passes = weighty & (cumulative > target[:, None])
    last = weighty.shape[-1] - 1 - jnp.argmax(weighty[:, ::-1], axis=-1)
    return jnp.where(jnp.any(passes, axis=-1), jnp.argmax(passes, axis=-1), last)
