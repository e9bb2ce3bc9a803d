"""Runs the rows of a plan: each adapter's by themselves, those of all data ranks together, decode
rows once a device step.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain

from serving.device.arrays import num_scored, reports_logprobs
from serving.device.calls import StepCalls
from serving.device.kept import Kept
from serving.device.residency import Residency
from serving.device.results import DecodePart, PrefillPart, Seat
from serving.device.sampler import Rows
from serving.device.taken import Taken
from serving.device_api import Slot
from serving.scheduling.plan import RankPlan
from serving.scheduling.shapes import Shape, Shapes


class StepRunner:
    """Waits for none of the programs that it runs."""

    def __init__(self, kept: Kept, shapes: Shapes, calls: StepCalls, residency: Residency):
        self._kept, self._shapes, self._calls = kept, shapes, calls
        self._residency = residency

    def prefills(
        self, plans: Sequence[RankPlan], planned: Shape, masked: Collection[Slot]
    ) -> list[PrefillPart]:
        """The chunks of all ranks, in programs no larger than planned; `masked` are slots with a
        mask.
        """
        slots = [[row.slot for row in plan.prefills] for plan in plans]
        return [
            self._prefill(indices, plans, planned, name, masked)
            for name, indices in self._by_adapter(slots)
        ]

    def decodes(
        self, plans: Sequence[RankPlan], planned: Shape, masked: Collection[Slot]
    ) -> list[DecodePart]:
        """The decode rows of all ranks."""
        return [
            self._decode(indices, plans, planned, name, masked)
            for name, indices in self._by_adapter([plan.decode_slots for plan in plans])
        ]

    def _by_adapter(
        self, slots: Sequence[Sequence[int]]
    ) -> list[tuple[str | None, list[list[int]]]]:
        """The rows of each adapter, by rank and by their index there."""
        groups: dict[str | None, list[list[int]]] = defaultdict(lambda: [[] for _ in slots])
        for rank, own in enumerate(slots):
            for index, slot in enumerate(own):
                adapter = self._residency.residents[rank, slot].admission.adapter
                groups[adapter][rank].append(index)
        return list(groups.items())

    def _seats(
        self, indices: Sequence[Sequence[int]], slots: Sequence[Sequence[int]], num_rows: int
    ) -> list[Seat]:
        """Where in a program of `num_rows` rows a rank the plan's rows are."""
        return [
            Seat(rank, index, rank * num_rows + row, self._residency.residents[rank, slot])
            for rank, own in enumerate(zip(indices, slots, strict=True))
            for row, (index, slot) in enumerate(zip(*own, strict=True))
        ]

    def _prefill(
        self,
        indices: Sequence[Sequence[int]],
        plans: Sequence[RankPlan],
        planned: Shape,
        adapter: str | None,
        masked: Collection[Slot],
    ) -> PrefillPart:
        rows = _picked([plan.prefills for plan in plans], indices)
        tokens = max(sum(row.length for row in own) for own in rows)
        shape = self._shapes.prefill(tokens=tokens, pages=planned.pages)
        made, places = self._calls.chunks(rows, shape, masked)
        [prefilled] = self._kept.run(self._calls.prefill(made, shape, adapter))
        seats = self._seats(indices, [[row.slot for row in own] for own in rows], shape.rows)
        residents, flat = [seat.resident for seat in seats], list(chain.from_iterable(rows))
        scored = any(map(num_scored, flat, residents))
        taken = Taken.of(
            prefilled.sampled,
            logprobs=any(map(reports_logprobs, residents)),
            prompts=prefilled.prompts if scored else None,
            drafted=prefilled.drafted,
            routes=prefilled.routes,
        )
        places = list(chain.from_iterable(places))
        return PrefillPart(seats=seats, rows=flat, places=places, taken=taken)

    def _decode(
        self,
        indices: Sequence[Sequence[int]],
        plans: Sequence[RankPlan],
        planned: Shape,
        adapter: str | None,
        masked: Collection[Slot],
    ) -> DecodePart:
        slots = _picked([plan.decode_slots for plan in plans], indices)
        widths = _picked([plan.decode_widths for plan in plans], indices)
        shape = self._shapes.decode(
            rows=max(map(len, slots)),
            tokens=max(len(own) + sum(own) for own in widths),
            pages=planned.pages,
            steps=planned.steps,
        )
        rows = self._calls.rows(slots, shape, masked)
        seats = self._seats(indices, slots, shape.rows)
        logprobs = bool(rows.asks.logprobs)
        if self._calls.speculates and any(plan.proposes for plan in plans):
            taken = [self._speculate(rows, widths, shape, adapter, logprobs)]
            return DecodePart(seats=seats, taken=taken)
        steps = self._kept.run(self._calls.decode(rows, shape, adapter), shape.steps)
        taken = [Taken.of(one.sampled, logprobs=logprobs, routes=one.routes) for one in steps]
        return DecodePart(seats=seats, taken=taken)

    def _speculate(
        self,
        rows: Rows,
        widths: Sequence[Sequence[int]],
        shape: Shape,
        adapter: str | None,
        logprobs: bool,
    ) -> Taken:
        call = self._calls.speculative(rows, widths, shape, adapter, with_options=rows.asks.any)
        [committed] = self._kept.run(call)
        drafted, routes = committed.drafted, committed.routes
        return Taken.of(committed, logprobs=logprobs, drafted=drafted, routes=routes)


def _picked(of_ranks: Sequence[Sequence], indices: Sequence[Sequence[int]]) -> list[list]:
    return [[own[i] for i in some] for own, some in zip(of_ranks, indices, strict=True)]
