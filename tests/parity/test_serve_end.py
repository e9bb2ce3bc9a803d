"""How `minimax-serve` begins and ends: probes during the start, SIGTERM under load, a gateway that
is killed, a checkpoint that is damaged.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from serving.gateway import free_port
from tests.chat.folders import TINY
from tests.parity.serving import ANSWER, QUESTION, READY_S, Serving

openai = pytest.importorskip("openai")
pytest.importorskip("smg")
pytestmark = pytest.mark.parity

LONG = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def server(tmp_path):
    it = Serving(tmp_path / "log", "--shutdown-timeout", "60", port=free_port("127.0.0.1"))
    yield it
    if it.process.poll() is None:
        it.process.kill()
        it.process.wait()


def chat(client, **options):
    return client.chat.completions.create(model="tiny", messages=QUESTION, **options)


def test_a_server_from_its_start_to_its_end_under_load(server):
    assert_that_it_tells_how_far_it_is(server.asked_port)
    server.wait()
    assert eventually(lambda: health(server.asked_port) == (True, "ok"))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert chat(client, temperature=0.0).choices[0].message.content == ANSWER
        kill_gateway(server)
        assert eventually(lambda: answers(client))
        assert_that_what_runs_ends_well(server, client)


def assert_that_it_tells_how_far_it_is(port: int) -> None:
    """F196: who asks while it loads hears why it does not serve yet."""
    assert eventually(lambda: health(port) is not None, READY_S)
    is_healthy, message = health(port) or (True, "")
    assert not is_healthy
    assert any(word in message for word in ("starting", "loading weights", "compiling"))


def health(port: int) -> tuple[bool, str] | None:
    """What the server says of itself, over a connection of its own; None when it does not."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            ask = services.VllmEngineStub(channel).HealthCheck
            answer = ask(messages.HealthCheckRequest(), timeout=10)
        except grpc.RpcError:
            return None
    return answer.healthy, answer.message


def assert_that_what_runs_ends_well(server: Serving, client) -> None:
    """SIGTERM: streams go on to their end, new requests are turned away, the code is 0."""
    streams = [chat(client, stream=True, **LONG) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: "draining" in server.said)
    with pytest.raises(openai.APIError):
        chat(client)
    for stream in streams:
        ends = [c.choices[0].finish_reason for c in stream if c.choices]
        assert ends[-1] == "length"
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.said


def kill_gateway(server: Serving) -> None:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    [gateway] = map(int, children.split())
    os.kill(gateway, signal.SIGKILL)
    assert eventually(lambda: "the gateway ended with code -9" in server.said)


def answers(client) -> bool:
    try:
        return bool(chat(client, max_tokens=2))
    except openai.APIError:
        return False


def eventually(condition, patience_s: float = 20.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_damaged_checkpoint_is_one_sentence_and_code_1(tmp_path):
    """F196."""
    folder = tmp_path / "damaged"
    shutil.copytree(TINY, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    command = [sys.executable, "-m", "serving", str(folder), "--port", "0", "--no-http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("minimax-serve: ") and "model.safetensors" in last
    assert "Traceback" not in done.stderr


def test_a_signal_during_the_start_ends_it_at_once(tmp_path):
    it = Serving(tmp_path / "log")
    assert eventually(lambda: "loading weights" in it.said, READY_S)
    since = time.monotonic()
    assert it.end() == 130
    assert time.monotonic() - since < 10
    assert "Traceback" not in it.said
