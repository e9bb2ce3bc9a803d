"""A listener's limits, its door, and how it goes down."""

import asyncio
import os
import signal
import threading
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from configs.server import ServerConfig
from serving.engine_api import EngineState
from serving.lifetime import Lifetime
from serving.rpc.server import Server
from serving.rpc.service import NAME
from serving.rpc.statuses import MAX_TEXT
from serving.rpc.wire_state import Served
from tests.serving.servers import (
    PATIENCE_S,
    FakeEngine,
    connected,
    refused,
    request,
    run,
    soon,
    status,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MODEL = Served(name="m3.1-flash", model_path="/models/m3")


def probe(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def test_more_requests_than_the_limit_are_turned_away_and_the_others_go_on():
    async def test():
        async with connected(FakeEngine(step_s=0.05), max_concurrent_requests=2) as it:
            calls = [it.stub.Generate(request(request_id=str(i), max_tokens=5)) for i in range(2)]
            await soon(lambda: len(it.server.requests) == 2)
            code, text = await status(it.stub.Generate(request()).read())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert text == "2 requests are being answered, at most 2 can be"
            assert (await it.stub.HealthCheck(messages.HealthCheckRequest())).healthy
            assert [len([one async for one in call]) for call in calls] == [6, 6]
            assert len(await it.generate(max_tokens=1)) == 2

    run(test)


def test_a_full_queue_of_the_engine_is_resource_exhausted():
    code, text = refused("Generate", request(), FakeEngine(most_held=0))
    assert (code, "at most 0 may" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


@pytest.mark.parametrize("length", [64, 65, 640])
def test_a_prompt_over_the_models_length_is_refused_with_both_numbers(length):
    code, text = refused("Generate", request([1] * length))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(length) in text and "max_model_len=64" in text


def test_a_very_long_sentence_is_cut():
    code, text = refused("Generate", request(stop=["x" * 100_000, ""]))
    assert (code, len(text)) == (grpc.StatusCode.INVALID_ARGUMENT, MAX_TEXT)


@pytest.fixture
def token_file(tmp_path) -> str:
    path = tmp_path / "token"
    path.write_text("sesame\n")
    return str(path)


def test_only_calls_with_the_token_come_in_and_probes_need_none(token_file):
    async def code(call) -> grpc.StatusCode:
        return (await status(call))[0]

    async def test():
        async with connected(api_key_file=token_file) as it:
            ask, denied = messages.HealthCheckRequest(), grpc.StatusCode.UNAUTHENTICATED
            health = it.stub.HealthCheck
            assert await code(health(ask)) is denied
            for wrong in ("Bearer other", "sesame", "Bearer sesame ", "Bearer "):
                assert await code(health(ask, metadata=[("authorization", wrong)])) is denied
            assert await code(it.stub.Generate(request()).read()) is denied
            right = [("authorization", "Bearer sesame")]
            assert (await health(ask, metadata=right)).healthy
            call = it.stub.Generate(request(max_tokens=1), metadata=right)
            assert len([one async for one in call]) == 2
            assert len(it.engine.asked) == 1
            answer = await probe(it.channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == SERVING

    run(test)


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff", "né".encode()])
def test_a_token_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        run(lambda: started(api_key_file=str(path)))
    assert "api_key_file" in str(error.value)


async def started(**config) -> None:
    server = Server(FakeEngine(), MODEL, ServerConfig(port=0, **config))
    await server.start()
    await server.stop()


def test_tls_with_and_without_certificates_of_clients(tmp_path):
    authority = trustme.CA()
    own, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client")
    certificate, key, roots = (str(tmp_path / name) for name in ("cert", "key", "roots"))
    own.cert_chain_pems[0].write_to_path(certificate)
    own.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(roots)
    trusted = authority.cert_pem.bytes()
    known = grpc.ssl_channel_credentials(
        trusted, client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
    )
    stranger = grpc.ssl_channel_credentials(trusted)

    async def healthy(port: int, credentials: grpc.ChannelCredentials) -> bool:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub = services.VllmEngineStub(channel)
            return (await stub.HealthCheck(messages.HealthCheckRequest(), timeout=5)).healthy

    async def test():
        files: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key}
        async with connected(**files) as it:
            assert await healthy(it.port, stranger)
            code, _ = await status(it.stub.HealthCheck(messages.HealthCheckRequest()))
            assert code is grpc.StatusCode.UNAVAILABLE
        async with connected(**files, ssl_ca_certs=roots) as it:
            assert await healthy(it.port, known)
            code, _ = await status(healthy(it.port, stranger))
            assert code is grpc.StatusCode.UNAVAILABLE

    run(test)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"port": 70_000}, "port=70000 is not in 0..65535"),
        ({"host": ""}, "host is empty"),
        ({"max_message_bytes": 0}, "max_message_bytes=0 is not at least 1"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout=-1.0 is not"),
        ({"ssl_certfile": "a"}, "ssl_certfile='a' and ssl_keyfile=None go together"),
        ({"ssl_ca_certs": "a"}, "ssl_ca_certs='a' needs ssl_certfile"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields, sentence):
    with pytest.raises(ValueError) as error:
        ServerConfig(**fields)
    assert sentence in str(error.value)


def test_a_taken_port_and_a_missing_certificate_are_one_sentence():
    async def test():
        async with connected() as it:
            taken = Server(FakeEngine(), MODEL, ServerConfig(port=it.port))
            with pytest.raises(ValueError) as error:
                await taken.start()
            assert f"cannot listen on 127.0.0.1:{it.port}" in str(error.value)
        with pytest.raises(ValueError) as error:
            await started(ssl_certfile="/nowhere/cert", ssl_keyfile="/nowhere/key")
        assert "/nowhere/key cannot be read" in str(error.value)

    run(test)


def test_a_listener_for_everyone_says_so(caplog):
    run(lambda: started(host="0.0.0.0"))
    assert "anyone who reaches 0.0.0.0" in caplog.text
    caplog.clear()
    run(started)
    assert not caplog.text


def test_probes_follow_the_engine(monkeypatch):
    monkeypatch.setattr("serving.rpc.server.HEALTH_S", 0.01)

    async def test():
        async with connected() as it:
            watch = probe(it.channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
            assert (await watch.read()).status == SERVING
            it.engine.state = EngineState(is_healthy=False, message="failed")
            assert (await watch.read()).status == NOT_SERVING
            answer = await probe(it.channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == NOT_SERVING
            watch.cancel()

    run(test)


def test_reflection_lists_the_services_and_their_messages():
    async def listening():
        async with connected() as it:
            return await asyncio.to_thread(reflected, it.port)

    def reflected(port: int):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            return database.get_services(), database.FindFileContainingSymbol(NAME)

    names, file = run(listening)
    assert {NAME, "grpc.health.v1.Health"} <= set(names)
    assert "GenerateRequest" in {one.name for one in file.message_type}


def test_a_drain_lets_the_running_end_and_takes_no_more():
    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            watch = probe(it.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            call = it.stub.Generate(request(max_tokens=6))
            await soon(lambda: "r" in it.engine.held)
            draining = asyncio.create_task(it.server.drain())
            assert (await watch.read()).status == NOT_SERVING
            code, text = await status(it.stub.Generate(request(request_id="late")).read())
            assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            health = await it.stub.HealthCheck(messages.HealthCheckRequest())
            assert (health.healthy, health.message) == (False, "shutting down")
            assert [one async for one in call][-1].complete.finish_reason == "length"
            await draining
            assert not it.engine.held

    run(test)


def test_what_still_runs_at_the_deadline_is_aborted_and_told_so():
    async def test():
        async with connected(FakeEngine(step_s=0.05), shutdown_timeout=0.1) as it:
            call = it.stub.Generate(request())
            await soon(lambda: "r" in it.engine.held)
            draining = asyncio.create_task(it.server.drain())
            assert [one async for one in call][-1].complete.finish_reason == "abort"
            await asyncio.wait_for(draining, PATIENCE_S)
            assert not it.engine.held

    run(test)


@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_drains_and_a_second_one_hurries(signals):
    async def test():
        engine = FakeEngine(step_s=0.02)
        server = Server(engine, MODEL, ServerConfig(port=0, shutdown_timeout=30))
        adapter = Served(name="poet", model_path="/models/m3", adapter="poet")
        other = Server(engine, adapter, ServerConfig(port=0, shutdown_timeout=30))
        ports = []
        start = server.start

        async def noted() -> int:
            ports.append(await start())
            return ports[0]

        server.start = noted

        async def lived():
            async with Lifetime() as life:
                await life.start(other)
                await life.start(server)
                await life.ended()

        serving = asyncio.create_task(lived())
        await soon(lambda: bool(ports))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            call = services.VllmEngineStub(channel).Generate(request(max_tokens=20))
            await soon(lambda: "r" in engine.held)
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
            last = [one async for one in call][-1].complete
            await asyncio.wait_for(serving, PATIENCE_S)
        return last.finish_reason

    assert run(test) == ("length" if signals == 1 else "abort")


def test_a_server_that_was_used_and_closed_leaves_no_thread_and_no_file():
    async def test():
        async with connected(FakeEngine(step_s=0.01)) as it:
            calls = [it.stub.Generate(request(request_id=str(i))) for i in range(8)]
            await soon(lambda: len(it.engine.held) == 8)
            for call in calls[::2]:
                call.cancel()
            await it.stub.Abort(messages.AbortRequest(request_ids=["1", "3", "5", "7"]))
            await soon(lambda: not it.engine.held and not len(it.server.requests))

    def counts() -> dict[str, int]:
        return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}

    run(test)  # gRPC starts its own threads once a process
    before = counts()
    for _ in range(3):
        run(test)
    assert counts() == before
