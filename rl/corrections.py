"""Weights that correct for samples drawn by another program than the one that learns: TIS, IcePop
and rejection (spec/rl 1.5).

All are functions of w = exp(lp - lp_rollout), detached, of a token or of a whole sequence. With one
update a batch the rollout's own log-probabilities are the old ones, and -w A lp is the whole loss;
a weight is never put on top of a clip of the same ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_LOG_RATIO = 20.0  # in either direction, before exp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tokens:
    """T sampled tokens of several sequences: `sequences` numbers them from 0 to at most T - 1.

    `mask` is 1.0 for a token that takes part and 0.0 for padding and what has no finite
    log-probability; values there are of no consequence.
    """

    logprobs: Float[Array, "T"]  # of the model that learns
    rollout_logprobs: Float[Array, "T"]
    advantages: Float[Array, "T"]
    mask: Float[Array, "T"]
    sequences: Int[Array, "T"]

    @classmethod
    def of(
        cls,
        logprobs: Float[Array, "T"],
        rollout_logprobs: Float[Array, "T"],
        advantages: Float[Array, "T"],
        mask: Float[Array, "T"],
        sequences: Int[Array, "T"],
    ) -> "Tokens":
        """Tokens whose log-probabilities are -inf or NaN on either side are masked, so that they
        reach neither the loss nor its gradient.
        """
        finite = jnp.isfinite(logprobs) & jnp.isfinite(rollout_logprobs) & (mask > 0)
        return cls(
            logprobs=jnp.where(finite, logprobs, 0.0),
            rollout_logprobs=jnp.where(finite, rollout_logprobs, 0.0),
            advantages=jnp.where(finite, advantages, 0.0),
            mask=finite.astype(jnp.float32),
            sequences=sequences,
        )

    @property
    def log_ratio(self) -> Float[Array, "T"]:
        """lp - lp_rollout, clamped."""
        difference = self.logprobs - self.rollout_logprobs
        return jnp.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) * self.mask

    def sequence_sum(self, values: Float[Array, "T"]) -> Float[Array, "T"]:
        """Each token's sequence's sum of the masked values."""
        sums = jax.ops.segment_sum(values * self.mask, self.sequences, len(self.mask))
        return sums[self.sequences]

    def sequence_mean(self, values: Float[Array, "T"]) -> Float[Array, "T"]:
        """Each token's sequence's mean of the masked values."""
        count = self.sequence_sum(jnp.ones_like(self.mask))
        return self.sequence_sum(values) / jnp.maximum(count, 1.0)


Weights = Float[Array, "T"]


def uncorrected(tokens: Tokens, low: float, high: float) -> Weights:
    """1 everywhere: the samples are taken to be the learner's own."""
    return jnp.ones_like(tokens.mask)


def token_tis(tokens: Tokens, low: float, high: float) -> Weights:
    """w of each token, cut off at both bounds; `low` 0 is none: truncated importance sampling."""
    return detached(jnp.clip(jnp.exp(tokens.log_ratio), low, high))


def sequence_tis(tokens: Tokens, low: float, high: float) -> Weights:
    """w of the whole sequence, cut off at both bounds."""
    total = jnp.clip(tokens.sequence_sum(tokens.log_ratio), -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return detached(jnp.clip(jnp.exp(total), low, high))


def icepop(tokens: Tokens, low: float, high: float) -> Weights:
    """w of each token, and 0 for a token whose w is out of bounds."""
    weight = detached(jnp.exp(tokens.log_ratio))
    return jnp.where((weight >= low) & (weight <= high), weight, 0.0)


def token_mask(tokens: Tokens, low: float, high: float) -> Weights:
    """1, and 0 for a token whose w is out of bounds."""
    return (icepop(tokens, low, high) > 0).astype(jnp.float32)


def sequence_mask(tokens: Tokens, low: float, high: float) -> Weights:
    """w of each token, and 0 for all tokens of a sequence whose geometric mean of w is out of
    bounds.
    """
    mean = detached(jnp.exp(tokens.sequence_mean(tokens.log_ratio)))
    weight = detached(jnp.exp(tokens.log_ratio))
    return jnp.where((mean >= low) & (mean <= high), weight, 0.0)


CORRECTIONS: dict[str, Callable[[Tokens, float, float], Weights]] = {
    "none": uncorrected,
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "token_mask": token_mask,
    "sequence_mask": sequence_mask,
}


def detached(x: Array) -> Array:
    """`x` as a constant of the gradient."""
    return jax.lax.stop_gradient(x)
