"""Exact match on held-out problems: the share of sampled answers that are the number asked for,
with its Wilson interval.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minimax_jax.completion import Completion
from minimax_jax.generate import generate
from minimax_jax.loaded import LoadedModel
from minimax_jax.speculative.stats import SpeculationStats
from rl.data import FAMILIES, HELD_OUT, SHORT, Problem, exact_match, problems, prompt_messages

FAMILY_SETS = {"short": SHORT, **{family: (family,) for family in FAMILIES}}
ANSWER_TOKENS = 64  # thought and answer of every family fit 48
PROMPT_BOUNDS = (128, 256, 512, 1024, 2048)  # where the counts of speculation are told apart
Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many of `total` answers were right."""

    hits: int
    total: int

    @property
    def rate(self) -> float:
        """Exact match."""
        return self.hits / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the rate."""
        n, z2 = self.total, Z_95**2
        centre = (self.hits + z2 / 2) / (n + z2)
        half = Z_95 / (n + z2) * math.sqrt(self.hits * (n - self.hits) / n + z2 / 4)
        return max(0.0, centre - half), min(1.0, centre + half)


def held_out(count: int, families: Sequence[str], *, start: int = 0) -> list[Problem]:
    """Held-out problems number `start` to `start + count - 1`."""
    return list(problems(HELD_OUT, count=count, start=start, families=families))


def score_model(
    loaded: LoadedModel, asked: Sequence[Problem], *, temperature: float, seed: int
) -> dict[str, Score]:
    """Asks all problems, one sampled answer each, and scores each family that occurs."""
    answers = sampled_answers(loaded, asked, temperature=temperature, seed=seed)
    return score_answers(asked, answers)


def sampled_answers(
    loaded: LoadedModel, asked: Sequence[Problem], *, temperature: float, seed: int
) -> list[Completion]:
    """One sampled answer to each problem."""
    completions = generate(
        loaded,
        [prompt_messages(problem) for problem in asked],
        max_tokens=ANSWER_TOKENS,
        temperature=temperature,
        seed=seed,
    )
    assert isinstance(completions, list), "nothing was to be streamed"
    return completions


def score_answers(asked: Sequence[Problem], answers: Sequence[Completion]) -> dict[str, Score]:
    """The score of each family that occurs; an answer that did not end by itself is wrong."""
    right: dict[str, list[bool]] = {}
    for problem, answer in zip(asked, answers, strict=True):
        hit = answer.finish_reason == "stop" and exact_match(problem, answer.text)
        right.setdefault(problem.family, []).append(hit)
    return {family: Score(hits=sum(h), total=len(h)) for family, h in sorted(right.items())}


def total(scores: Iterable[Score]) -> Score:
    """The score over several families' problems together."""
    scores = list(scores)
    return Score(hits=sum(s.hits for s in scores), total=sum(s.total for s in scores))


def speculation_by_prompt(answers: Sequence[Completion]) -> dict[str, SpeculationStats]:
    """What speculation came to by tokens of the prompt; nothing for lengths that do not occur."""
    found: dict[str, SpeculationStats] = {}
    for low, high in zip((0, *PROMPT_BOUNDS), (*PROMPT_BOUNDS, math.inf), strict=True):
        those = [one for one in answers if low <= one.prompt_tokens < high]
        stats = SpeculationStats.total(one.speculation for one in those if one.speculation)
        if stats.steps:
            found[f"{low}+"] = stats
    return found
