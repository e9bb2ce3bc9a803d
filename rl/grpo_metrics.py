"""From sums over packs to the metrics of a step, under verl's names where verl has one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minimax_jax.speculative.stats import SpeculationStats
from rl.advantages import has_spread
from rl.batches import Batch
from rl.grpo_step import MAXIMA

# Sums that are no means over tokens: already weighted with the whole batch, or counts.
WEIGHTED = ("actor/pg_loss", "loss", "tokens", "rollout_corr/not_finite")
SQUARE = "rollout_corr/rollout_is_square"
PLACES = "routing/places"


def combined(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of a step whose packs gave these sums."""
    parts = list(parts)
    totals = {
        name: float(
            max(part[name] for part in parts)
            if name.startswith(MAXIMA)
            else sum(float(part[name]) for part in parts)
        )
        for name in parts[0]
    }
    tokens, places = max(totals["tokens"], 1.0), max(totals.pop(PLACES, 0.0), 1.0)
    square = totals.pop(SQUARE)
    found = {name.removeprefix(MAXIMA): value for name, value in totals.items()}
    for name in totals:
        if name in WEIGHTED or name.startswith(MAXIMA):
            continue
        found[name] /= places if name.startswith("routing/") else tokens
    mean = found["rollout_corr/rollout_is_mean"]
    found["rollout_corr/rollout_is_eff_sample_size"] = mean**2 * tokens / square if square else 0.0
    return found


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, largest and least of what is a number; NaN if there is none."""
    numbers = values[np.isfinite(values)] if np.isfinite(values).any() else np.array([np.nan])
    return {
        f"{name}/mean": float(numbers.mean()),
        f"{name}/max": float(numbers.max()),
        f"{name}/min": float(numbers.min()),
    }


def batch_metrics(batch: Batch, advantages: np.ndarray) -> dict[str, float]:
    """What is known of a batch before its update."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    prompts = np.array([len(rollout.prompt) for rollout in rollouts])
    scores = np.stack([group.scores for group in batch.groups])
    valid = np.stack([group.valid for group in batch.groups])
    accuracies = np.stack([group.accuracy for group in batch.groups])
    cut = [rollout.finish == "length" for rollout in rollouts]
    broken = [rollout.finish == "aborted" for rollout in rollouts]
    return {
        **spread("critic/score", scores[valid]),
        **spread("critic/rewards", scores[valid]),
        **spread("critic/advantages", advantages[valid]),
        **spread("response_length", lengths),
        "response_length/clip_ratio": float(np.mean(cut)),
        "response/aborted_ratio": float(np.mean(broken)),
        "prompt_length/mean": float(prompts.mean()),
        "reward/acc": float(accuracies[valid].mean()) if valid.any() else 0.0,
        "reward/zero_std_frac": float(1 - has_spread(accuracies, valid).mean()),
        "reward/faults": float(sum(batch.faults.values())),
        "critic/answers": float(len(rollouts)),
        "critic/asked_groups": float(batch.asked),
        "perf/total_num_tokens": float(lengths.sum() + prompts.sum()),
        **_drafts([rollout.speculation for rollout in rollouts if rollout.speculation]),
    }


def _drafts(parts: Sequence[SpeculationStats]) -> dict[str, float]:
    """How speculation went, if the rollout speculated."""
    if not parts:
        return {}
    stats = SpeculationStats.total(parts)
    return {
        "speculation/acceptance_length": stats.acceptance_length,
        "speculation/accepted_frac": stats.accepted / max(1, stats.drafted),
    }
