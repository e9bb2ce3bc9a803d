"""Runs the rows of a plan: each adapter's by themselves, decode rows once a device step."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from serving.device.arrays import num_scored, reports_logprobs
from serving.device.calls import StepCalls
from serving.device.programs import Programs
from serving.device.residency import Residency
from serving.device.results import DecodePart, PrefillPart, Taken
from serving.device.sampler import Rows
from serving.device.steps import State
from serving.scheduling.plan import PrefillRow, RankPlan
from serving.scheduling.shapes import Shape, Shapes


class StepRunner:
    """Holds the state that steps take and give back; waits for none of them."""

    def __init__(
        self,
        programs: Programs,
        shapes: Shapes,
        calls: StepCalls,
        residency: Residency,
        state: State,
    ):
        self.state = state
        self._programs, self._shapes, self._calls = programs, shapes, calls
        self._residency = residency

    def prefills(
        self, plan: RankPlan, planned: Shape, masked: Collection[int]
    ) -> list[PrefillPart]:
        """The plan's chunks, in programs no larger than planned; `masked` are slots with a mask."""
        parts = []
        for name, indices in self._by_adapter([row.slot for row in plan.prefills]):
            rows = [plan.prefills[i] for i in indices]
            parts.append(self._prefill(indices, rows, planned, name, masked))
        return parts

    def decodes(self, plan: RankPlan, planned: Shape, masked: Collection[int]) -> list[DecodePart]:
        """The plan's decode rows."""
        return [
            self._decode(indices, plan, planned, name, masked)
            for name, indices in self._by_adapter(plan.decode_slots)
        ]

    def _by_adapter(self, slots: Sequence[int]) -> list[tuple[str | None, list[int]]]:
        """The rows of each adapter, by their index."""
        groups: dict[str | None, list[int]] = defaultdict(list)
        for index, slot in enumerate(slots):
            groups[self._residency.residents[slot].admission.adapter].append(index)
        return list(groups.items())

    def _prefill(
        self,
        indices: Sequence[int],
        rows: Sequence[PrefillRow],
        planned: Shape,
        adapter: str | None,
        masked: Collection[int],
    ) -> PrefillPart:
        tokens = sum(row.length for row in rows)
        shape = self._shapes.prefill(tokens=tokens, pages=planned.pages)
        made, places = self._calls.chunks(rows, shape, masked)
        call = self._calls.prefill(self.state, made, shape, adapter)
        self.state, prefilled = self._programs.run(call)
        residents = [self._residency.residents[row.slot] for row in rows]
        scored = any(map(num_scored, rows, residents))
        taken = Taken.of(
            prefilled.sampled,
            logprobs=any(map(reports_logprobs, residents)),
            prompts=prefilled.prompts if scored else None,
            drafted=prefilled.drafted,
        )
        return PrefillPart(
            indices=indices, rows=rows, places=places, residents=residents, taken=taken
        )

    def _decode(
        self,
        indices: Sequence[int],
        plan: RankPlan,
        planned: Shape,
        adapter: str | None,
        masked: Collection[int],
    ) -> DecodePart:
        slots = [plan.decode_slots[i] for i in indices]
        widths = [plan.decode_widths[i] for i in indices]
        shape = self._shapes.decode(
            rows=len(slots),
            tokens=len(slots) + sum(widths),
            pages=planned.pages,
            steps=planned.steps,
        )
        rows = self._calls.rows(slots, shape, masked)
        residents = [self._residency.residents[slot] for slot in slots]
        logprobs = any(map(reports_logprobs, residents))
        if self._calls.speculates:
            taken = [self._speculate(rows, widths, shape, adapter, logprobs)]
            return DecodePart(indices=indices, residents=residents, taken=taken)
        taken = []
        for _ in range(shape.steps):
            call = self._calls.decode(self.state, rows, shape, adapter)
            self.state, sampled = self._programs.run(call)
            taken.append(Taken.of(sampled, logprobs=logprobs))
        return DecodePart(indices=indices, residents=residents, taken=taken)

    def _speculate(
        self, rows: Rows, widths: Sequence[int], shape: Shape, adapter: str | None, logprobs: bool
    ) -> Taken:
        call = self._calls.speculative(
            self.state, rows, widths, shape, adapter, with_options=rows.asks.any
        )
        self.state, committed = self._programs.run(call)
        return Taken.of(committed, logprobs=logprobs, drafted=committed.drafted)
