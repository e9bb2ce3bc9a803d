"""A device without a model: it remembers whose key lies in which place, and checks each read.

A key is a number that depends on the adapter, the weights and every token up to its own, as real
keys do; so a read of another sequence's place, of an old life of a block, or of a place that nobody
wrote cannot pass. What it generates depends on the same and on the seed.
"""

import pickle
from dataclasses import dataclass, field

from serving.scheduling.plan import Admission, RankPlan, RankResult, StepPlan, StepResult
from serving.scheduling.scheduler import Scheduler

VOCAB = 50


def key_after(before: int, token: int) -> int:
    return hash((before, token)) & 0xFFFFFFFFFF


def first_key(adapter: str | None, weights: int) -> int:
    return hash((*map(ord, adapter or ""), weights))


def next_token(key: int, seed: int) -> int:
    return hash((key, seed, 1)) % VOCAB


def cold_run(request, weights: int = 0) -> list[int]:
    """The output tokens of a request that is alone in the world."""
    params, key = request.sampling, first_key(request.asked.adapter, weights)
    for token in request.asked.prompt:
        key = key_after(key, token)
    output: list[int] = []
    while request.prompt_length + len(output) < request.limit:
        token = next_token(key, request.seed)
        output.append(token)
        key = key_after(key, token)
        if token in request.eos_or_stop_ids and len(output) >= params.min_tokens:
            break
    return output


@dataclass
class Slot:
    """A device row: its sequence, and the key of each of its tokens."""

    admission: Admission
    weights: int
    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    def __post_init__(self):
        for token in self.admission.tokens:
            self.append(token)

    def append(self, token: int) -> None:
        before = self.keys[-1] if self.keys else first_key(self.admission.adapter, self.weights)
        self.tokens.append(token)
        self.keys.append(key_after(before, token))

    def next(self) -> int:
        return next_token(self.keys[-1], self.admission.seed)


