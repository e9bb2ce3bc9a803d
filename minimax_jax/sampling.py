"""The law of sampling: temperature, min-p, top-k and top-p, then one draw a row from its own seed
and position.

A row's draw depends on nothing but its own logits and settings: its random number is folded from
purpose, seed and position, so neither neighbours, nor the row, nor a preemption changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

# What a random number is for: each purpose has a stream of its own.
TOKEN = 0  # the token at a position, as the target's law has it
ACCEPT = 1  # whether the draft at a position is kept
DRAFT = 2  # DRAFT + k: the draft of row k of the block whose first row is at a position


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch
    off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} is not a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is not in [0, 1]")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is not in 0..2^63-1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingState:
    """The settings of B sequences as arrays."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]
    seed: UInt32[Array, "B 2"]  # high and low 32 bits

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "SamplingState":
        """One row a sequence."""

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

        seeds = np.array([[p.seed >> 32, p.seed & 0xFFFFFFFF] for p in params], np.uint32)
        return cls(
            temperature=column("temperature", np.float32),
            top_p=column("top_p", np.float32),
            top_k=column("top_k", np.int32),
            min_p=column("min_p", np.float32),
            seed=jnp.asarray(seeds),
        )


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    positions: Int[Array, "B"],
    purpose: int = TOKEN,
) -> Int[Array, "B"]:
    """The token at each sequence's next position: argmax (lower id on a tie) at temperature 0, else
    a draw from `probabilities`.
    """
    greedy = jnp.argmax(logits, axis=-1)
    drawn = draw(probabilities(logits, state), uniform(state, positions, purpose))
    return jnp.where(state.temperature == 0, greedy, drawn)


def draw(weights: Float[Array, "B V"], uniforms: Float[Array, "B"]) -> Int[Array, "B"]:
    """The id at which the cumulative weights, in the order of ids, pass a share in [0, 1) of their
    total; never one of weight 0.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    total = cumulative[:, -1:]
    drawn = jnp.sum(cumulative <= uniforms[:, None] * total, axis=-1)
    last = jnp.argmax(cumulative == total, axis=-1)  # the last id with any weight
    return jnp.minimum(drawn, last)


def uniform(
    state: SamplingState, positions: Int[Array, "B"], purpose: int = TOKEN
) -> Float[Array, "B"]:
    """The random number in [0, 1) of each (seed, position), in the stream of a purpose."""

    def one(seed: UInt32[Array, "2"], position: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.fold_in(jax.random.key(purpose), seed[0])
        key = jax.random.fold_in(jax.random.fold_in(key, seed[1]), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(state.seed, positions)


def probabilities(logits: Float[Array, "B V"], state: SamplingState) -> Float[Array, "B V"]:
    """The distribution that is sampled, float32: softmax(logits / T) cut by min-p, then top-k, then
    top-p, renormalised.

    min-p keeps tokens of at least min_p times the best probability; top-p keeps the fewest best of
    what is left whose mass reaches top_p. Equal logits: the lower id is kept first. At temperature
    0 the row is that of temperature 1.
    """
    temperature = jnp.where(state.temperature == 0, 1.0, state.temperature)[:, None]
    logits = logits.astype(jnp.float32)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    scaled = jnp.where(jnp.exp(scaled) < state.min_p[:, None], -jnp.inf, scaled)
    ranked = jnp.any((state.top_k > 0) | (state.top_p < 1))
    kept = lax.cond(ranked, _within_rank, lambda scaled, state: scaled > -jnp.inf, scaled, state)
    return jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)


def _within_rank(scaled: Float[Array, "B V"], state: SamplingState) -> Bool[Array, "B V"]:
    V = scaled.shape[-1]
    ordered, ids = lax.top_k(scaled, V)
    limit = jnp.where(state.top_k > 0, state.top_k, V)[:, None]
    within = jnp.arange(V) < limit
    mass = jax.nn.softmax(jnp.where(within, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    within &= (before < state.top_p[:, None]) | (state.top_p[:, None] == 1)
    within |= jnp.arange(V) == 0  # the best stays, however small top_p is in float32
    within &= ordered > -jnp.inf
    return jnp.zeros_like(within).at[jnp.arange(len(ids))[:, None], ids].set(within)
