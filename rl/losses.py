"""The policy losses of a token: REINFORCE with a correction, the clipped surrogate, CISPO and GSPO
(spec/rl 1.2, 1.4); and estimators of the divergence from a reference (spec/rl 1.6).

A loss is a value for each token, to be summed with the weights of `rl.aggregation`. The ratio is
rho = exp(lp - lp_rollout): the rollout's log-probabilities are the old ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl.corrections import CORRECTIONS, LARGEST_LOG_RATIO, Tokens, detached

LARGEST_SEQUENCE_LOG_RATIO = 10.0  # of GSPO's token form, from above
LARGEST_K3 = 10.0

PerToken = Float[Array, "T"]


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """Which loss, and its bounds. `clip_low` and `clip_high` bound the ratio at 1 - low and
    1 + high; `dual_clip` bounds the loss of a bad token at dual_clip x |A|.
    """

    kind: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: str
    correction_low: float
    correction_high: float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The losses; which tokens the clip cut, and those of them that only the dual clip cut; the
    correction's weights.
    """

    losses: PerToken
    clipped: Bool[Array, "T"]
    dual_clipped: Bool[Array, "T"]
    weights: PerToken


def policy_losses(tokens: Tokens, rule: LossRule) -> TokenLosses:
    """The rule's losses; 0 at masked tokens."""
    found = LOSSES[rule.kind](tokens, rule)
    on = tokens.mask > 0
    return TokenLosses(
        losses=jnp.where(on, found.losses, 0.0),
        clipped=found.clipped & on,
        dual_clipped=found.dual_clipped & on,
        weights=found.weights,
    )


def reinforce(tokens: Tokens, rule: LossRule) -> TokenLosses:
    """-w A lp, with the detached weight of the rule's correction."""
    correct = CORRECTIONS[rule.correction]
    weights = correct(tokens, rule.correction_low, rule.correction_high)
    ratio = jnp.exp(tokens.log_ratio)
    outside = (ratio < rule.correction_low) | (ratio > rule.correction_high)
    never = jnp.zeros_like(outside)
    return TokenLosses(
        losses=-weights * tokens.advantages * tokens.logprobs,
        clipped=never if rule.correction == "none" else outside,
        dual_clipped=never,
        weights=weights,
    )


def clipped(tokens: Tokens, rule: LossRule) -> TokenLosses:
    """max(-A rho, -A clip(rho)), for A < 0 at most -c A (PPO, dual clip of arXiv 1912.09729)."""
    return _clipped(tokens, tokens.log_ratio, rule)


def cispo(tokens: Tokens, rule: LossRule) -> TokenLosses:
    """-sg(clip(rho)) A lp: a token beyond the bounds keeps a gradient (arXiv 2506.13585)."""
    ratio = detached(jnp.exp(tokens.log_ratio))
    weights = jnp.clip(ratio, 1 - rule.clip_low, 1 + rule.clip_high)
    return TokenLosses(
        losses=-weights * tokens.advantages * tokens.logprobs,
        clipped=weights != ratio,
        dual_clipped=jnp.zeros_like(weights, bool),
        weights=weights,
    )


def gspo(tokens: Tokens, rule: LossRule) -> TokenLosses:
    """The clipped surrogate of the sequence's ratio exp(mean(lp - lp_rollout)), with the gradient
    of each token's own lp (arXiv 2507.18071, the token form).
    """
    mean = detached(tokens.sequence_mean(tokens.log_ratio))
    log_ratio = mean + tokens.logprobs - detached(tokens.logprobs)
    return _clipped(tokens, jnp.minimum(log_ratio, LARGEST_SEQUENCE_LOG_RATIO), rule)


LOSSES: dict[str, Callable[[Tokens, LossRule], TokenLosses]] = {
    "reinforce": reinforce,
    "ppo_clip": clipped,
    "cispo": cispo,
    "gspo": gspo,
}


def _clipped(tokens: Tokens, log_ratio: PerToken, rule: LossRule) -> TokenLosses:
    ratio, advantages = jnp.exp(log_ratio), tokens.advantages
    free = -advantages * ratio
    bound = -advantages * jnp.clip(ratio, 1 - rule.clip_low, 1 + rule.clip_high)
    losses, dual = jnp.maximum(free, bound), jnp.zeros_like(ratio, bool)
    if rule.dual_clip is not None:
        most = -rule.dual_clip * advantages
        dual = (advantages < 0) & (losses > most)
        losses = jnp.where(dual, most, losses)
    return TokenLosses(
        losses=losses, clipped=bound > free, dual_clipped=dual, weights=jnp.ones_like(ratio)
    )


def k1(difference: PerToken) -> PerToken:
    """d = lp - lp_ref: unbiased, of either sign."""
    return difference


def k2(difference: PerToken) -> PerToken:
    """d^2 / 2; its gradient is that of the divergence."""
    return 0.5 * difference**2


def k3(difference: PerToken) -> PerToken:
    """exp(-d) - 1 + d: unbiased and never negative (Schulman), at most 10."""
    d = jnp.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return jnp.minimum(jnp.expm1(-d) + d, LARGEST_K3)


def k3_with_gradient_of_k2(difference: PerToken) -> PerToken:
    """The value of k3 and the gradient of k2: k3 as a loss does not have the divergence's."""
    second = k2(difference)
    return second + detached(k3(difference) - second)


DIVERGENCES: dict[str, Callable[[PerToken], PerToken]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3+": k3_with_gradient_of_k2,
}
