"""The load generator against the real engine: what its prefix cache gives is what it could give."""

import json
import socket
import subprocess
import sys
from contextlib import closing

import pytest

pytestmark = pytest.mark.slow  # a server of its own compiles for minutes where nothing is cached

READY_S, RUN_S = 1200, 900
LIMITS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--max-model-len", "2048")
ONE_POINT = 0.01


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    found, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "serving", "tiny", "--no-http", "--port", str(found)]
    command += [*LIMITS, "--metrics-port", str(metrics)]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield found, metrics
    finally:
        server.terminate()
        server.wait(60)


def bench(port: tuple[int, int], folder, *flags: str) -> dict:
    page = f"http://127.0.0.1:{port[1]}/metrics"
    command = [
        *(sys.executable, "-m", "serving.bench", "--port", str(port[0]), "--metrics-url", page),
        *("--ready-check-timeout-sec", str(READY_S), "--disable-tqdm", *flags),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "r.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S + RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "r.json").read_text())


def test_agents_find_of_the_cache_what_theory_says(port, tmp_path):
    flags = ["--agentic-think-scale", "0.01", "--agentic-turns", "20,30"]
    result = bench(port, tmp_path, "--dataset-name", "agentic", "--max-concurrency", "2", *flags)
    assert result["failed"] == result["cancelled"] == 0
    assert result["num_preemptions"] == 0
    assert 0.7 < result["theoretical_prefix_hit_rate"] < 0.97
    distance = abs(result["prefix_hit_rate"] - result["theoretical_prefix_hit_rate"])
    assert distance < ONE_POINT


def test_random_prompts_find_nothing(port, tmp_path):
    flags = ["--num-prompts", "12", "--input-len", "64", "--output-len", "8", "--ignore-eos"]
    result = bench(port, tmp_path, "--max-concurrency", "4", "--seed", "77", *flags)
    assert (result["completed"], result["total_output_tokens"]) == (12, 96)
    assert result["prefix_hit_rate"] == result["theoretical_prefix_hit_rate"] == 0.0
