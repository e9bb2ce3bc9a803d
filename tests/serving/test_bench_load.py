"""The load generator over gRPC, against our real server with an engine that needs no model."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from io import StringIO

import grpc
import pytest
from rich.console import Console

from serving.bench.agents import play_all
from serving.bench.answers import Answer
from serving.bench.asks import Ask, Segment
from serving.bench.client import AskError, Client
from serving.bench.grpc_client import GrpcClient
from serving.bench.load import Load, send_at, until
from serving.bench.options import Sampling, Target
from serving.bench.run import when_ready
from serving.engine_api import Output
from serving.scheduling.request import Asked
from tests.serving.servers import INFO, PATIENCE_S, Connected, FakeEngine, connected, run, soon

LONG = replace(INFO, max_model_len=2048)


class Watched(FakeEngine):
    """Remembers how many requests it held at once, and when each came."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.peak, self.came = 0, []

    def submit(self, asked: Asked) -> AsyncIterator[Output]:
        outputs = super().submit(asked)
        self.peak = max(self.peak, len(self.held))
        self.came.append(time.perf_counter())
        return outputs


def asks(count: int, max_tokens: int = 4, length: int = 8) -> list[Ask]:
    return [
        Ask(
            request_id=f"r{place}",
            segments=(Segment(ids=array("i", [place + 1] * length)),),
            max_tokens=max_tokens,
        )
        for place in range(count)
    ]


def client_of(server: Connected, **target) -> GrpcClient:
    return GrpcClient(Target(port=server.port, **target), Sampling())


async def sent(
    client: Client, requests: Sequence[Ask], limit: int | None = None, times=None, duration=None
) -> Load:
    load = Load(client, max_concurrency=limit)
    times = [0.0] * len(requests) if times is None else times
    await until(send_at(load, requests, times), asyncio.Event(), duration)
    return load


def loaded(engine: FakeEngine, requests: Sequence[Ask], **options) -> list[Answer]:
    """The answers by request id; afterwards the engine holds nothing."""

    async def test():
        target = options.pop("target", {})
        server_options = options.pop("server", {})
        async with connected(engine, **server_options) as server:
            client = client_of(server, **target)
            load = await sent(client, requests, **options)
            await client.close()
            await soon(lambda: not engine.held, PATIENCE_S)
            return sorted(load.answers, key=lambda one: int(one.request_id[1:]))

    return run(test)


def test_an_answer_has_the_tokens_the_times_and_the_totals_of_the_server():
    answer = loaded(FakeEngine(step_s=0.01), asks(1, max_tokens=5))[0]
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (8, 5, 4)
    assert (answer.draft_tokens, answer.accepted_tokens) == (15, 10)
    assert (answer.finish_reason, answer.fate) == ("length", "completed")
    assert sum(answer.counts) == 5
    assert answer.sent < answer.times[0] < answer.ended
    assert answer.times == sorted(answer.times)


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_a_closed_loop_is_never_above_its_concurrency_and_reaches_it(limit):
    engine = Watched(step_s=0.003)
    answers = loaded(engine, asks(20), limit=limit)
    assert {one.fate for one in answers} == {"completed"}
    assert engine.peak == limit


def test_without_a_limit_all_run_at_once():
    engine = Watched(step_s=0.05)
    loaded(engine, asks(12))
    assert engine.peak == 12


def test_an_open_loop_sends_when_it_is_time_whatever_still_runs():
    engine, times = Watched(step_s=0.05), [0.0, 0.1, 0.1, 0.3]
    start = time.perf_counter()
    loaded(engine, asks(4, max_tokens=30), times=times)
    assert all(came - start >= t for came, t in zip(engine.came, times, strict=True))
    assert engine.peak == 4


def test_requests_that_a_full_server_refuses_are_failures_with_the_reason():
    answers = loaded(Watched(step_s=0.02, most_held=2), asks(6))
    failed = [one for one in answers if one.fate == "failed"]
    assert len(failed) == 4
    assert {one.error for one in failed} == {"RESOURCE_EXHAUSTED: 2 requests wait, at most 2 may"}


def test_a_prompt_that_the_server_refuses_fails_alone():
    requests = [*asks(2), replace(asks(1, length=100)[0], request_id="r2")]
    answers = loaded(FakeEngine(), requests)
    assert [one.fate for one in answers] == ["completed", "completed", "failed"]
    assert answers[2].error.startswith("INVALID_ARGUMENT")


