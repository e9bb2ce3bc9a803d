"""Listeners of a server: one a name, adapters under their own, the gateway's behind a key."""

import json
import os
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from serving.command.flags import parse
from serving.command.listeners import listen
from serving.command.resolve import Machine, resolve
from serving.gateway import check_free
from serving.lifetime import Lifetime
from tests.serving.servers import FakeEngine, request, run, status


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return tmp_path


def resolved(*arguments: str):
    return resolve(parse(["tiny", *arguments]), Machine(platform="cpu", num_devices=1))


def three_free_ports() -> int:
    """The first of three in a row, below those that the system hands out."""
    for first in range(20_000 + os.getpid() % 5000, 32_000, 3):
        try:
            for port in range(first, first + 3):
                check_free("127.0.0.1", port)
        except ValueError:
            continue
        return first
    raise AssertionError("there are no three free ports in a row")


def test_each_name_has_a_listener_and_adapters_come_after_the_model(adapter):
    async def test():
        engine, first = FakeEngine(), three_free_ports()
        flags = ("--port", str(first), "--lora", f"poet={adapter}", f"--lora=cook={adapter}")
        async with Lifetime() as life:
            it = await listen(life, engine, resolved(*flags))
            assert it.ports == {"tiny": first, "poet": first + 1, "cook": first + 2}
            assert it.workers.ports == it.ports  # nothing stands between the gateway and these
            for name, port in it.ports.items():
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    stub = services.VllmEngineStub(channel)
                    info = await stub.GetModelInfo(messages.GetModelInfoRequest())
                    assert info.served_model_name == name
                    assert [one async for one in stub.Generate(request(max_tokens=1))]
            assert [asked.adapter for asked in engine.asked] == [None, "poet", "cook"]
            life.end("")

    run(test)


def test_behind_a_key_the_gateway_has_listeners_of_its_own(adapter):
    async def test():
        flags = ("--port", "0", "--api-key", "sesame", "--lora", f"poet={adapter}")
        async with Lifetime() as life:
            it = await listen(life, FakeEngine(), resolved(*flags))
            assert set(it.ports) == set(it.workers.ports) == {"tiny", "poet"}
            assert not set(it.ports.values()) & set(it.workers.ports.values())
            for port, code in (
                (it.ports["tiny"], grpc.StatusCode.UNAUTHENTICATED),
                (it.workers.ports["tiny"], None),
            ):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    call = services.VllmEngineStub(channel).GetServerInfo(
                        messages.GetServerInfoRequest()
                    )
                    if code is None:
                        assert (await call).block_size == 16
                    else:
                        assert (await status(call))[0] == code

    run(test)


def test_without_http_nothing_is_open_behind_a_key():
    async def test():
        async with Lifetime() as life:
            flags = ("--port", "0", "--api-key", "sesame", "--no-http")
            it = await listen(life, FakeEngine(), resolved(*flags))
            assert it.workers.ports == it.ports

    run(test)
