"""Latencies in a few numbers, under vLLM's keys: `mean_ttft_ms`, `p99_itl_ms`, and so on."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from serving.bench.answers import Answer
from serving.bench.options import Objectives

MS = 1e3


def latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds, by metric; one value a request, and for `itl` one a gap. A request of one token has
    no time a token.
    """
    return {
        "ttft": [one.ttft for one in answers],
        "tpot": [one.tpot for one in answers if one.output_tokens > 1],
        "itl": [gap for one in answers for gap in one.itls],
        "e2el": [one.e2el for one in answers],
    }


def summary(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation (of the population) and percentiles (linear between two
    values), in ms; all 0 without values, as in vLLM.
    """
    values = np.array(seconds if len(seconds) else [0.0]) * MS
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles},
    }


def speeds(answers: Sequence[Answer]) -> list[float]:
    """Tokens a second that each user sees after the first token: 1 / TPOT."""
    return [1 / one.tpot for one in answers if one.tpot > 0]


def num_good(answers: Sequence[Answer], objectives: Objectives) -> int:
    """How many requests meet every objective; a request of one token meets any TPOT."""
    return sum(
        all(getattr(one, name) * MS <= limit for name, limit in objectives.limits)
        for one in answers
    )


def peak_concurrency(answers: Sequence[Answer]) -> int:
    """The most requests that ran at one time."""
    changes = [(one.sent, 1) for one in answers] + [(one.ended, -1) for one in answers]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def peak_tokens_per_s(answers: Sequence[Answer], start: float) -> float:
    """The most tokens that came in one whole second since the start."""
    per_second: dict[int, int] = {}
    for one in answers:
        for time, count in zip(one.times, one.counts, strict=True):
            second = int(time - start)
            per_second[second] = per_second.get(second, 0) + count
    return float(max(per_second.values(), default=0))


def first_reasons(answers: Sequence[Answer], most: int = 5) -> Mapping[str, int]:
    """The first different errors, with how often each came."""
    counts: dict[str, int] = {}
    for one in answers:
        if one.error and (one.error in counts or len(counts) < most):
            counts[one.error] = counts.get(one.error, 0) + 1
    return counts
