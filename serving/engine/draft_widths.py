"""How many drafts each decode row tests, and whether new ones are drawn: all there are and always,
or what the planner makes of the costs and of what drafts of late were worth; a row with a grammar
never more than it has masks for.
"""

from collections.abc import Callable, Mapping, Sequence

from serving.scheduling.cost_table import StepCosts
from serving.scheduling.decode_rows import DraftChoice
from serving.scheduling.request import Request
from serving.scheduling.speculation_plan import SpeculationPlanner


class DraftWidths:
    """What the scheduler asks. `limit` gives the most of a row with a grammar, `step` is
    the one that is being planned.
    """

    def __init__(self, num_drafts: int, costs: StepCosts | None = None):
        self._num_drafts = num_drafts
        self._planner = None if costs is None else SpeculationPlanner(costs, num_drafts)
        self.limit: Callable[[Request], int | None] = lambda request: None
        self.step = 0

    def __call__(self, requests: Sequence[Request]) -> DraftChoice:
        if self._planner is None:
            return DraftChoice(list(map(self._room, requests)), proposes=True)
        room = {name_of(one): self._room(one) for one in requests}
        plan = self._planner.plan(self.step, room)
        widths = self._planner.widths(self.step, room, plan.budget)
        return DraftChoice(widths, proposes=plan.proposes)

    @property
    def learns(self) -> bool:
        """Whether results change what it says."""
        return self._planner is not None

    def learn(
        self,
        step: int,
        survivals: Mapping[str, Sequence[float]],
        outcomes: Sequence[tuple[int, int]],
    ) -> None:
        """Takes what a step gave: by sequence the probability that each of its new drafts is kept
        together with those before it; and of each row how many drafts were tested and how many
        kept.
        """
        if self._planner is not None:
            self._planner.record(step, survivals)
            self._planner.observe(outcomes)

    def forget(self, request: Request) -> None:
        """Drops what is known of a sequence that ended, or lost its drafts."""
        if self._planner is not None:
            self._planner.forget(name_of(request))

    def _room(self, request: Request) -> int:
        most, left = self._num_drafts, request.limit - request.least - 1
        if not request.has_drafts:
            return 0
        if left < most:
            most = max(0, left)
        limit = self.limit(request) if request.is_synchronous else None
        return most if limit is None else min(most, limit)


def name_of(request: Request) -> str:
    """A sequence's name among those that run."""
    return f"{request.request_id}/{request.index}"
