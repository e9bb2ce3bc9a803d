"""Accuracy on held-out questions under verl's names: mean@k, best@k and maj@k of each set."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl.batches import Asker, Batch, Group, sample_seeds
from rl.evaluate import Score
from rl.policy import Policy
from rl.questions import Question

SEED_APART = 1 << 32  # evaluation draws with other seeds than training


def evaluated(asker: Asker, policy: Policy, questions: Sequence[Question]) -> dict[str, float]:
    """`val-core/<set>/acc/mean@k` and the like. Answers are drawn with the same seeds each time, at
    the config's own temperature.
    """
    config = replace(asker.config, temperature=asker.config.eval_temperature)
    seeds = sample_seeds(config.seed + SEED_APART, range(len(questions)), config.eval_samples)
    batch = Batch(groups=[], position=0)
    groups = replace(asker, config=config).answered(policy, questions, seeds, batch)
    found: dict[str, float] = {"timing_s/testing": sum(batch.seconds.values())}
    for source in sorted({group.question.source for group in groups}):
        of_source = [group for group in groups if group.question.source == source]
        found |= _of_set(source, of_source, config.eval_samples)
    if batch.faults:
        found["val-aux/faults"] = float(sum(batch.faults.values()))
    return found


def _of_set(source: str, groups: Sequence[Group], k: int) -> dict[str, float]:
    accuracies = np.stack([group.accuracy for group in groups])
    name = f"val-core/{source}/acc"
    found = {f"{name}/mean@{k}": float(accuracies.mean())}
    if k == 1:
        low, high = Score(hits=int(accuracies.sum()), total=accuracies.size).interval
        found |= {f"{name}/low": low, f"{name}/high": high}
    else:
        found[f"{name}/best@{k}"] = float(accuracies.max(axis=1).mean())
        found[f"{name}/maj@{k}"] = float(np.mean([_of_majority(group) for group in groups]))
    lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
    found[f"val-aux/{source}/response_length/mean"] = float(np.mean(lengths))
    return found


def _of_majority(group: Group) -> float:
    """Whether the text that was answered most often, the earlier one on a tie, is right."""
    texts = [answer.text.strip() for answer in group.answers]
    common, _ = Counter(texts).most_common(1)[0]
    return float(group.accuracy[texts.index(common)])
