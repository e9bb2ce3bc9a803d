"""How many drafts the next step tests, and whether it drafts at all: the host's half of scheduled
verification, decided before the step's own drafts are known (spec/dspark 4.3, 4.4).

A step tests the drafts that the step before proposed, commits, and proposes for the step after.
What the plan knows of a request are the confidences of drafts proposed two steps ago or earlier,
even when later ones have arrived: those under test must not count, and so the plan is the same
whenever copies arrive. Requests without any, new ones above all, have the acceptance that was
observed of late.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from serving.scheduling.acceptance import AcceptanceEstimator
from serving.scheduling.cost_table import StepCosts
from serving.scheduling.speculation import best_budget, check_survivals, widths_within

LAG = 2  # steps: those that the step before proposed are under test
MEMORY = 16  # steps after which confidences say nothing about the text any more

Survival = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """`budget` drafts are tested in all, and the step `proposes` new ones; or neither."""

    budget: int
    proposes: bool


class SpeculationPlanner:
    """Plans steps by what they cost and by what the drafts of late were worth.

    The engine plans step t, dispatches it, and later tells what step t's proposals are expected to
    survive (`record`, if there is a confidence head) and what became of those that it tested
    (`observe`).
    """

    def __init__(
        self,
        costs: StepCosts,
        num_drafts: int,
        *,
        width: int | None = None,
        estimator: AcceptanceEstimator | None = None,
    ):
        """`num_drafts` are proposed of each request, and `width` of them tested at most, if given.

        Raises ValueError for a width that there are not as many drafts for.
        """
        width = num_drafts if width is None else width
        if not 1 <= width <= num_drafts:
            raise ValueError(f"width={width} is not 1 to {num_drafts}, the number of drafts")
        self._costs, self._num_drafts, self._width = costs, num_drafts, width
        self._estimator = estimator or AcceptanceEstimator(width)
        self._recorded: dict[str, deque[tuple[int, Survival]]] = {}

    def plan(
        self,
        step: int,
        room: Mapping[str, int],
        *,
        prompt_seconds: float = 0.0,
        most: int | None = None,
    ) -> DraftPlan:
        """The plan of a step in which the requests of `room` decode, each with that many drafts to
        test: none if nothing was proposed for it, few near its limit. Beside them the step spends
        `prompt_seconds` on prompts. `most` bounds the budget.

        Drafting pays if the fastest speculative step makes more tokens a second than a plain one;
        else the plan does without the drafter. What is there is not tested then either: a step that
        tests is one that drafts, and costs as much.

        Raises ValueError for more room than the width.
        """
        for request, drafts in room.items():
            if not 0 <= drafts <= self._width:
                raise ValueError(f"room of {request} is {drafts}: not 0 to {self._width}")
        if not room:
            return DraftPlan(budget=0, proposes=False)
        anchors, verifying = len(room), self._costs.verify.seconds
        expected = [self.expected(step, request) for request in room]
        there = [row[:drafts] for row, drafts in zip(expected, room.values(), strict=True)]

        plain = prompt_seconds
        speculative = plain + self._costs.draft.seconds(anchors * self._num_drafts)
        _, fastest = best_budget(expected, lambda k: speculative + verifying(anchors + k), most)
        if fastest <= anchors / (plain + verifying(anchors)):
            return DraftPlan(budget=0, proposes=False)
        budget, _ = best_budget(there, lambda k: speculative + verifying(anchors + k), most)
        return DraftPlan(budget=budget, proposes=True)

    def widths(self, step: int, room: Mapping[str, int], budget: int) -> list[int]:
        """How many drafts of each request to test, by what the plan knows: the choice where there
        is no confidence head. With one, the device chooses by the newest within the budget.
        """
        rows = [self.expected(step, request)[:drafts] for request, drafts in room.items()]
        return widths_within(rows, budget)

    def expected(self, step: int, request: str) -> Survival:
        """What the plan of a step takes for the survival of a request's drafts."""
        for proposed, survival in reversed(self._recorded.get(request, ())):
            if step - MEMORY <= proposed <= step - LAG:
                return survival
        return self._estimator.survival

    def record(self, step: int, survivals: Mapping[str, Sequence[float]]) -> None:
        """The calibrated survivals of the drafts that a step proposed; steps come in their order.

        Raises ValueError, and records nothing, if a request's are not as many as there are drafts,
        or rise, or are no probabilities.
        """
        for request, survival in survivals.items():
            if len(survival) != self._num_drafts:
                raise ValueError(
                    f"{len(survival)} survivals of {request}, which has {self._num_drafts} drafts"
                )
        check_survivals(list(survivals.values()))
        for request, survival in survivals.items():
            kept = self._recorded.setdefault(request, deque(maxlen=LAG + 1))
            kept.append((step, tuple(survival[: self._width])))

    def observe(self, outcomes: Iterable[tuple[int, int]]) -> None:
        """Of each request of a step how many drafts were tested and how many of these accepted."""
        self._estimator.observe(outcomes)

    def forget(self, request: str) -> None:
        """Drops what is known of a request that ended or lost its drafts; of others nothing is."""
        self._recorded.pop(request, None)

    def __len__(self) -> int:
        """How many requests something is remembered of."""
        return len(self._recorded)
