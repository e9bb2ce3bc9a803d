"""Many clients for minutes: they read, hang up, abort and time out, over a pool that is too small
on purpose, while weights change and caches are dropped. Afterwards nothing is left and nothing was
wrong. SOAK_SECONDS says how long (180).
"""

import asyncio
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from configs.server import ServerConfig
from serving.device import ModelDevice
from serving.rpc.server import Server
from serving.rpc.wire_request import asked
from serving.rpc.wire_state import Served
from tests.model.models import random_loaded, small, tokens
from tests.serving.devices import assert_right, config_of
from tests.serving.heap import heap_bytes
from tests.serving.model_engines import engine_over, request_of
from tests.serving.servers import request, run, soon

SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))
CLIENTS = 24
LOADED = random_loaded(small(2, num_tokens=501))
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
GRAMMAR = {"json_schema": SCHEMA, "grammar_from_first_token": True}
STATUSES = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
MAX_BYTES, MAX_OBJECTS = 16 << 20, 50_000  # that the process may grow by


def catalogue(count: int = 40) -> list[dict[str, Any]]:
    """Requests with a seed or greedy, so that each has one right answer."""
    dice, made = random.Random(0), []
    for i in range(count):
        options: dict[str, Any] = {"max_tokens": dice.randrange(1, 60), "seed": i}
        options["temperature"] = dice.choice([0.0, 0.9])
        options |= dice.choice(
            [{}, {}, {"stop": ["e"]}, {"n": 2}, {"logprobs": 2}, {"prompt_logprobs": 1}, GRAMMAR]
        )
        prompt = tokens(dice.choice([1, 20, 60, 150, 300]), seed=i % 5)
        made.append({"prompt": [int(token) for token in prompt], **options})
    return made


@dataclass
class Clients:
    """Many clients of one server, and what they saw."""

    stub: Any
    asks: list[dict[str, Any]]
    cold: list[dict[int, list[int]]] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(2))
    whole: int = 0
    cut: int = 0
    differing: list[tuple[int, dict[int, list[int]]]] = field(default_factory=list)

    async def read(self, index: int, name: str, **call: Any) -> dict[int, list[int]]:
        """The tokens of each sequence."""
        got: dict[int, list[int]] = {}
        message = request(request_id=name, stream=self.dice.random() < 0.7, **self.asks[index])
        async for one in self.stub.Generate(message, **call):
            part = getattr(one, one.WhichOneof("response"))
            ids = part.token_ids if one.HasField("chunk") else part.output_ids
            got.setdefault(part.index, []).extend(ids)
        return got

    async def live(self, number: int, until: float) -> None:
        """One client's requests, one after the other."""
        count = 0
        while time.monotonic() < until:
            count += 1
            name, index = f"{number}/{count}", self.dice.randrange(len(self.asks))
            fate = self.dice.choice(["reads"] * 5 + ["hangs up", "aborts", "times out", "leaves"])
            if fate == "reads":
                got = await self.read(index, name)
                self.whole += 1
                if got != self.cold[index]:
                    self.differing.append((index, got))
            else:
                self.cut += 1
                await getattr(self, f"_{fate.replace(' ', '_')}")(index, name)

    async def _hangs_up(self, index: int, name: str) -> None:
        reading = asyncio.ensure_future(self.read(index, name))
        await asyncio.wait([reading], timeout=self.dice.random())
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _aborts(self, index: int, name: str) -> None:
        reading = asyncio.ensure_future(self.read(index, name))
        await asyncio.wait([reading], timeout=0.5 * self.dice.random())
        await self.stub.Abort(messages.AbortRequest(request_ids=[name]))
        await asyncio.gather(reading, return_exceptions=True)

    async def _times_out(self, index: int, name: str) -> None:
        try:
            await self.read(index, name, timeout=self.dice.random())
        except grpc.aio.AioRpcError as error:
            assert error.code() in STATUSES, error

    async def _leaves(self, index: int, name: str) -> None:
        """Asks and never reads."""
        call = self.stub.Generate(request(request_id=name, **self.asks[index]))
        await asyncio.sleep(0.5 * self.dice.random())
        call.cancel()

    def explain(self) -> int:
        """How many answers differ from a cold run's; each is proven to do so by a tie."""
        for index, got in self.differing:
            message = request(**self.asks[index])
            prompt, stops = self.asks[index]["prompt"], LOADED.tokenizer.stop_ids
            own = asked(message, prompt, eos_token_ids=stops, vocab_size=501)
            for sequence, ids in got.items():
                assert own.sampling.structured_outputs is None, "a grammar's answer differs"
                assert_right(LOADED, request_of(own, sequence, ids))
        return len(self.differing)


