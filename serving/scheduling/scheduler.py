"""Who runs when. Each step has one plan under one budget of tokens: first the decode rows, then
chunks of prompts, of those that come in now too.

Up to two plans are out at a time: the next one is made before the result of the last is known.
Everything is decided here, from arrivals and results alone, so that equal inputs give equal plans;
the device keeps tokens, positions and block tables by slot and does what a plan says.
"""

from collections import deque
from functools import partial
from random import Random

from configs.sampling import MAX_SEED
from configs.serving import ServingConfig
from serving.scheduling.admission import Admission
from serving.scheduling.decode_rows import (
    ChooseDrafts,
    all_drafts,
    decode_shape,
    plan_decodes,
    ready_rows,
)
from serving.scheduling.intake import QueueFullError, checked, entered
from serving.scheduling.outcome import Progress, take_row
from serving.scheduling.plan import RankPlan, StepPlan, StepResult
from serving.scheduling.prefill_rows import plan_prefills, prefill_shape
from serving.scheduling.rank import Load, Rank
from serving.scheduling.request import Asked, FinishReason, Phase, Request
from serving.scheduling.room import Room
from serving.scheduling.rows import Row
from serving.scheduling.shapes import Shapes
from serving.scheduling.waiting import WaitingLine


class Scheduler:
    """The sequences of all data ranks. `num_blocks` are a rank's; `seed` seeds those without one.

    `choose_drafts` says how many drafts each sequence should verify; without it all there are.
    """

    def __init__(
        self,
        config: ServingConfig,
        num_blocks: int,
        *,
        num_ranks: int = 1,
        seed: int = 0,
        choose_drafts: ChooseDrafts | None = None,
    ):
        self.config, self.shapes = config, Shapes(config, num_blocks)
        self.ranks = [
            Rank(
                index,
                num_blocks=num_blocks,
                num_slots=config.max_num_seqs,
                block_size=config.block_size,
                with_events=config.enable_kv_cache_events and config.enable_prefix_caching,
            )
            for index in range(num_ranks)
        ]
        self.waiting, self.weight_version, self.is_paused = WaitingLine(), 0, False
        self.room = Room(self.waiting)
        self.admission = Admission(config, self.ranks, self.waiting, self.room)
        self._choose_drafts = choose_drafts or partial(all_drafts, config.num_speculative_tokens)
        self._random = Random(seed)
        self._groups: dict[str, list[Request]] = {}
        self._arrivals = self._next_step = 0
        self._in_flight: deque[tuple[StepPlan, list[list[Row]]]] = deque()

    # ---- what comes in

    def add(self, asked: Asked) -> list[Request]:
        """Puts the n sequences of a request in the line. Raises ValueError with a sentence for what
        can never run, and QueueFullError when too many wait; nothing is changed then.
        """
        if asked.request_id in self._groups:
            raise ValueError(f"request {asked.request_id!r} is here already")
        asked = checked(asked, self.config, self.ranks)
        count, most = asked.sampling.n, self.config.max_waiting_requests
        if len(self.waiting) + count > most:
            raise QueueFullError(f"{len(self.waiting)} requests wait, and at most {most} may")
        drawn, own_seed = self._random.randrange(MAX_SEED), asked.sampling.seed
        seed = drawn if own_seed is None else own_seed
        # Without a cache for all, the sequences of one request still share their prompt.
        own = "" if self.config.enable_prefix_caching else f"/{self._arrivals}"
        group = [
            Request(
                asked,
                index,
                seed=seed,
                arrival=self._arrivals + index,
                max_model_len=self.config.max_model_len,
                salt=asked.cache_salt + own,
                weight_version=self.weight_version,
            )
            for index in range(count)
        ]
        self._arrivals += count
        self._groups[asked.request_id] = group
        for request in group:
            self.waiting.add(request)
        return group

    def abort(self, request_id: str) -> list[Request]:
        """Ends all sequences of a request wherever they are; those that had not ended. An unknown
        or finished request is none.
        """
        ended = [one for one in self._groups.get(request_id, []) if one.finish_reason is None]
        for request in ended:
            self.finish(request, "abort")
        return ended

    def finish(
        self, request: Request, reason: FinishReason, num_output_tokens: int | None = None
    ) -> None:
        """Ends one sequence, and cuts its tokens where a stop string was found in them."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if num_output_tokens is not None:
            del request.tokens[request.prompt_length + num_output_tokens :]
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
            request.phase = Phase.FINISHED
        self._end(request)

    # ---- steps

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do or enough is in flight."""
        if self.is_paused or len(self._in_flight) == self.config.steps_in_flight:
            return None
        plans = [RankPlan() for _ in self.ranks]
        ready = [ready_rows(rank) for rank in self.ranks]
        steps = self._steps(ready)
        rows, open_prefills, begun = [], [], []
        for rank, plan, rank_ready in zip(self.ranks, plans, ready, strict=True):
            all_decode = len(rank_ready) == len(rank.running)
            choice = self._choose_drafts(rank_ready)
            decodes, had_room = plan_decodes(rank, rank_ready, choice, steps, plan, self.room)
            rows.append(decodes)
            begun.append(0 if all_decode else len(rank.prefilling()))
            open_prefills.append(self.shapes.max_prefill_rows - begun[-1] if had_room else 0)
        for request in self.admission.admit(open_prefills):
            entered(request, plans[request.rank])
        for rank, plan, rank_rows, count in zip(self.ranks, plans, rows, begun, strict=True):
            if count or plan.admissions:
                rank_rows[:0] = plan_prefills(rank, plan, self.config.max_num_batched_tokens)
        if not any(plan.has_rows for plan in plans):
            assert not any(plan.admissions for plan in plans)
            return None
        step = StepPlan(
            step_id=self._next_step,
            ranks=plans,
            prefill_shape=prefill_shape(self.shapes, plans, rows),
            decode_shape=decode_shape(self.shapes, plans, steps),
        )
        self._next_step += 1
        self._in_flight.append((step, rows))
        return step

    def commit(self, result: StepResult) -> list[Progress]:
        """Takes the result of the oldest plan that is out: what it added to each sequence."""
        due = self._in_flight[0][0].step_id if self._in_flight else None
        if result.step_id != due:
            raise ValueError(f"the result of step {result.step_id} comes before that of {due}")
        (_, rows), progress, draining = self._in_flight.popleft(), [], Phase.DRAINING
        for rank, rank_rows, rank_result in zip(self.ranks, rows, result.ranks, strict=True):
            new_tokens, broken = rank_result.prefills + rank_result.decodes, rank_result.broken
            for row, tokens in zip(rank_rows, new_tokens, strict=True):
                request = row[0]
                made = take_row(rank, row, tokens, bool(broken) and request.slot in broken)
                if made is not None:
                    progress.append(made)
                if request.finish_reason is not None or request.phase is draining:
                    self._after(rank, request)
        return progress

    @property
    def num_in_flight(self) -> int:
        """Plans whose results are not known."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or drains."""
        return bool(self._in_flight or self.waiting or any(rank.running for rank in self.ranks))

    # ---- the whole

    @property
    def has_begun(self) -> bool:
        """Whether a sequence runs, drains, or waits to come back after a preemption."""
        held = any(rank.running or rank.draining for rank in self.ranks)
        return held or any(one.num_preemptions for one in self.waiting)

    def preempt_all(self) -> None:
        """Sends every running sequence back to the line, to be computed again."""
        for rank in self.ranks:
            for request in reversed(list(rank.running)):
                self.room.preempt(rank, request)

    def set_weight_version(self, version: int) -> None:
        """From here on all is computed with other weights; what the old ones computed is dropped.

        Raises ValueError while a sequence runs or drains.
        """
        busy = sum(len(rank.running) + len(rank.draining) for rank in self.ranks)
        if busy:
            raise ValueError(f"{busy} sequences still run on weights {self.weight_version}")
        self.weight_version = version
        self.forget_prefixes()
        for request in self.waiting:
            request.set_weight_version(version)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache; running sequences keep their pages."""
        for rank in self.ranks:
            rank.pages.forget_contents()

    def loads(self) -> list[Load]:
        """What each rank holds."""
        return [rank.load() for rank in self.ranks]

    def check(self) -> None:
        """Raises AssertionError unless the books of all ranks balance. O(blocks)."""
        for rank in self.ranks:
            rank.check()
        assert all(one.phase is Phase.WAITING for one in self.waiting)
        alive = {id(one) for group in self._groups.values() for one in group}
        held = [one for rank in self.ranks for one in rank.running + rank.draining]
        unfinished = [one for one in [*held, *self.waiting] if one.finish_reason is None]
        assert all(id(one) in alive for one in unfinished), "a sequence is held by nobody"

    def _steps(self, ready: list[list[Request]]) -> int:
        """Device steps of this dispatch: many when nothing waits for the end of it."""
        if self.shapes.many_steps == 1:
            return 1
        waits = len(self.waiting) or any(
            one.takes_single_steps or one.is_prefilling for r in self.ranks for one in r.running
        )
        draining = any(rank.draining for rank in self.ranks)
        return 1 if waits or draining or not any(ready) else self.shapes.many_steps

    def _after(self, rank: Rank, request: Request) -> None:
        """Moves a sequence on after a result: out of the ranks, or back to the line."""
        if request.phase is Phase.DRAINING and request.steps_in_flight == 0:
            rank.drained(request)
            if request.finish_reason is None:
                self.waiting.add(request)
        if request.finish_reason is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        """Lets a finished sequence go of all that it holds."""
        if request.phase is Phase.RUNNING:
            self.ranks[request.rank].leave(request)
        group = self._groups.get(request.request_id)
        if group and group[0].asked is request.asked and all(one.finish_reason for one in group):
            del self._groups[request.request_id]
