"""An engine that answers without a model, and a server over it with a client that is connected.

Token k of sequence i after a prompt that ends in p is p + 1 + k + 100 i, up to `max_tokens` or a
stop token; its log-probability is -k, and the j-th likeliest token is j less likely.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from configs.server import ServerConfig
from serving.engine_api import (
    EngineBusyError,
    EngineInfo,
    EngineState,
    Logprobs,
    Output,
    Profile,
    RankLoad,
)
from serving.kv_feed import KvFeed
from serving.rpc.server import Server
from serving.rpc.service import ModelFiles
from serving.rpc.wire_state import Served
from serving.scheduling.intake import QueueFullError
from serving.scheduling.request import Asked, whole_prompt

INFO = EngineInfo(
    max_model_len=64,
    vocab_size=1000,
    model_type="minimax_m3",
    architectures=("MiniMaxM3ForCausalLM",),
    eos_token_ids=(7, 9),
    pad_token_id=3,
    default_sampling={"temperature": 1.0, "top_p": 0.95},
    max_num_seqs=4,
    block_size=16,
    data_parallel_size=2,
    kv_cache_dtype="nvfp4",
    model_dtype="bfloat16",
    attention_backend="pallas",
)
PATIENCE_S = 2.0  # in which whatever hangs up must be freed


class FakeEngine:
    """Deterministic, one token every `step_s` seconds; `held` are the requests with blocks."""

    def __init__(self, *, step_s: float = 0.0, most_held: int = 1000, info: EngineInfo = INFO):
        self.info, self.state = info, EngineState()
        self.kv_events: KvFeed | None = KvFeed(info.data_parallel_size)
        self.held: dict[str, asyncio.Event] = {}
        self.asked: list[Asked] = []
        self.profiles: list[Profile] = []
        self.is_profiling = False
        self.flushed = 0
        self.fault = ""
        self._step_s, self._most_held = step_s, most_held

    def submit(self, asked: Asked) -> AsyncIterator[Output]:
        asked = whole_prompt(asked, self.info.max_model_len)
        if len(self.held) >= self._most_held:
            raise QueueFullError(f"{len(self.held)} requests wait, at most {self._most_held} may")
        self.asked.append(asked)
        self.held[asked.request_id] = asyncio.Event()
        return self._outputs(asked, self.held[asked.request_id])

    def abort(self, request_id: str) -> None:
        aborted = self.held.pop(request_id, None)
        if aborted is not None:
            aborted.set()

    def loads(self) -> Sequence[RankLoad]:
        return [self._load(rank) for rank in range(self.info.data_parallel_size)]

    async def flush(self, timeout_s: float) -> None:
        if self.held:
            raise EngineBusyError(f"{len(self.held)} requests still run after {timeout_s:g} s")
        self.flushed += 1

    async def start_profile(self, profile: Profile) -> None:
        if self.is_profiling:
            raise EngineBusyError("a profile runs already")
        self.is_profiling = True
        self.profiles.append(profile)

    async def stop_profile(self) -> str:
        if not self.is_profiling:
            raise EngineBusyError("no profile runs")
        self.is_profiling = False
        return self.profiles[-1].folder

    def num_tokens(self, asked: Asked) -> int:
        """How many tokens a sequence has unless something ends it."""
        room = self.info.max_model_len - len(asked.prompt)
        most = asked.sampling.max_tokens
        return room if most is None else min(most, room)

    def token(self, asked: Asked, index: int, step: int) -> int:
        """Token `step` of a sequence."""
        return asked.prompt[-1] + 1 + step + 100 * index

    async def _outputs(self, asked: Asked, aborted: asyncio.Event) -> AsyncIterator[Output]:
        most = self.num_tokens(asked)
        running = set(range(asked.sampling.n))
        for step in range(max(most, 1)):
            await asyncio.sleep(self._step_s)
            for index in sorted(running):
                output = self._output(asked, index, step, most, aborted.is_set())
                if output.finish_reason:
                    running.discard(index)
                if not running:
                    self.held.pop(asked.request_id, None)
                yield output
            if not running:
                return

    def _output(self, asked: Asked, index: int, step: int, most: int, is_aborted: bool) -> Output:
        sampling, token = asked.sampling, self.token(asked, index, step)
        first = step == 0 and sampling.prompt_logprobs is not None
        new = () if is_aborted or most == 0 else (token,)
        stops = bool(new) and token in sampling.stop_token_ids
        reason = "stop" if stops else "length" if step + 1 >= most else None
        reason = "error" if self.fault else "abort" if is_aborted else reason
        num_top = sampling.logprobs
        return Output(
            index=index,
            token_ids=new,
            prompt_tokens=len(asked.prompt),
            cached_tokens=len(asked.prompt) // 2,
            logprobs=None if num_top is None else logprobs(new, [-float(step)] * len(new), num_top),
            prompt_logprobs=prompt_logprobs(asked) if first else None,
            finish_reason=reason,
            matched_stop=token if stops else sampling.stop[0] if sampling.stop and reason else None,
            draft_tokens=3 * (step + 1) if reason else 0,
            accepted_tokens=2 * (step + 1) if reason else 0,
            error=self.fault,
        )

    def _load(self, rank: int) -> RankLoad:
        return RankLoad(
            rank=rank,
            num_running=len(self.held),
            num_waiting=3 * rank,
            waiting_uncached_tokens=30 * rank,
            used_tokens=50,
            max_tokens=200,
            max_running=4,
            tokens_per_second=12.5,
            cache_hit_rate=0.75,
        )


def logprobs(tokens: Sequence[int], values: Sequence[float | None], num_top: int) -> Logprobs:
    return Logprobs(
        token_ids=tokens,
        values=values,
        top_ids=[[token + j for j in range(num_top)] for token in tokens],
        top_values=[[(value or 0.0) - j for j in range(num_top)] for value in values],
    )


def prompt_logprobs(asked: Asked) -> Logprobs:
    values = [None, *(-0.5 * k for k in range(1, len(asked.prompt)))]
    return logprobs(asked.prompt, values, asked.sampling.prompt_logprobs or 0)


@dataclass(frozen=True, kw_only=True)
class Connected:
    """A running server, its engine, and a client's channel to it."""

    engine: FakeEngine
    server: Server
    channel: grpc.aio.Channel
    port: int

    @property
    def stub(self) -> Any:
        return services.VllmEngineStub(self.channel)

    async def generate(self, **fields: Any) -> list[Any]:
        return [one async for one in self.stub.Generate(request(**fields))]


