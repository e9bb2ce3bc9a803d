"""How the losses of tokens become one number: a weight for each sequence's tokens, so that the loss
is the sum of weight x loss and the denominators are those of the whole batch (spec/rl 1.3).

The weights are made once, from the lengths of all sequences of a step, before these are cut into
packs. Neither packing nor gradient accumulation can then change the gradient, and tokens that are
rejected later still count in the denominator.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Lengths = Int[np.ndarray, "N"]  # sampled tokens of each sequence; 0: it takes no part
Weights = Float[np.ndarray, "N"]  # of each token of a sequence


def token_mean(lengths: Lengths, longest: int) -> Weights:
    """Every token of the batch counts the same (DAPO)."""
    return _where_any(lengths, 1.0 / max(lengths.sum(), 1))


def sequence_mean(lengths: Lengths, longest: int) -> Weights:
    """The mean over sequences of each one's mean over tokens (the GRPO paper, GSPO)."""
    return _where_any(lengths, 1.0 / (_sequences(lengths) * np.maximum(lengths, 1)))


def sequence_sum(lengths: Lengths, longest: int) -> Weights:
    """The mean over sequences of each one's sum over tokens."""
    return _where_any(lengths, 1.0 / _sequences(lengths))


def constant(lengths: Lengths, longest: int) -> Weights:
    """`sequence_sum` divided by the longest answer that was allowed (Dr.GRPO)."""
    return sequence_sum(lengths, longest) / longest


AGGREGATIONS: dict[str, Callable[[Lengths, int], Weights]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}


def _sequences(lengths: Lengths) -> int:
    return max(int((lengths > 0).sum()), 1)


def _where_any(lengths: Lengths, weights: np.ndarray | float) -> Weights:
    return np.where(lengths > 0, weights, 0.0)
