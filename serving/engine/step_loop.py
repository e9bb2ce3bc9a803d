"""The engine's thread: plan a step, dispatch it, and take the result of the one before.

Up to two steps are out, so the device has work while the host commits one and plans the next. With
nothing to do the thread sleeps until something is asked of it.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import TypeAlias

import numpy as np

from serving.device_api import Device, Mask, Running, Slot
from serving.engine.commands import Commands
from serving.engine.draft_widths import DraftWidths
from serving.engine.ledger import Ledger
from serving.engine.load_watch import LoadWatch
from serving.engine.profiling import Profiling
from serving.engine.sequence import Sequence
from serving.engine.streams import End, Handover, Stream
from serving.engine.weight_update import WeightUpdate
from serving.scheduling.outcome import Progress
from serving.scheduling.plan import StepPlan, StepResult
from serving.scheduling.request import Request
from serving.scheduling.scheduler import Scheduler

News: TypeAlias = list[tuple[Sequence, list[int]]]  # sequences with new tokens


class StepLoop:
    """All that belongs to the thread; but for `commands` and the handover nothing is shared."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        ledger: Ledger,
        handover: Handover,
        widths: DraftWidths,
        tell: Callable[[list[Stream]], None],
    ):
        """`tell` is called on the event loop whenever something may be new, with the streams that
        are over.
        """
        self.scheduler, self.ledger, self.commands = scheduler, ledger, Commands()
        self.profiling = Profiling(device)
        self.weights = WeightUpdate(scheduler, device)
        self.load = LoadWatch(scheduler, ledger.statistics)
        self._device, self._handover, self._widths, self._tell = device, handover, widths, tell
        self._flying: deque[tuple[StepPlan, Running]] = deque()
        self._has_ended = False
        widths.limit = self._draft_limit

    def run(self) -> None:
        """Runs until `end`; what runs then has been aborted, and its last steps are awaited."""
        rests = False
        while not self._has_ended or self._flying:
            self.load.look(time.monotonic(), at_once=rests)
            self.commands.run_all(sleep=rests)
            self.weights.advance()
            dispatched = False
            while self._dispatch():
                dispatched = True
            landed = bool(self._flying)
            if landed:
                self._land()
            self.ledger.note_kv_events()
            self._handover.wake(self._tell, always=self.ledger.has_news)
            rests = not (dispatched or landed or self._has_ended)
        self.load.look(time.monotonic(), at_once=True)

    # ---- what commands do

    def end(self) -> None:
        """Aborts everything and lets the thread end."""
        self._has_ended = True
        for sequence in list(self.ledger):
            self.abort(sequence.request.request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request's sequences, wherever they are."""
        for request in self.scheduler.abort(request_id):
            self._finish(request.owner, End("abort"))
        self._handover.wake(self._tell, always=False)

    def pause(self, paused: bool) -> None:
        """Plans no more steps, or plans them again."""
        self.scheduler.is_paused = paused

    def forget_prefixes(self) -> int:
        """Drops the prefix cache if nothing runs, or all has paused; else how many sequences are in
        the way.
        """
        scheduler = self.scheduler
        rests = scheduler.is_paused and not scheduler.num_in_flight
        if scheduler.has_work and not rests:
            return max(1, len(self.ledger))
        scheduler.forget_prefixes()
        return 0

    # ---- a step

    def _dispatch(self) -> bool:
        """Plans and starts a step; whether there was one to start."""
        if self.weights.holds_steps:
            return False
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self._widths.step = plan.step_id + 1
        self.ledger.admitted(plan)
        self.profiling.dispatches(plan.step_id)
        self._flying.append((plan, self._device.dispatch(plan, self._masks(plan))))
        return True

    def _land(self) -> None:
        """Waits for the oldest step, and takes what it gave."""
        plan, running = self._flying.popleft()
        result = running.result()
        self.profiling.landed(plan.step_id)
        self.ledger.score_prompts(plan, result)
        progress = self.scheduler.commit(result)
        now = time.monotonic()
        outcomes = self.ledger.count_step(plan, result)
        if self._widths.learns:
            self._widths.learn(plan.step_id, self._confidences(result), outcomes)
        plain, others = self._hand_over(progress, result)
        others = [(one, self._settled(one, tokens, result)) for one, tokens in others]
        if self.scheduler.config.enable_return_routed_experts:
            self._add_experts(others)
        self._hand_over_settled(others, result)
        if self.ledger.listens:
            self.ledger.count_tokens(plan, chain(plain, others), now)
        for sequence, _ in others:
            if sequence.end is not None:
                self._forget(sequence, now)

    def _hand_over(self, progress: list[Progress], result: StepResult) -> tuple[News, News]:
        """Adds new tokens to what readers get, of sequences of which nothing else is to be said;
        those, if anyone listens, and the others.
        """
        plain, others, num_tokens = [], [], 0
        listens = self.ledger.listens
        with self._handover.lock:
            marked = self._handover.news
            for request, tokens in progress:
                sequence = request.owner
                if request.finish_reason is not None or not (
                    sequence.is_plain or sequence.passes(tokens)
                ):
                    others.append((sequence, tokens))
                    continue
                num_tokens += len(tokens)
                box = sequence.box
                run = box.run
                if run.num_top is None:
                    run.ids += tokens
                else:
                    run.add(tokens, result.ranks[sequence.rank].logprobs.get(sequence.slot))
                if not box.is_new:  # `Box.mark`, without a call
                    box.is_new = True
                    marked.append(box)
                if listens:
                    plain.append((sequence, tokens))
        self.ledger.statistics.generation_tokens += num_tokens
        return plain, others

    def _hand_over_settled(self, others: News, result: StepResult) -> None:
        """The same of the others, after it was settled which of their tokens count."""
        with self._handover.lock:
            for sequence, tokens in others:
                self.ledger.statistics.generation_tokens += len(tokens)
                logprobs = result.ranks[sequence.rank].logprobs
                sequence.tell(tokens, logprobs.get(sequence.slot))

    def _settled(self, sequence: Sequence, tokens: list[int], result: StepResult) -> list[int]:
        """Those of a sequence's new tokens that count; its end may be set."""
        request, slot = sequence.request, sequence.slot
        given = result.ranks[sequence.rank]
        self.ledger.statistics.broken += slot in given.broken and request.finish_reason == "error"
        count = sequence.settle(tokens, given.drafts.get(slot, ()))
        if sequence.end is not None and request.finish_reason is None:
            kept = request.num_output_tokens - len(tokens) + count
            self.scheduler.finish(request, sequence.end.reason, num_output_tokens=kept)
        return tokens[:count]

    def _add_experts(self, settled: News) -> None:
        """Adds to the ends of those that have ended which experts their tokens had. Their blocks
        may be free by now, but no later step has written to them.
        """
        for one, tokens in settled:
            if one.end is not None:
                count = one.length_with(tokens) - 1
                experts = self._device.experts(one.rank, one.blocks, count)
                one.end = one.end._replace(experts=experts)

    def _finish(self, sequence: Sequence, end: End) -> None:
        """Ends a sequence between two steps; the scheduler knows."""
        sequence.end = end
        with self._handover.lock:
            sequence.tell([], None)
        self._forget(sequence, time.monotonic())

    def _forget(self, sequence: Sequence, now: float) -> None:
        self.ledger.remove(sequence, now)
        self._widths.forget(sequence.request)

    def _confidences(self, result: StepResult) -> dict[str, list[float]]:
        return {
            sequence.name: row
            for rank, given in enumerate(result.ranks)
            for slot, row in given.confidences.items()
            if (sequence := self.ledger.at(rank, slot)).end is None
        }

    # ---- grammars

    def _masks(self, plan: StepPlan) -> dict[Slot, Mask]:
        """The masks of the rows that sample under a grammar."""
        if not self.ledger.num_grammars:
            return {}
        masks = {}
        for rank, part in enumerate(plan.ranks):
            last = [row.slot for row in part.prefills if row.is_last]
            rows = zip_longest([*last, *part.decode_slots], [0] * len(last) + part.decode_widths)
            for slot, width in rows:
                sequence = self.ledger.at(rank, slot)
                if sequence.grammar is not None and sequence.end is None:
                    masks[rank, slot] = self._mask(sequence, width)
        return masks

    def _mask(self, sequence: Sequence, width: int) -> np.ndarray:
        grammar = sequence.grammar
        assert grammar is not None
        try:
            return grammar.masks(width)
        except RuntimeError as error:
            self.scheduler.finish(sequence.request, "error")
            self._finish(sequence, End("error", error=str(error)))
            return grammar.any_token(width)

    def _draft_limit(self, request: Request) -> int | None:
        grammar = request.owner.grammar
        return None if grammar is None else grammar.max_width
