"""Two processes as one server, on loopback: process 0 answers, both compute."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

import minimax_jax
from minimax_jax.checkpoint import save_model
from minimax_jax.loaded import ASSETS
from serving.scheduling.request import Asked
from serving.scheduling.sampling_params import SamplingParams
from tests.model.models import random_model, small, tokens
from tests.serving.devices import assert_right
from tests.serving.model_engines import request_of
from tests.serving.servers import request

pytestmark = pytest.mark.slow

SMALL = "--max-num-seqs 4 --max-num-batched-tokens 64 --max-model-len 512 --num-scheduler-steps 2"
FLAGS = f"-tp 2 --no-http --port 0 --metrics-port none --log-format json {SMALL}".split()
START_S, END_S = 500.0, 60.0  # generous: cores that others use too
OPTIONS = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.9, "max_tokens": 24, "seed": 5},
    {"temperature": 0.9, "max_tokens": 20, "seed": 6, "presence_penalty": 1.0},
    {"temperature": 0.0, "max_tokens": 20, "logit_bias": {5: 1.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose programs are compiled fast."""
    path = tmp_path_factory.mktemp("two") / "small"
    save_model(random_model(small(2, num_tokens=501)), path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ASSETS / "tiny" / name, path / name)
    return path


@contextmanager
def two_processes(model: Path) -> Iterator[tuple[list[subprocess.Popen], int, Path]]:
    """Both, when they are ready; the port of gRPC; and where process 0 writes its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    place = ["--coordinator", where, "--num-processes", "2", "--process-id"]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{index}.log") for index in range(2)]
        both = []
        for index, log in enumerate(logs):
            command = [sys.executable, "-m", "serving", str(model), *FLAGS, *place, str(index)]
            with log.open("w") as output:
                both.append(subprocess.Popen(command, env=environment, stderr=output))
        try:
            yield both, _port(both, logs), logs[0]
        finally:
            for one in both:
                one.kill()
                one.wait()


def _port(both: list[subprocess.Popen], logs: list[Path]) -> int:
    deadline = time.monotonic() + START_S
    while not (found := re.search(r'"gRPC": "127.0.0.1:([0-9]+) ', logs[0].read_text())):
        run = all(one.poll() is None for one in both) and time.monotonic() < deadline
        assert run, "\n".join(log.read_text() for log in logs)
        time.sleep(0.1)
    return int(found[1])


async def generated(stub, index: int, options: dict) -> list[int]:
    prompt, ids = tokens(20 + 30 * index, seed=index), []
    asked = request(prompt, request_id=f"r{index}", ignore_eos=True, **options)
    async for answer in stub.Generate(asked):
        ids += answer.chunk.token_ids
    return ids


async def aborted(stub) -> str:
    """Why a sequence has ended that is aborted after its first token."""
    asked = request(tokens(9, seed=9), request_id="long", max_tokens=500, ignore_eos=True)
    reason = ""
    async for answer in stub.Generate(asked):
        if answer.HasField("complete"):
            reason = answer.complete.finish_reason
        else:
            await stub.Abort(messages.AbortRequest(request_ids=["long"]))
    return reason


def test_two_processes_answer_as_one_and_end_together(folder):
    async def client(port: int):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = services.VllmEngineStub(channel)
            wholes = await asyncio.gather(
                *(generated(stub, index, options) for index, options in enumerate(OPTIONS))
            )
            return wholes, await aborted(stub)

    with two_processes(folder) as (both, port, log):
        wholes, reason = asyncio.run(client(port))
        both[1].send_signal(signal.SIGTERM)  # which process 0 hears of
        assert [one.wait(END_S) for one in both] == [0, 0], log.read_text()
    assert reason == "abort"
    loaded = minimax_jax.load(folder)
    for index, (options, ids) in enumerate(zip(OPTIONS, wholes, strict=True)):
        assert len(ids) == options["max_tokens"]
        sampling = SamplingParams(**options, ignore_eos=True)
        prompt = tokens(20 + 30 * index, seed=index)
        asked = Asked(request_id=f"r{index}", prompt=prompt, sampling=sampling)
        assert_right(loaded, request_of(asked, 0, ids))


def test_a_process_that_is_killed_ends_the_other_with_a_sentence(folder):
    async def client(port: int, victim: subprocess.Popen):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub, asked = services.VllmEngineStub(channel), request(max_tokens=500)
            async for _ in stub.Generate(asked):
                victim.kill()

    with two_processes(folder) as (both, port, log):
        with pytest.raises(grpc.aio.AioRpcError, match="process 1 has ended|the engine has failed"):
            asyncio.run(client(port, both[1]))
        assert both[0].wait(END_S) == 1
        said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        assert said[-1]["message"] == "process 1 has ended"