async def disturb(engine, until: float) -> int:
    """Changes the weights for themselves, drops the cache and pauses, now and then."""
    dice, count = random.Random(3), 0
    while time.monotonic() < until - 5:
        await asyncio.sleep(2 * dice.random())
        mode = dice.choice(["drain", "recompute", "pause"])
        if mode == "pause":
            await engine.pause()
            await engine.flush(0.0)
            await engine.resume()
        else:
            await engine.update(params=LOADED.model, mode=mode)
        count += 1
    return count


async def measure(until: float) -> list[tuple[int, int]]:
    """Bytes that malloc has handed out, and Python's objects, every second."""
    sizes = []
    while time.monotonic() < until:
        await asyncio.sleep(1)
        gc.collect()
        sizes.append((heap_bytes(), sys.getallocatedblocks()))
    return sizes


def growth(sizes: list[int]) -> float:
    """From the second quarter of the time to the last, by medians."""
    quarter = max(1, len(sizes) // 4)
    return statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter])


async def soak(engine, server: Server, port: int):
    """Cold runs, then everybody at once; what was seen."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        clients = Clients(stub=services.VllmEngineStub(channel), asks=catalogue())
        for index in range(len(clients.asks)):
            clients.cold.append(await clients.read(index, f"cold/{index}"))
            await engine.flush(5.0)
        threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        until = time.monotonic() + SECONDS
        lives = (clients.live(number, until) for number in range(CLIENTS))
        sizes, count, *_ = await asyncio.gather(measure(until), disturb(engine, until), *lives)
        await soon(lambda: not len(server.requests) and not len(engine._ledger), 30)
        new = {one.name for one in set(threading.enumerate()) - threads}
        assert all(name.startswith("grammar-") for name in new), f"threads are left: {new}"
        assert len(os.listdir("/proc/self/fd")) <= files + 2, "a file is left"
        (load,) = engine.loads()
        await soon(lambda: engine.loads()[0].used_tokens == 0, 30)
        assert load.num_waiting == 0 and engine.state.is_healthy
        grammars = engine._requests._readers.grammars
        assert grammars is not None and grammars.num_compiled <= 1
        await server.drain()
        return clients, sizes, count, engine.statistics


@pytest.mark.soak
@pytest.mark.slow
def test_nothing_is_left_and_nothing_was_wrong():
    device = ModelDevice(LOADED, config_of(max_num_seqs=8), num_blocks=48)

    async def test():
        async with engine_over(device, LOADED) as engine:
            server = Server(
                engine, Served(name="m", model_path="m"), ServerConfig(port=0, shutdown_timeout=5)
            )
            port = await server.start()
            try:
                return await soak(engine, server, port)
            finally:
                await server.stop()

    clients, sizes, count, counted = run(test)
    device.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith(("engine", "grammar-")) for name in names), names
    grown_bytes, grown_objects = (growth(list(column)) for column in zip(*sizes, strict=True))
    ties = clients.explain()
    print(
        f"{clients.whole} read, {clients.cut} cut, {count} disturbances, {ties} ties, "
        f"{counted.preemptions} preemptions, {grown_bytes / 2**20:+.1f} MB, "
        f"{grown_objects:+.0f} objects"
    )
    assert clients.whole > SECONDS / 2 and clients.cut > SECONDS / 4 and counted.preemptions > 10
    assert ties <= max(1, clients.whole // 100)
    assert grown_bytes < MAX_BYTES and grown_objects < MAX_OBJECTS