class FakeDevice:
    """Runs plans in order.

    `writes_early` stores a token's key in the step that samples it, as plain decoding does;
    otherwise in the next one, as speculation does. `sees_stops` ends a sequence on the device too;
    otherwise it runs on until the host says so. `kept` says how many drafts of a row are right.
    """

    def __init__(self, scheduler: Scheduler, *, writes_early=True, sees_stops=True, kept=None):
        self.scheduler, self.block_size = scheduler, scheduler.config.block_size
        self.pools: list[dict[tuple[int, int], int]] = [{} for _ in scheduler.ranks]
        self.slots: list[dict[int, Slot]] = [{} for _ in scheduler.ranks]
        self.writes_early, self.sees_stops = writes_early, sees_stops
        self.kept = kept or (lambda width: width // 2)
        self.broken: set[str] = set()  # request ids whose logits are NaN from now on
        self.shapes = set(scheduler.shapes.all())

    def run(self, plan: StepPlan) -> StepResult:
        plan = pickle.loads(pickle.dumps(plan))
        self._check_shapes(plan)
        results = [self._run_rank(rank, part, plan) for rank, part in enumerate(plan.ranks)]
        return StepResult(step_id=plan.step_id, ranks=results)

    def _run_rank(self, rank: int, plan: RankPlan, step: StepPlan) -> RankResult:
        slots = self.slots[rank]
        for admission in plan.admissions:
            slots[admission.slot] = Slot(admission, self.scheduler.weight_version)
        for new in plan.new_blocks:
            table = slots[new.slot].table
            assert len(table) == new.first, "a block table with a gap"
            table += new.block_ids
        prefills = [self._prefill(rank, row) for row in plan.prefills]
        steps = step.decode_shape.steps if step.decode_shape else 1
        decodes = []
        for slot, width in zip(plan.decode_slots, plan.decode_widths, strict=True):
            tokens: list[int] = []
            for _ in range(steps):
                tokens += self._decode(rank, slots[slot], width)
            decodes.append(tokens)
        rows = [row.slot for row in plan.prefills] + plan.decode_slots
        assert len(rows) == len(set(rows)), "a slot takes part twice in one step"
        broken = {s for s in rows if slots[s].admission.request_id in self.broken}
        return RankResult(prefills=prefills, decodes=decodes, broken=frozenset(broken))

    def _prefill(self, rank: int, row) -> list[int]:
        slot = self.slots[rank][row.slot]
        assert row.is_last == (row.start + row.length == len(slot.admission.tokens))
        assert row.start == 0 or self._read(rank, slot, row.start - 1), "a chunk left out"
        for position in range(row.start, row.start + row.length):
            self._write(rank, slot, position)
        self._check_reads(rank, slot, row.start + row.length)
        if not row.is_last or slot.admission.sampling.max_tokens == 0:
            return []
        return self._sample(rank, slot)

    def _decode(self, rank: int, slot: Slot, width: int) -> list[int]:
        if len(slot.tokens) >= slot.admission.limit or self._has_stopped(slot):
            return []
        if self.writes_early and not width:
            return self._sample(rank, slot)
        width = max(0, min(width, slot.admission.limit - len(slot.tokens) - 1))
        kept = min(width, self.kept(width))
        known = len(slot.tokens)
        self._write(rank, slot, known - 1)
        self._check_reads(rank, slot, known)
        output = []
        for index in range(width):  # the kept drafts, and what the others leave behind
            if index < kept and not self._has_stopped(slot):
                output += self._sample(rank, slot, early=False)
                self._write(rank, slot, len(slot.tokens) - 1)
                self._check_reads(rank, slot, len(slot.tokens))
            else:
                place = self._place(rank, slot, known + index)
                self.pools[rank].setdefault(place, -1)
        return output if self._has_stopped(slot) else output + self._sample(rank, slot)

    def _sample(self, rank: int, slot: Slot, early: bool = True) -> list[int]:
        token = self._next(rank, slot)
        slot.append(token)
        if early and self.writes_early and not self._has_stopped(slot):
            self._write(rank, slot, len(slot.tokens) - 1)
            self._check_reads(rank, slot, len(slot.tokens))
        return [token]

    def _next(self, rank: int, slot: Slot) -> int:
        return slot.next()

    def _has_stopped(self, slot: Slot) -> bool:
        """Whether the newest token ended the sequence, as far as the device looks."""
        generated = len(slot.tokens) - slot.admission.prompt_length
        if not self.sees_stops or generated < max(1, slot.admission.sampling.min_tokens):
            return False
        return slot.tokens[-1] in slot.admission.stop_ids

    def _place(self, rank: int, slot: Slot, position: int) -> tuple[int, int]:
        """Where a position is written; it must be the sequence's own and no one else's."""
        assert position < slot.admission.limit, "a write beyond the limit"
        block = slot.table[position // self.block_size]
        pages = self.scheduler.ranks[rank].pages
        assert 0 <= block < pages.num_blocks
        assert pages.num_sole([block]) == 1, f"a write into block {block} that is not owned alone"
        assert pages._hashes[block] is None, f"a write into the published block {block}"
        return block, position % self.block_size

    def _write(self, rank: int, slot: Slot, position: int) -> None:
        self.pools[rank][self._place(rank, slot, position)] = slot.keys[position]

    def _read(self, rank: int, slot: Slot, position: int) -> bool:
        place = slot.table[position // self.block_size], position % self.block_size
        return self.pools[rank].get(place) == slot.keys[position]

    def _check_reads(self, rank: int, slot: Slot, length: int) -> None:
        wrong = [p for p in range(length) if not self._read(rank, slot, p)]
        assert not wrong, f"{slot.admission.request_id} reads foreign keys at {wrong} of {length}"

    def _check_shapes(self, plan: StepPlan) -> None:
        config, ranks = self.scheduler.config, plan.ranks
        assert {plan.prefill_shape, plan.decode_shape} - {None} <= self.shapes
        assert any(part.has_rows for part in ranks)
        for part in ranks:
            drafted = len(part.decode_slots) + sum(part.decode_widths)
            chunks = sum(row.length for row in part.prefills)
            assert drafted + chunks <= config.max_num_batched_tokens
            if part.prefills:
                assert chunks <= plan.prefill_shape.tokens
                assert len(part.prefills) <= plan.prefill_shape.rows
            if part.decode_slots:
                assert drafted <= plan.decode_shape.tokens
                assert len(part.decode_slots) <= plan.decode_shape.rows


def run_all(scheduler: Scheduler, device: FakeDevice, most_steps: int = 3000) -> list:
    """Plans as far ahead as may be, until nothing is left to do; all progress in order."""
    progress, pending = [], []
    for _ in range(most_steps):
        while (plan := scheduler.plan()) is not None:
            pending.append(plan)
        if not pending:
            assert not scheduler.has_work, "work is left but nothing is planned"
            return progress
        progress += scheduler.commit(device.run(pending.pop(0)))
        scheduler.check()
    raise AssertionError(f"not done after {most_steps} steps")