@asynccontextmanager
async def connected(
    engine: FakeEngine | None = None,
    *,
    files: ModelFiles | None = None,
    served: Served | None = None,
    **config: Any,
) -> AsyncIterator[Connected]:
    engine = engine or FakeEngine()
    served = served or Served(name="m3.1-flash", model_path="/models/m3")
    server = Server(engine, served, ServerConfig(port=0, **config), files)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield Connected(engine=engine, server=server, channel=channel, port=port)
        finally:
            await server.stop()


def request(
    prompt: Sequence[int] = (10, 20, 30), *, request_id: str = "r", stream: bool = True, **more: Any
) -> Any:
    """A `GenerateRequest`; what is no field of it is one of its sampling parameters."""
    own = {name: more.pop(name) for name in list(more) if name in _OWN}
    return messages.GenerateRequest(
        request_id=request_id,
        tokenized=messages.TokenizedInput(input_ids=prompt),
        stream=stream,
        sampling_params=messages.SamplingParams(**more),
        **own,
    )


_OWN = set(messages.GenerateRequest.DESCRIPTOR.fields_by_name)


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a test's coroutine on a loop of its own and checks that it leaves no task behind."""

    async def alone() -> Any:
        result = await test()
        await soon(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        return result

    return asyncio.run(alone())


async def soon(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Waits until the condition holds; fails when it does not in time."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def status(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """The status and text that a call fails with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call did not fail")


def refused(
    name: str, message: Any, engine: FakeEngine | None = None, **options: Any
) -> tuple[grpc.StatusCode, str]:
    """The status and text with which a server over the engine refuses a call."""

    async def test():
        async with connected(engine, **options) as it:
            call = getattr(it.stub, name)(message)
            return await status(call.read() if hasattr(call, "read") else call)

    return run(test)
