"""From groups of scored answers to what is learned of them: advantages, and the weight of each
token in the loss of the whole batch.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from configs.rl import GRPOConfig
from rl.advantages import ADVANTAGES
from rl.aggregation import AGGREGATIONS
from rl.batches import Group
from rl.experience import Experience
from rl.rollouts import Rollout


def learnable(groups: Sequence[Group], config: GRPOConfig) -> tuple[list[Experience], np.ndarray]:
    """What is learned from some groups, and all advantages [P, G].

    Every valid answer counts in the denominators; those without an advantage are then left out,
    since they have no gradient, unless there is a divergence to be held down or nothing else.

    Raises ValueError when not a single answer is left.
    """
    scores = np.stack([group.scores for group in groups])
    valid = np.stack([group.valid for group in groups])
    advantages = ADVANTAGES[config.advantage](scores, valid)
    if config.mask_truncated:
        cut = [[rollout.finish == "length" for rollout in group.rollouts] for group in groups]
        valid &= ~np.array(cut)
    rollouts = list(itertools.chain.from_iterable(group.rollouts for group in groups))
    lengths = np.array([len(rollout.tokens) for rollout in rollouts]) * valid.reshape(-1)
    weights = AGGREGATIONS[config.aggregation](lengths, config.max_tokens)
    taken = lengths > 0
    if not taken.any():
        rewarded = int(np.isfinite(scores).sum())
        raise ValueError(
            f"none of {taken.size} answers is left to learn from: {rewarded} were rewarded, and "
            f"mask_truncated={str(config.mask_truncated).lower()}"
        )
    useful = taken & (advantages.reshape(-1) != 0)
    if useful.any() and config.divergence_weight == 0:
        taken = useful
    flat = advantages.reshape(-1)
    examples = [
        _experience(rollouts[i], float(flat[i]), float(weights[i])) for i in np.flatnonzero(taken)
    ]
    return examples, advantages


def _experience(rollout: Rollout, advantage: float, weight: float) -> Experience:
    return Experience(
        tokens=np.array([*rollout.prompt, *rollout.tokens], np.int32),
        logprobs=rollout.logprobs,
        advantage=advantage,
        weight=weight,
        choices=rollout.choices,
        pages=rollout.pages,
    )
