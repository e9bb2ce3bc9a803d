"""A server under a constant load, in numbers alone: sequences whose drafts are accepted by chance,
and steps that take what a cost table says.
"""

import random
from collections.abc import Callable
from itertools import accumulate
from operator import mul

from serving.scheduling.cost_table import CostTable, StepCosts
from serving.scheduling.speculation import widths_within
from serving.scheduling.speculation_plan import DraftPlan, SpeculationPlanner

SIZES = tuple(2**k for k in range(12))
NUM_DRAFTS = 7
LEARNING = 8


def table(seconds: Callable[[int], float], padded_up_to: int = 0) -> CostTable:
    """The table of a step whose time is a function of its tokens."""
    rates = tuple(1 / seconds(size) for size in SIZES)
    return CostTable(tokens=SIZES, steps_per_sec=rates, padded_up_to=padded_up_to)


# Milliseconds of weights, then of tokens; memory-bound, compute-bound, both, and compiled sizes.
COSTS = {
    "free tokens": StepCosts(
        verify=table(lambda n: 10 + 0.001 * n), draft=table(lambda n: 1 + 1e-4 * n)
    ),
    "dear tokens": StepCosts(
        verify=table(lambda n: 1.0 + 1.0 * n), draft=table(lambda n: 0.1 + 0.02 * n)
    ),
    "roofline": StepCosts(
        verify=table(lambda n: max(10, 0.1 * n)), draft=table(lambda n: max(1, 0.005 * n))
    ),
    "slow drafter": StepCosts(
        verify=table(lambda n: 10 + 0.02 * n), draft=table(lambda n: 8 + 0.01 * n)
    ),
    "compiled sizes": StepCosts(
        verify=table(lambda n: 10 + 0.05 * n, padded_up_to=2048),
        draft=table(lambda n: 1 + 0.005 * n, padded_up_to=2048),
    ),
}
CONVEX = tuple(COSTS)[:-1]  # those where a further token never costs less than the one before


class Text:
    """A text whose ease wanders from block to block; each draft of a block has its own chance."""

    def __init__(self, ease: float, seed: int):
        self._random, self._luck = random.Random(seed), random.Random(f"luck {seed}")
        self._ease = self._middle = ease
        self.chances: list[float] = []

    def propose(self) -> None:
        """A new block: for each draft the probability that it is accepted if those before are."""
        pull = 0.1 * (self._middle - self._ease)
        self._ease = min(0.98, max(0.0, self._ease + pull + self._random.uniform(-0.05, 0.05)))
        noise = [self._random.uniform(-0.1, 0.1) for _ in range(NUM_DRAFTS)]
        self.chances = [min(0.99, max(0.0, self._ease + x)) for x in noise]

    @property
    def survival(self) -> list[float]:
        return list(accumulate(self.chances, mul))

    def accepted(self, width: int) -> int:
        """How many of the first drafts are accepted, by chance."""
        place = 0
        while place < width and self._luck.random() < self.chances[place]:
            place += 1
        return place


def step_seconds(costs: StepCosts, num_texts: int, plan: DraftPlan) -> float:
    """The time of a step that goes by the plan."""
    drafting = costs.draft.seconds(num_texts * NUM_DRAFTS) if plan.proposes else 0.0
    return costs.verify.seconds(num_texts + plan.budget) + drafting


def plain_rate(costs: StepCosts, num_texts: int) -> float:
    """Tokens a second of plain decoding."""
    return num_texts / step_seconds(costs, num_texts, DraftPlan(budget=0, proposes=False))


def verify_all_rate(costs: StepCosts, num_texts: int, ease: float, steps: int) -> float:
    """Expected tokens a second where all drafts are tested in each step."""
    texts, tokens = [Text(ease, seed) for seed in range(num_texts)], 0.0
    for _ in range(steps):
        for text in texts:
            text.propose()
            tokens += 1 + sum(text.survival)
    plan = DraftPlan(budget=num_texts * NUM_DRAFTS, proposes=True)
    return tokens / (steps * step_seconds(costs, num_texts, plan))


def planned_rate(
    costs: StepCosts, num_texts: int, ease: float, steps: int, *, with_head: bool
) -> float:
    """Expected tokens a second under a planner, which learns of each step two steps later; without
    the first `LEARNING` steps, which test everything for lack of knowledge.
    """
    planner = SpeculationPlanner(costs, NUM_DRAFTS)
    texts = {str(seed): Text(ease, seed) for seed in range(num_texts)}
    tokens, seconds, proposed = 0.0, 0.0, False
    outcomes: list[list[tuple[int, int]]] = [[]]
    for step in range(LEARNING + steps):
        room = dict.fromkeys(texts, NUM_DRAFTS if proposed else 0)
        plan = planner.plan(step, room)
        current = [text.survival[: room[name]] for name, text in texts.items()]
        widths = (
            widths_within(current, plan.budget)
            if with_head
            else planner.widths(step, room, plan.budget)
        )
        kept = [text.accepted(width) for text, width in zip(texts.values(), widths, strict=True)]
        if step >= LEARNING:
            tokens += num_texts + sum(sum(row[:w]) for row, w in zip(current, widths, strict=True))
            seconds += step_seconds(costs, num_texts, plan)
        proposed = plan.proposes
        for text in texts.values():
            text.propose()
        if with_head and proposed:
            planner.record(step, {name: text.survival for name, text in texts.items()})
        planner.observe(outcomes.pop())
        outcomes.append(list(zip(widths, kept, strict=True)))
    return tokens / seconds
