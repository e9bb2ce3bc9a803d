"""Continuous batching: requests in, outputs out, on one event loop; the steps run in a thread.

engine = BatchingEngine(info, ServingConfig(), device, tokenizer=tokenizer)
async for output in engine.submit(asked): ...
await engine.close()
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from configs.serving import ServingConfig
from minimax_jax.chat import Tokenizer
from serving.device_api import Device
from serving.engine.draft_widths import DraftWidths
from serving.engine.grammar_rows import GrammarDesk
from serving.engine.ledger import Ledger
from serving.engine.requests import Readers, Requests
from serving.engine.step_loop import StepLoop
from serving.engine.stops import StopWatches
from serving.engine.streams import Handover, Stream
from serving.engine.thread import EngineThread
from serving.engine.weight_update import Mode, NewWeights
from serving.engine_api import (
    EngineBusyError,
    EngineError,
    EngineInfo,
    EngineState,
    Output,
    Profile,
    RankLoad,
)
from serving.grammar.grammars import GrammarLimits
from serving.kv_feed import KvFeed
from serving.scheduling.cost_table import StepCosts
from serving.scheduling.intake import checked
from serving.scheduling.request import Asked
from serving.scheduling.scheduler import Scheduler
from serving.statistics import Listener, SequenceRecord, Statistics

POLL_S = 0.02  # between two looks whether the engine is idle


class BatchingEngine:
    """`engine_api.Engine` over a scheduler and a device.

    `costs` lets it choose how many drafts a step tests; without them all are. A request names one
    of `adapters`, or none.
    """

    def __init__(
        self,
        info: EngineInfo,
        config: ServingConfig,
        device: Device,
        *,
        tokenizer: Tokenizer | None = None,
        adapters: Sequence[str] = (),
        costs: StepCosts | None = None,
        grammar_limits: GrammarLimits | None = None,
        seed: int = 0,
    ):
        self._info, self._config, self._device = info, config, device
        self._adapters = set(adapters)
        widths = DraftWidths(config.num_speculative_tokens, costs)
        scheduler = Scheduler(
            config,
            device.num_blocks,
            num_ranks=info.data_parallel_size,
            seed=seed,
            choose_drafts=widths if config.num_speculative_tokens else None,
        )
        self._ledger, self._handover = Ledger(scheduler), Handover()
        self._feed = KvFeed(info.data_parallel_size) if config.enable_kv_cache_events else None
        self._listeners: list[Listener] = []
        self._state = EngineState()
        self._steps = StepLoop(scheduler, device, self._ledger, self._handover, widths, self._tell)
        self._requests = Requests(
            self._steps, self._handover, _readers(info, tokenizer, grammar_limits)
        )
        self._thread = EngineThread(self._steps, self._handover, self._is_over)

    # ---- what it is

    @property
    def info(self) -> EngineInfo:
        """What does not change."""
        return self._info

    @property
    def state(self) -> EngineState:
        """Whether it serves."""
        return self._state

    @property
    def statistics(self) -> Statistics:
        """What it has done so far."""
        return self._ledger.statistics

    @property
    def max_waiting(self) -> int:
        """How many sequences may wait."""
        return self._config.max_waiting_requests

    @property
    def kv_events(self) -> KvFeed | None:
        """What happens to the blocks of the prefix cache."""
        return self._feed

    def loads(self) -> Sequence[RankLoad]:
        """The load of each data rank, some hundredths of a second old at most."""
        return self._steps.load.loads

    def listen(self, listener: Listener) -> None:
        """Tells a listener of each step and each end from now on."""
        self._listeners.append(listener)
        self._ledger.listens = True

    # ---- requests

    def submit(self, asked: Asked) -> AsyncIterator[Output]:
        """Queues a request; its outputs. ValueError for what can never run, EngineError while the
        engine does not serve; a grammar's ValueError and QueueFullError come with the first output.
        """
        self._thread.check()
        self._handover.bind()
        return self._requests.enter(self.check(asked))

    def check(self, asked: Asked) -> Asked:
        """What was asked, with its prompt cut as it says. Raises ValueError with a sentence for
        what can never run, but for grammars that cannot be compiled.
        """
        asked = checked(asked, self._config, self._steps.scheduler.ranks)
        self._device.check(asked.sampling)
        self._requests.check(asked)
        if asked.adapter is not None and asked.adapter not in self._adapters:
            names = ", ".join(sorted(self._adapters)) or "none"
            raise ValueError(f"there is no adapter {asked.adapter!r}; those there are: {names}")
        return asked

    def abort(self, request_id: str) -> None:
        """Ends a request's sequences with the reason "abort"; an unknown id is none any more."""
        self._requests.abort(request_id)

    # ---- the whole

    async def flush(self, timeout_s: float) -> None:
        """Drops the prefix cache; waits so long for the engine to be idle or to have paused."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (
            busy := await self._thread.call(self._steps.forget_prefixes)
        ) and loop.time() < deadline:
            await asyncio.sleep(min(POLL_S, deadline - loop.time()))
        if busy:
            raise EngineBusyError(f"{busy} sequences still run after {timeout_s:g} s")

    async def update(
        self, *, params: Any = None, adapters: Mapping[str, Any] | None = None, mode: Mode = "drain"
    ) -> int:
        """Other weights or adapters, and the new weight version; returns when they are in use.

        "drain" lets what has begun end before, "recompute" goes on with the new ones at once. The
        prefix cache is empty afterwards. ValueError, and nothing changed, where they do not fit.
        """
        wanted = NewWeights(params=params, adapters=adapters, mode=mode)
        await self._thread.call(partial(self._steps.weights.begin, wanted))
        version = await asyncio.wrap_future(wanted.future)
        self._adapters |= set(adapters or ())
        return version

    async def pause(self) -> None:
        """Begins no more steps; returns when the last one has ended. All that runs keeps its place
        and its blocks.
        """
        await self._thread.call(partial(self._steps.pause, True))
        self._set_paused(True)
        while await self._thread.call(lambda: self._steps.scheduler.num_in_flight):
            await asyncio.sleep(POLL_S)

    async def resume(self) -> None:
        """Goes on after a pause."""
        await self._thread.call(partial(self._steps.pause, False))
        self._set_paused(False)

    async def start_profile(self, profile: Profile) -> None:
        """Begins to profile; EngineBusyError while another profile runs."""
        await self._thread.call(partial(self._steps.profiling.start, profile))

    async def stop_profile(self) -> str:
        """Ends the profile and writes it; its folder. EngineBusyError where none runs."""
        return await self._thread.call(self._steps.profiling.stop)

    def give_up(self, sentence: str) -> None:
        """Ends every request with this error and serves no more: the devices may never answer."""
        self._thread.give_up(sentence)

    async def close(self) -> None:
        """Aborts what runs, and ends the threads."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """The same where no loop runs, or from another thread than the loop's."""
        self._thread.end()
        self._requests.close()

    # ---- on the loop

    def _set_paused(self, paused: bool) -> None:
        self._state = EngineState(is_paused=paused, message="paused" if paused else "ok")

    def _tell(self, over: list[Stream]) -> None:
        """Passes on what the thread has left for the loop."""
        self._requests.forget(over)
        if self._feed is not None:
            self._ledger.publish(self._feed)
        for record in self._ledger.take_records():
            for listener in self._listeners:
                is_end = isinstance(record, SequenceRecord)
                listener.on_finished(record) if is_end else listener.on_step(record)

    def _is_over(self, error: EngineError) -> None:
        self._state = EngineState(is_healthy=False, message=str(error))
        self._requests.refuse_all(error)


def _readers(
    info: EngineInfo, tokenizer: Tokenizer | None, limits: GrammarLimits | None
) -> Readers:
    if tokenizer is None:
        return Readers()
    waits = info.grammar_waits_for_thought
    grammars = GrammarDesk(tokenizer, info.vocab_size, waits_for_thought=waits, limits=limits)
    return Readers(stops=StopWatches(tokenizer), grammars=grammars)
