"""The device side of the engine: plans in, the steps of a loaded model, results out.

A plan brings what changed (sequences that come in, block-table entries, masks), which small
updates write into the slots; then chunks of prompts run, then the decode rows, once for each
adapter that takes part and as often as the plan has device steps. Nothing here waits: several steps
of a dispatch are calls of one program, whose state never leaves the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from configs.serving import ServingConfig
from minimax_jax.cache import Cache
from minimax_jax.loaded import LoadedModel
from minimax_jax.lora import Adapter
from serving.device.adapters import Adapters
from serving.device.calls import StepCalls
from serving.device.compilations import CompilationCounter
from serving.device.drafts import no_proposal, speculation_of
from serving.device.kept import Kept
from serving.device.placement import by_rank, everywhere, num_data_ranks
from serving.device.programs import Call, Programs
from serving.device.residency import Residency
from serving.device.results import Dispatched, Survivals
from serving.device.routing_records import RoutingRecords
from serving.device.slots import Slots
from serving.device.step_runner import StepRunner
from serving.device.steps import State
from serving.device.weights import ServedWeights
from serving.device_api import Mask, Others, Slot
from serving.engine_api import Profile
from serving.scheduling.plan import StepPlan
from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.shapes import Shapes

Progress = Callable[[str, int, int], None]


class ModelDevice:
    """Runs a loaded model on pages of its own; implements `device_api.Device`."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: ServingConfig,
        num_blocks: int,
        *,
        adapters: Mapping[str, Adapter] | None = None,
        others: Others | None = None,
    ):
        """Raises ValueError with a sentence for what cannot be served."""
        self.config, self.shapes = config, Shapes(config, num_blocks)
        self._num_blocks, self._others = num_blocks, others
        num_ranks = self._num_ranks = num_data_ranks(loaded.mesh)
        self._programs = Programs(loaded.on_mesh)
        self._counter: CompilationCounter | None = None
        place = partial(everywhere, mesh=loaded.mesh)
        named = Adapters(adapters or {}, loaded.adapter, place)
        speculation = speculation_of(loaded, config.num_speculative_tokens)
        drafter = None if speculation is None else speculation.drafter
        self._weights = ServedWeights(loaded.model, drafter, named)
        self._survivals = None
        if speculation is not None:
            self._survivals = Survivals(
                temperatures=speculation.calibration.temperatures,
                num_drafts=config.num_speculative_tokens,
            )
        vocab_size, num_slots = loaded.config.vocab_size, config.max_num_seqs
        self._residency = Residency(
            num_ranks=num_ranks,
            num_slots=num_slots,
            num_admitted=self.shapes.max_prefill_rows,
            num_places=1 + config.num_speculative_tokens,
            vocab_size=vocab_size,
            tokenizer=loaded.tokenizer,
        )
        slots = Slots.empty(num_ranks * num_slots, config.max_blocks, vocab_size)
        if drafter is not None:
            proposal = no_proposal(loaded.model, drafter, slots.num_slots)
            slots = replace(slots, proposal=proposal)
        cache = Cache.empty(loaded.layout, num_blocks, loaded.mesh, loaded.page_ranks)
        self._kept = Kept(
            self._programs,
            self._weights,
            State(cache=cache, slots=by_rank(slots, loaded.mesh)),
            by_rank(np.zeros(self._residency.mask_shape, np.uint32), loaded.mesh),
            others,
        )
        self._calls = StepCalls(
            config,
            self._weights,
            self._residency,
            block_size=loaded.layout.block_size,
            top=min(config.max_logprobs, vocab_size),
            method=None if speculation is None else speculation.config.draft_sample_method,
            num_places=1 if drafter is None else 1 + drafter.config.draft_block,
        )
        self._runner = StepRunner(self._kept, self.shapes, self._calls, self._residency)
        self._records = None
        if config.enable_return_routed_experts:
            self._records = RoutingRecords(loaded.config, num_ranks, num_blocks, loaded.page_ranks)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def num_programs(self) -> int:
        """How many programs are compiled."""
        return len(self.programs)

    @property
    def programs(self) -> Mapping[str, jax.stages.Compiled]:
        """What is compiled, by name."""
        return self._programs.by_name()

    @property
    def compilations_after_ready(self) -> int:
        """What this process compiled since `warm_up` had ended; 0 before."""
        return 0 if self._counter is None else self._counter.count

    @property
    def slot_bytes(self) -> int:
        """What each device keeps beside the weights and the pool."""
        return self._kept.num_bytes

    @property
    def record_bytes(self) -> int:
        """What records of experts take of the host's memory."""
        return 0 if self._records is None else self._records.num_bytes

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError with a sentence for options that no row can have."""
        self._residency.check(sampling)

    # ---- before the first request

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program that a plan may need, with every option that a request may have.

        `progress` hears of each one when it is done: its name, how many are, how many there are.
        """
        calls, done = self.calls(), list[str]()

        def tell(name: str) -> None:
            done.append(name)
            if progress is not None:
                progress(name, len(done), len(calls))

        arguments = map(self._kept.arguments, calls.values())
        self._programs.complete(list(zip(calls.values(), arguments, strict=True)), tell)
        self._counter = CompilationCounter()

    def calls(self) -> dict[str, Call]:
        """A call of each program that a plan may need, by name, in which nobody takes part."""
        calls = self._residency.warm_up_calls()
        calls += chain.from_iterable(map(self._calls.empty, self.shapes.all()))
        return {call.name: call for call in calls}

    def largest_temporaries(self, num_blocks: int) -> int:
        """Bytes that the largest steps of each kind take while they run, of a pool of so many
        blocks, which may be more than there are here: a small pool has no large steps. Compiles
        them.
        """
        shapes = Shapes(self.config, num_blocks)
        largest = {shape.kind: shape for shape in sorted(shapes.all())}
        sizes = []
        for shape in largest.values():
            call = self._calls.empty(shape)[-1]  # the form with more to do
            needs = self._programs.prepare(call, self._kept.arguments(call)).memory_analysis()
            assert needs is not None, "this backend tells nothing of a program's memory"
            results = needs.output_size_in_bytes - needs.alias_size_in_bytes
            sizes.append(needs.temp_size_in_bytes + results)
        return max(sizes)

    def close(self) -> None:
        """Frees the pages and the slots, whoever still refers to the device, and ends the counter.
        Nothing runs any more.
        """
        self._kept.free()
        if self._counter is not None:
            self._counter.close()

    # ---- steps

    def dispatch(self, plan: StepPlan, masks: Mapping[Slot, Mask]) -> Dispatched:
        """Starts a step and does not wait for it; plans come in their order."""
        if len(plan.ranks) != self._num_ranks:
            raise ValueError(
                f"the plan has {len(plan.ranks)} data ranks, and the device {self._num_ranks}"
            )
        for call in self._residency.update_calls(plan.ranks, masks):
            self._kept.run(call)
        prefills, decodes = [], []
        if plan.prefill_shape is not None:
            prefills = self._runner.prefills(plan.ranks, plan.prefill_shape, masks)
        if plan.decode_shape is not None:
            decodes = self._runner.decodes(plan.ranks, plan.decode_shape, masks)
        return Dispatched(
            step_id=plan.step_id,
            num_rows=[(len(part.prefills), len(part.decode_slots)) for part in plan.ranks],
            prefills=prefills,
            decodes=decodes,
            survivals=self._survivals,
            records=self._records,
        )

    def experts(self, rank: int, block_ids: Sequence[int], count: int) -> np.ndarray:
        """The experts of the first `count` tokens in a rank's blocks, by the steps whose results
        were asked for; only where `enable_return_routed_experts` is on.
        """
        assert self._records is not None
        return self._records.of(rank, block_ids, count)

    def run(self, call: Call, times: int) -> None:
        """Runs a call that another process has made, of one of `calls`."""
        self._kept.run(call, times)

    # ---- other weights, profiles

    def update(self, *, params: Any = None, adapters: Mapping[str, Any] | None = None) -> None:
        """From the next step on another model of the same shapes, or other adapters; those that
        are not named stay. Raises ValueError before anything is changed.
        """
        if self._others is not None and params is not None:
            raise ValueError(
                "with several processes adapters can be changed, and whole weights cannot, since "
                "each process would have to read its shards anew: start them with the new model"
            )
        self._weights.update(params, adapters or {})
        if self._others is not None:
            self._others.update(adapters or {})

    def start_profile(self, profile: Profile) -> None:
        """Begins to profile at once."""
        if self._others is not None:
            self._others.start_profile(profile)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(profile.with_python)
        jax.profiler.start_trace(profile.folder, profiler_options=options)

    def stop_profile(self) -> None:
        """Ends the profile and writes it."""
        if self._others is not None:
            self._others.stop_profile()
        jax.profiler.stop_trace()