def test_a_fault_of_the_engine_is_a_failure():
    engine = FakeEngine()
    engine.fault = "out of luck"
    assert "out of luck" in loaded(engine, asks(1))[0].error


def test_an_answer_that_the_server_aborts_is_a_failure():
    engine = FakeEngine(step_s=0.01)

    async def test():
        async with connected(engine) as server:
            client = client_of(server)
            load = Load(client)
            task = asyncio.create_task(load.send(asks(1, max_tokens=50)[0]))
            await soon(lambda: "r0" in engine.held)
            engine.abort("r0")
            answer = await task
            await client.close()
            return answer

    answer = run(test)
    assert (answer.fate, "abort" in answer.error) == ("failed", True)


def test_a_request_past_its_timeout_is_a_failure_and_freed():
    answers = loaded(
        FakeEngine(step_s=0.05), asks(1, max_tokens=50), target={"request_timeout": 0.2}
    )
    assert answers[0].error.startswith("DEADLINE_EXCEEDED")


def test_what_runs_when_time_is_up_is_cancelled_and_freed_and_no_more_is_sent():
    engine = Watched(step_s=0.05)
    answers = loaded(engine, asks(9, max_tokens=50), limit=3, duration=0.6)
    assert [one.fate for one in answers] == ["cancelled"] * 3
    assert all(one.times and one.ended > one.sent for one in answers)
    assert len(engine.came) == 3


def test_a_token_is_sent_with_every_call(tmp_path):
    file = tmp_path / "key"
    file.write_text("secret")
    server = {"api_key_file": str(file)}
    with_key = loaded(FakeEngine(), asks(1), server=server, target={"api_key": "secret"})
    without = loaded(FakeEngine(), asks(1), server=server)
    assert with_key[0].fate == "completed"
    assert without[0].error.startswith("UNAUTHENTICATED")


def test_facts_come_from_the_server():
    async def test():
        async with connected() as server:
            client = client_of(server)
            facts = await client.facts()
            await client.close()
            return facts

    facts = run(test)
    assert (facts.model, facts.max_model_len, facts.block_size) == ("m3.1-flash", 64, 16)
    assert (facts.vocab_size, facts.stop_ids) == (1000, (7, 9))


def test_flush_drops_the_cache_of_an_idle_server():
    engine = FakeEngine()

    async def test():
        async with connected(engine) as server:
            client = client_of(server)
            await client.flush()
            engine.held["x"] = asyncio.Event()
            with pytest.raises(AskError, match="still run"):
                await client.flush()
            engine.held.clear()
            await client.close()

    run(test)
    assert engine.flushed == 1


def test_a_server_that_is_not_there_is_a_sentence():
    async def test():
        client = GrpcClient(Target(port=1), Sampling())
        try:
            with pytest.raises(ValueError, match="the server does not answer: GetModelInfo"):
                await when_ready(client, 0.0, Console(file=StringIO()))
        finally:
            await client.close()

    run(test)


def test_a_server_that_comes_late_is_waited_for():
    async def test():
        async with connected() as server:
            client, console = client_of(server), Console(file=StringIO())
            calls = iter([AskError("not yet"), None])
            facts = client.facts

            async def late():
                error = next(calls)
                return await (facts() if error is None else _raise(error))

            client.facts = late
            found = await when_ready(client, 30.0, console)
            await client.close()
            return found.model, console.file.getvalue()

    async def _raise(error):
        raise error

    model, said = run(test)
    assert model == "m3.1-flash"
    assert said.count("waiting") == 1


def test_play_all_with_more_lanes_than_sessions_ends():
    async def test():
        await play_all(Load(GrpcClient(Target(port=1), Sampling())), [], lanes=3)

    run(test)


def test_channels_leave_no_task_behind():
    """`run` checks it; here with a call that is cut in the middle."""

    async def test():
        async with connected(FakeEngine(step_s=0.05)) as server:
            client = client_of(server)
            task = asyncio.create_task(Load(client).send(asks(1, max_tokens=40)[0]))
            await soon(lambda: bool(server.engine.held))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await soon(lambda: not server.engine.held)
            await client.close()
            assert client._channel.get_state() == grpc.ChannelConnectivity.SHUTDOWN

    run(test)
