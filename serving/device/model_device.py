"""The device side of the engine: plans in, the steps of a loaded model, results out.

A plan brings what changed (sequences that come in, block-table entries, masks), which small
updates write into the slots; then chunks of prompts run, then the decode rows, once for each
adapter that takes part and as often as the plan has device steps. Nothing here waits: several steps
of a dispatch are calls of one program, whose state never leaves the device.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from configs.serving import ServingConfig
from minimax_jax.cache import Cache
from minimax_jax.loaded import LoadedModel
from minimax_jax.lora import Adapter
from serving.device.adapters import Adapters
from serving.device.arrays import chunks, decode_rows, num_scored, reports_logprobs
from serving.device.compilations import CompilationCounter
from serving.device.placement import check_data_ranks, placed
from serving.device.programs import Call, Programs
from serving.device.residency import Residency
from serving.device.results import DecodePart, Dispatched, PrefillPart, Taken
from serving.device.sampler import Rows
from serving.device.slots import Slots
from serving.device.steps import Chunks, State, decode, prefill
from serving.device.weights import ServedWeights
from serving.device_api import Mask, Slot
from serving.engine_api import Profile
from serving.scheduling.plan import PrefillRow, StepPlan
from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.shapes import Shape, Shapes

Progress = Callable[[str, int, int], None]  # a program, how many are done and how many there are


class ModelDevice:
    """Runs a loaded model on pages of its own; implements `device_api.Device`."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: ServingConfig,
        num_blocks: int,
        *,
        adapters: Mapping[str, Adapter] | None = None,
    ):
        """Raises ValueError with a sentence for what cannot be served."""
        check_data_ranks(loaded.mesh)
        self.config, self.shapes = config, Shapes(config, num_blocks)
        self._num_blocks, self._layout = num_blocks, loaded.layout
        self._place = partial(placed, mesh=loaded.mesh)
        self._programs = Programs(loaded.on_mesh)
        self._counter: CompilationCounter | None = None
        named = Adapters(adapters or {}, loaded.adapter, self._place)
        self._weights = ServedWeights(loaded.model, named)
        vocab_size = loaded.config.vocab_size
        self._top = min(config.max_logprobs, vocab_size)
        slots = self._place(Slots.empty(config.max_num_seqs, config.max_blocks, vocab_size))
        cache = Cache.empty(self._layout, num_blocks, loaded.mesh)
        self._state = State(cache=cache, slots=slots)
        self._residency = Residency(
            self._programs,
            slots,
            num_admitted=self.shapes.max_prefill_rows,
            num_places=1 + config.num_speculative_tokens,
            tokenizer=loaded.tokenizer,
            place=self._place,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def num_programs(self) -> int:
        """How many programs are compiled."""
        return len(self._programs.by_name())

    @property
    def compilations_after_ready(self) -> int:
        """What this process compiled since `warm_up` had ended; 0 before."""
        return 0 if self._counter is None else self._counter.count

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError with a sentence for options that no row can have."""
        self._residency.check(sampling)

    # ---- before the first request

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program that a plan may need."""
        calls = self._warm_up_calls()
        for done, call in enumerate(calls):
            if progress is not None:
                progress(call.name, done, len(calls))
            self._programs.prepare(call)
        if progress is not None:
            progress("ready", len(calls), len(calls))
        self._programs.are_complete = True
        self._counter = CompilationCounter()

    def _warm_up_calls(self) -> list[Call]:
        """A call of each program, of nobody's rows."""
        calls = self._residency.warm_up_calls(self._state.slots)
        for shape in self.shapes.all():
            if shape.kind == "prefill":
                rows, _ = self._chunks([], shape, ())
                calls.append(self._prefill_call(shape, rows, None))
            else:
                rows = self._decode_rows([], shape, ())
                calls.append(self._decode_call(shape, rows, None))
        return list({call.name: call for call in calls}.values())

    def close(self) -> None:
        """Ends what outlives the device: the counter."""
        if self._counter is not None:
            self._counter.close()

    # ---- steps

    def dispatch(self, plan: StepPlan, masks: Mapping[Slot, Mask]) -> Dispatched:
        """Starts a step and does not wait for it; plans come in their order."""
        if len(plan.ranks) != 1:
            raise ValueError(f"the plan has {len(plan.ranks)} data ranks, and the engine runs one")
        [rank] = plan.ranks
        own = {slot: mask for (_, slot), mask in masks.items()}
        slots = self._residency.apply(self._state.slots, rank, own)
        self._state = replace(self._state, slots=slots)
        prefills, decodes = [], []
        if plan.prefill_shape is not None:
            for name, indices in self._by_adapter([row.slot for row in rank.prefills]):
                rows = [rank.prefills[i] for i in indices]
                prefills.append(self._prefill(indices, rows, plan.prefill_shape, name, own))
        if plan.decode_shape is not None:
            for name, indices in self._by_adapter(rank.decode_slots):
                in_slots = [rank.decode_slots[i] for i in indices]
                decodes.append(self._decode(indices, in_slots, plan.decode_shape, name, own))
        return Dispatched(
            step_id=plan.step_id,
            num_prefills=len(rank.prefills),
            num_decodes=len(rank.decode_slots),
            prefills=prefills,
            decodes=decodes,
        )

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
        shape = self.shapes.prefill(tokens=tokens, pages=planned.pages)
        made, places = self._chunks(rows, shape, masked)
        self._state, prefilled = self._programs.run(self._prefill_call(shape, made, adapter))
        residents = [self._residency.residents[row.slot] for row in rows]
        scored = any(map(num_scored, rows, residents))
        taken = Taken.of(
            prefilled.sampled,
            logprobs=any(map(reports_logprobs, residents)),
            prompts=prefilled.prompts if scored else None,
        )
        return PrefillPart(
            indices=indices, rows=rows, places=places, residents=residents, taken=taken
        )

    def _decode(
        self,
        indices: Sequence[int],
        slots: Sequence[int],
        planned: Shape,
        adapter: str | None,
        masked: Collection[int],
    ) -> DecodePart:
        num = len(slots)
        shape = self.shapes.decode(rows=num, tokens=num, pages=planned.pages, steps=planned.steps)
        rows, taken = self._decode_rows(slots, shape, masked), []
        residents = [self._residency.residents[slot] for slot in slots]
        logprobs = any(map(reports_logprobs, residents))
        for _ in range(shape.steps):
            self._state, sampled = self._programs.run(self._decode_call(shape, rows, adapter))
            taken.append(Taken.of(sampled, logprobs=logprobs))
        return DecodePart(indices=indices, residents=residents, taken=taken)

    def _chunks(
        self, rows: Sequence[PrefillRow], shape: Shape, masked: Collection[int]
    ) -> tuple[Chunks, list[int]]:
        return chunks(
            rows,
            self._residency.residents,
            masked,
            shape,
            block_size=self.config.block_size,
            num_slots=self.config.max_num_seqs,
        )

    def _decode_rows(self, slots: Sequence[int], shape: Shape, masked: Collection[int]) -> Rows:
        return decode_rows(
            slots,
            self._residency.residents,
            masked,
            num_rows=shape.rows,
            num_slots=self.config.max_num_seqs,
        )

    def _prefill_call(self, shape: Shape, made: Chunks, adapter: str | None) -> Call:
        name = f"prefill of {shape.tokens} tokens, tables of {shape.pages} blocks"
        return self._call(name, prefill, shape, made, adapter)

    def _decode_call(self, shape: Shape, rows: Rows, adapter: str | None) -> Call:
        name = f"decode of {shape.rows} rows, tables of {shape.pages} blocks"
        return self._call(name, decode, shape, rows, adapter)

    def _call(self, name: str, step: Any, shape: Shape, rows: Any, adapter: str | None) -> Call:
        args = (self._weights.of(adapter), self._state, self._residency.masks, rows)
        static = {"tree": self._weights.tree, "pages": shape.pages, "top": self._top}
        return Call(name=name, step=step, args=args, static=static)

    # ---- other weights, profiles

    def update(self, *, params: Any = None, adapters: Mapping[str, Any] | None = None) -> None:
        """From the next step on another model of the same shapes, or other adapters; those that
        are not named stay. Raises ValueError before anything is changed.
        """
        self._weights.update(params, adapters or {})

    def start_profile(self, profile: Profile) -> None:
        """Begins to profile at once."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(profile.with_python)
        jax.profiler.start_trace(profile.folder, profiler_options=options)

    def stop_profile(self) -> None:
        """Ends the profile and writes it."""
        jax.profiler.stop_trace()
