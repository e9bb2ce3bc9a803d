"""Engines over the fake device, and what their requests give."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from configs.serving import ServingConfig
from serving.engine import BatchingEngine
from serving.engine_api import EngineInfo, Logprobs, Output
from serving.grammar.grammars import GrammarLimits
from serving.scheduling.request import Asked, Request
from serving.scheduling.sampling_params import SamplingParams, StructuredOutput
from tests.serving.fake_device import cold_run
from tests.serving.fake_engine_device import EngineDevice
from tests.serving.grammars import VOCAB_SIZE, tokenizer
from tests.serving.servers import soon

INFO = EngineInfo(
    max_model_len=512,
    vocab_size=VOCAB_SIZE,
    model_type="minimax_m3",
    architectures=("MiniMaxM3ForCausalLM",),
    eos_token_ids=tokenizer().stop_ids,
    max_num_seqs=8,
    block_size=16,
    kv_cache_dtype="f32",
    model_dtype="float32",
    attention_backend="none",
)
(EOS,) = tokenizer().stop_ids


@dataclass
class Whole:
    """All outputs of one sequence, added up."""

    tokens: list[int] = field(default_factory=list)
    parts: list[Output] = field(default_factory=list)

    @property
    def end(self) -> Output:
        return self.parts[-1]

    @property
    def reason(self) -> str | None:
        return self.end.finish_reason

    def logprobs(self) -> list[tuple[int, float | None, list[int]]]:
        given = [part.logprobs for part in self.parts if part.logprobs is not None]
        return [entry for one in given for entry in entries(one)]


def entries(given: Logprobs) -> list[tuple[int, float | None, list[int]]]:
    tops = [list(ids) for ids in given.top_ids]
    return list(zip(given.token_ids, given.values, tops, strict=True))


@dataclass(kw_only=True)
class Running:
    """An engine and its device."""

    engine: BatchingEngine
    device: EngineDevice

    @property
    def scheduler(self):
        return self.engine._steps.scheduler

    def submit(self, name: str, prompt, *, more=None, **sampling) -> AsyncIterator[Output]:
        return self.engine.submit(asked(name, prompt, more=more, **sampling))

    async def run(self, name: str, prompt, **options) -> list[Whole]:
        """The whole sequences of a request."""
        return await collect(self.submit(name, prompt, **options))

    async def text(self, name: str, text: str, **options) -> Whole:
        """The one sequence of a request that writes this text, one token after the other."""
        self.script(name, text)
        (only,) = await self.run(name, 5, **options)
        return only

    def script(self, name: str, text: str, *, ends: bool = True) -> None:
        self.device.scripts[name] = tokenizer().encode(text) + [EOS] * ends

    async def idle(self) -> None:
        """Waits until nothing runs, and checks that nothing is held."""
        engine, scheduler = self.engine, self.scheduler
        await soon(lambda: not scheduler.has_work and not len(engine._ledger))
        await soon(lambda: all(load.used_tokens == 0 for load in engine.loads()))
        await soon(lambda: not engine._requests._streams)
        scheduler.check()
        assert not engine._requests._compiling and not scheduler._groups
        assert engine._ledger.num_grammars == 0


def asked(name: str, prompt, *, more=None, **sampling) -> Asked:
    prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(**({"max_tokens": 4, "seed": 0} | sampling))
    own = {"eos_token_ids": INFO.eos_token_ids} | (more or {})
    return Asked(request_id=name, prompt=prompt, sampling=params, **own)


async def collect(outputs: AsyncIterator[Output]) -> list[Whole]:
    wholes: dict[int, Whole] = {}
    async for output in outputs:
        whole = wholes.setdefault(output.index, Whole())
        assert whole.tokens == [] or whole.reason is None, "an output after the end"
        whole.tokens += output.token_ids
        whole.parts.append(output)
    return [wholes[index] for index in sorted(wholes)]


@asynccontextmanager
async def running(
    num_blocks: int = 64,
    *,
    step_s: float = 0.0,
    good_drafts: int = 2,
    core: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    waits: bool = True,
    limits: GrammarLimits | None = None,
    **config,
) -> AsyncIterator[Running]:
    defaults = {
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_scheduler_steps": 1,
    }
    device = EngineDevice(num_blocks, step_s=step_s, good_drafts=good_drafts)
    info = replace(INFO, grammar_waits_for_thought=waits)
    options = {"tokenizer": tokenizer(), "grammar_limits": limits} | (engine or {})
    made = BatchingEngine(info, ServingConfig(**(defaults | config)), device, **options)
    device.attach(made._steps.scheduler, **(core or {}))
    try:
        yield Running(engine=made, device=device)
    finally:
        device.gate.set()
        await made.close()


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a test on a loop of its own; afterwards no task and no thread is left."""
    before = set(threading.enumerate())

    async def alone() -> Any:
        result = await test()
        await soon(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        return result

    result = asyncio.run(alone())
    left = {one for one in set(threading.enumerate()) - before if one.is_alive()}
    assert not left, f"threads are left: {left}"
    return result


def grammar(kind: str, text: str, *, from_first_token: bool = True) -> StructuredOutput:
    return StructuredOutput(kind=kind, text=text, from_first_token=from_first_token)  # type: ignore


def ids(text: str) -> Sequence[int]:
    return tokenizer().encode(text)


def alone(prompt, *, index: int = 0, weights: int = 0, **options) -> list[int]:
    """The output tokens of a request that is alone in the world."""
    one = asked("alone", prompt, **options)
    seed = one.sampling.seed or 0
    request = Request(one, index, seed=seed, arrival=0, max_model_len=INFO.max_model_len)
    return cold_run(request, weights)
