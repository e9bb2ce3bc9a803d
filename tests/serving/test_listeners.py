"""Listeners of a server: one a name, adapters under their own, and the gateway's behind a key."""

import json
import os
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

import minimax_jax
from configs.serving import ServingConfig
from serving.command import loading
from serving.command.flags import parse
from serving.command.listeners import listen
from serving.command.loading import num_blocks
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


@pytest.fixture(scope="module")
def tiny():
    return minimax_jax.load("tiny")


def config(**changes) -> ServingConfig:
    fixed = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16}
    return ServingConfig(**(fixed | {"max_model_len": 2048} | changes))


def test_blocks_are_those_asked_for_or_that_fit_but_none_too_many(tiny, monkeypatch):
    assert num_blocks(tiny, config(num_gpu_blocks_override=300)) == 300
    assert num_blocks(tiny, config()) == 4 * 128
    monkeypatch.setattr(loading, "cache_bytes", lambda share: 200 * tiny.layout.block_bytes + 1)
    assert num_blocks(tiny, config()) == 200


def test_a_cache_that_holds_no_full_sequence_names_the_longest_that_it_would(tiny, monkeypatch):
    """F194."""
    monkeypatch.setattr(loading, "cache_bytes", lambda share: 100 * tiny.layout.block_bytes)
    with pytest.raises(ValueError, match="--max-model-len may be at most 1600"):
        num_blocks(tiny, config())
    assert num_blocks(tiny, config(max_model_len=1600)) == 100


def test_memory_for_the_cache_is_the_share_less_what_is_in_use(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 300}

    monkeypatch.setattr(loading.jax, "local_devices", lambda: [Device()])
    assert loading.cache_bytes(0.9) == 600
    assert loading.cache_bytes(0.2) == 0
