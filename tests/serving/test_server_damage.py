"""Damaged, huge and unread messages: each ends with a status, and nothing hangs or is held."""

import asyncio
import random

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from serving.rpc.service import NAME
from tests.serving.servers import PATIENCE_S, FakeEngine, connected, request, run, soon, status

SERVICE = messages.DESCRIPTOR.services_by_name["VllmEngine"]
ENDLESS = {"SubscribeKvEvents"}


def test_a_message_over_the_limit_is_refused_and_the_server_lives():
    async def test():
        async with connected(max_message_bytes=1000) as it:
            code, _ = await status(it.stub.Generate(request([1] * 2000)).read())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await it.generate(max_tokens=1)
            assert len(it.engine.asked) == 1

    run(test)


def test_bytes_that_are_no_message_are_an_invalid_argument():
    async def test():
        async with connected() as it:
            send = it.channel.unary_stream(f"/{NAME}/Generate")
            code, text = await status(send(b"\xff\xff").read())
            assert (code, "2 bytes" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            send = it.channel.unary_unary(f"/{NAME}/Abort")
            assert (await status(send(b"\xff\xff")))[0] is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_fuzzed_messages_end_with_a_status_and_hold_nothing():
    whole = request(
        n=2, seed=5, max_tokens=3, stop=["a"], logprobs=1, logit_bias={3: 1.0}, regex="a+"
    ).SerializeToString()
    generator = random.Random(0)

    async def test():
        async with connected() as it:
            send = it.channel.unary_stream(f"/{NAME}/Generate")
            codes = [await outcome(send, damaged(whole, generator)) for _ in range(400)]
            expected = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
            assert set(codes) == expected, set(codes)
            assert not it.engine.held and len(it.server.requests) == 0
            assert len(await it.generate(max_tokens=1)) == 2

    run(test)


async def outcome(send, raw: bytes) -> grpc.StatusCode:
    call = send(raw, timeout=10)
    try:
        _ = [one async for one in call]
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def damaged(raw: bytes, generator: random.Random) -> bytes:
    """Cuts, flips, repeats or makes up bytes."""
    data = bytearray(raw)
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(data)) if data else 0
        kind = generator.randrange(4)
        if kind == 0:
            del data[place:]
        elif kind == 1 and data:
            data[place] = generator.randrange(256)
        elif kind == 2:
            data[place:place] = generator.randbytes(generator.randint(1, 9))
        else:
            data[place:place] = data[place : place + 12]
    return bytes(data)


@pytest.mark.parametrize("name", sorted({m.name for m in SERVICE.methods} - ENDLESS))
def test_noise_at_any_method_ends_with_a_status_that_we_chose(name):
    generator = random.Random(1)

    async def test():
        async with connected() as it:
            send = it.channel.unary_stream(f"/{NAME}/{name}")
            noise = [generator.randbytes(generator.randint(0, 12)) for _ in range(60)]
            return {await outcome(send, raw) for raw in noise}, it.engine.held

    codes, held = run(test)
    assert not codes & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}, codes
    assert not held


def test_a_client_that_reads_nothing_does_not_hold_up_a_drain(monkeypatch):
    monkeypatch.setattr("serving.rpc.server.ABORT_S", 0.1)

    async def test():
        async with connected(FakeEngine(), shutdown_timeout=0.2) as it:
            call = it.stub.Generate(request(n=100, logprobs=20))
            await soon(lambda: bool(it.engine.held))
            await asyncio.sleep(0.1)
            assert len(it.server.requests) == 1, "the stream ended unread"
            await asyncio.wait_for(it.server.drain(), PATIENCE_S)
            assert not it.engine.held and not len(it.server.requests)
            call.cancel()

    run(test)
