"""How much better than its group a sample did: rewards [P, G] of G samples of each of P prompts in,
advantages [P, G] out, in float64 on the host (spec/rl 1.1).

A sample without a reward (`valid` False) takes no part and gets 0, and so does every sample of a
group whose rewards are equal or of which fewer than two are valid.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

EPSILON = 1e-6  # added to the standard deviation
# Rewards that differ by less are equal: 0.35 seven times has a standard deviation of 1e-17, and
# dividing by that would make an advantage of rounding.
LEAST_DEVIATION = 1e-8

Rewards = Float[np.ndarray, "P G"]
Valid = Bool[np.ndarray, "P G"]


def standardised(rewards: Rewards, valid: Valid) -> Rewards:
    """(R - mean) / (std + 1e-6), with the standard deviation of a sample (divisor G - 1): GRPO."""
    centre, deviation = _centred(rewards, valid), _deviation(rewards, valid)
    return np.where(deviation > LEAST_DEVIATION, centre / (deviation + EPSILON), 0.0)


def centred(rewards: Rewards, valid: Valid) -> Rewards:
    """R - mean: Dr.GRPO."""
    differ = _deviation(rewards, valid) > LEAST_DEVIATION
    return np.where(differ, _centred(rewards, valid), 0.0)


def leave_one_out(rewards: Rewards, valid: Valid) -> Rewards:
    """R - mean of the others: RLOO."""
    count = _count(valid)
    return centred(rewards, valid) * count / np.maximum(count - 1, 1)


ADVANTAGES: dict[str, Callable[[Rewards, Valid], Rewards]] = {
    "grpo": standardised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
}


def has_spread(rewards: Rewards, valid: Valid) -> Bool[np.ndarray, "P"]:
    """Which groups teach something: dynamic sampling keeps these (spec/rl 1.8)."""
    return _deviation(rewards, valid)[:, 0] > LEAST_DEVIATION


def _count(valid: Valid) -> np.ndarray:
    return valid.sum(axis=1, keepdims=True)


def _centred(rewards: Rewards, valid: Valid) -> Rewards:
    rewards = np.where(valid, rewards, 0.0)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(_count(valid), 1)
    return np.where(valid, rewards - mean, 0.0)


def _deviation(rewards: Rewards, valid: Valid) -> np.ndarray:
    """[P, 1]; 0 where fewer than two are valid."""
    squares = (_centred(rewards, valid) ** 2).sum(axis=1, keepdims=True)
    return np.sqrt(squares / np.maximum(_count(valid) - 1, 1))
