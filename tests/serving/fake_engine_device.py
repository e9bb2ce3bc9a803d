"""The fake device as an engine's `Device`: with masks, drafts, log-probabilities and faults.

A sequence whose request id has a script writes that, token by token; others write what the fake
device's keys say. Either way a token that the mask forbids is replaced by an allowed one.
"""

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from serving.device_api import Mask, Slot
from serving.engine_api import Profile
from serving.scheduling.plan import RankPlan, RankResult, RowLogprobs, StepPlan, StepResult
from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.scheduler import Scheduler
from tests.serving.fake_device import FakeDevice, key_after, next_token


class Step:
    """A dispatched step; it runs when its result is asked for."""

    def __init__(self, device: "EngineDevice", plan: StepPlan, masks: Mapping[Slot, Mask]):
        self._device, self._plan, self._masks = device, plan, masks

    def result(self) -> StepResult:
        return self._device.finish(self._plan, self._masks)


class EngineDevice:
    """`step_s` is what a step takes; `fault` is raised by the next result; `scripts` are tokens by
    request id, `broken` the request ids whose logits are NaN; `good_drafts` of each row are right.
    """

    def __init__(self, num_blocks: int = 64, *, step_s: float = 0.0, good_drafts: int = 2):
        self.num_blocks, self.step_s, self.good_drafts = num_blocks, step_s, good_drafts
        self.scripts: dict[str, list[int]] = {}
        self.fault: Exception | None = None
        self.broken: set[str] = set()
        self.plans: list[StepPlan] = []
        self.masks: list[dict[Slot, Mask]] = []
        self.profiled_at: list[tuple[int, str]] = []  # after so many dispatches
        self.updates: list[object] = []
        self.gate = threading.Event()  # steps wait while it is not set
        self.gate.set()
        self._core: _Core | None = None

    def attach(self, scheduler: Scheduler, **options) -> None:
        self._core = _Core(self, scheduler, **options)

    def dispatch(self, plan: StepPlan, masks: Mapping[Slot, Mask]) -> Step:
        self.plans.append(plan)
        self.masks.append(dict(masks))
        return Step(self, plan, masks)

    def finish(self, plan: StepPlan, masks: Mapping[Slot, Mask]) -> StepResult:
        self.gate.wait()
        time.sleep(self.step_s)
        if self.fault is not None:
            raise self.fault
        assert self._core is not None
        self._core.broken, self._core.step_masks = self.broken, masks
        return self._core.run(plan)

    def check(self, sampling: SamplingParams) -> None:
        if len(sampling.logit_bias) > 3:
            raise ValueError("logit_bias has more than 3 entries")

    def experts(self, rank: int, block_ids: Sequence[int], count: int) -> np.ndarray:
        """Four a token, in one layer: bytes of its key as the pages have it now."""
        assert self._core is not None
        pool, size = self._core.pools[rank], self._core.block_size
        keys = [pool[block_ids[p // size], p % size] for p in range(count)]
        return experts_of(keys)

    def update(self, *, params=None, adapters=None) -> None:
        if params == "misfit":
            raise ValueError("the new weights do not fit the old ones")
        self.updates.append(params)

    def start_profile(self, profile: Profile) -> None:
        self.profiled_at.append((len(self.plans), "start"))

    def stop_profile(self) -> None:
        self.profiled_at.append((len(self.plans), "stop"))


class _Core(FakeDevice):
    """The fake device, whose tokens scripts and masks decide."""

    def __init__(self, outer: EngineDevice, scheduler: Scheduler, **options):
        super().__init__(scheduler, **options)
        self._outer = outer
        self.step_masks: Mapping[Slot, Mask] = {}
        self._drafts: dict[tuple[int, int], list[int]] = {}
        self._starts: dict[int, int] = {}

    def _run_rank(self, rank: int, plan: RankPlan, step: StepPlan) -> RankResult:
        rows = [row.slot for row in plan.prefills] + plan.decode_slots
        entering = {one.slot: len(one.tokens) for one in plan.admissions}
        slots = self.slots[rank]
        self._starts = {
            id_: entering[id_] if id_ in entering else len(slots[id_].tokens) for id_ in rows
        }
        result = super()._run_rank(rank, plan, step)
        drafts = {slot: self._propose(rank, slot) for slot in self._drafting(rank, plan)}
        new = dict(zip(rows, result.prefills + result.decodes, strict=True))
        return RankResult(
            prefills=result.prefills,
            decodes=result.decodes,
            broken=result.broken,
            logprobs={slot: self._logprobs(rank, slot, tokens) for slot, tokens in new.items()},
            prompt_logprobs={row.slot: self._prompt_logprobs(rank, row) for row in plan.prefills},
            drafts=drafts,
            confidences={slot: [0.5] * len(row) for slot, row in drafts.items()},
        )

    def _drafting(self, rank: int, plan: RankPlan) -> list[int]:
        """The slots that get drafts; other rows of the step have none afterwards."""
        if not self._num_drafts:
            return []
        for slot in plan.decode_slots:
            self._drafts.pop((rank, slot), None)
        return [row.slot for row in plan.prefills] + plan.decode_slots * plan.proposes

    @property
    def _num_drafts(self) -> int:
        return self.scheduler.config.num_speculative_tokens

    def _decode(self, rank: int, slot, width: int) -> list[int]:
        self.kept = lambda _: self._matching(rank, slot, width)
        return super()._decode(rank, slot, width)

    def _matching(self, rank: int, slot, width: int) -> int:
        """How many of the proposed drafts are what the sequence writes under its masks."""
        drafts = self._drafts.get((rank, self._id(rank, slot)), ())
        tokens, key = list(slot.tokens), None
        for place in range(width):
            token = self._choose(rank, slot, tokens, key, place)
            if token != drafts[place]:
                return place
            key = key_after(slot.keys[-1] if key is None else key, token)
            tokens.append(token)
        return width

    def _next(self, rank: int, slot) -> int:
        start = self._starts[self._id(rank, slot)]
        return self._choose(rank, slot, slot.tokens, None, len(slot.tokens) - start)

    def _choose(self, rank, slot, tokens: list[int], key: int | None, place: int) -> int:
        mask = self.step_masks.get((rank, self._id(rank, slot)))
        token = self._wanted(slot, tokens, slot.keys[-1] if key is None else key)
        if mask is None:
            return token
        assert place < len(mask), f"no mask for place {place} of a row"
        bits = np.unpackbits(mask[place].view(np.uint8), bitorder="little")
        admission = slot.admission
        if len(tokens) - admission.prompt_length < admission.sampling.min_tokens:
            bits[list(admission.stop_ids)] = 0
        assert bits.any(), "nothing is allowed"
        allowed = np.flatnonzero(bits)
        return token if bits[token] else int(allowed[token % len(allowed)])

    def _wanted(self, slot, tokens: list[int], key: int) -> int:
        script = self._outer.scripts.get(slot.admission.request_id)
        place = len(tokens) - slot.admission.prompt_length
        if script is not None and place < len(script):
            return script[place]
        return next_token(key, slot.admission.seed)

    def _propose(self, rank: int, slot_id: int) -> list[int]:
        """Some right drafts, as far as no mask changes them, and then wrong ones."""
        slot = self.slots[rank][slot_id]
        tokens, key, drafts = list(slot.tokens), slot.keys[-1], []
        for place in range(self._num_drafts):
            token = self._wanted(slot, tokens, key)
            drafts.append(token if place < self._outer.good_drafts else (token + 1) % 50)
            tokens.append(token)
            key = key_after(key, token)
        self._drafts[rank, slot_id] = drafts
        return drafts

    def _logprobs(self, rank: int, slot_id: int, tokens: list[int]) -> RowLogprobs:
        slot = self.slots[rank][slot_id]
        first = len(slot.tokens) - len(tokens)
        return logprobs_of(slot.tokens, range(first, len(slot.tokens)))

    def _prompt_logprobs(self, rank: int, row) -> RowLogprobs:
        slot = self.slots[rank][row.slot]
        last = min(row.start + row.length, slot.admission.prompt_length - 1)
        return logprobs_of(slot.tokens, range(row.start + 1, last + 1))

    def _id(self, rank: int, slot) -> int:
        return next(i for i, one in self.slots[rank].items() if one is slot)


def experts_of(keys: Sequence[int]) -> np.ndarray:
    """What `EngineDevice.experts` says of tokens with these keys, uint8 [tokens, 1, 4]."""
    rows = [list((key & 0xFFFFFFFF).to_bytes(4, "little")) for key in keys]
    return np.array(rows, np.uint8).reshape(len(keys), 1, 4)


def logprobs_of(tokens, positions: range, num_top: int = 5) -> RowLogprobs:
    """That of the token at position p is -p/8; the j-th likeliest is j ids on and j/16 less."""
    return RowLogprobs(
        values=[-p / 8 for p in positions],
        top_ids=[[tokens[p] + j for j in range(num_top)] for p in positions],
        top_values=[[-p / 8 - j / 16 for j in range(num_top)] for p in positions],
    )
