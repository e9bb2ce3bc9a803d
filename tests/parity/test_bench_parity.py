"""The load generator through the real gateway to the real server: what HTTP brings of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.parity.serving import Serving, serving

pytestmark = pytest.mark.parity

RUN_S = 600
ONE_POINT = 0.01
WHAT_GRPC_WOULD_SAY = ("--tokenizer", "tiny", "--block-size", "16", "--agentic-window", "1024")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("serve") / "log") as it:
        yield it


def bench(server: Serving, folder: Path, *flags: str) -> dict:
    url = urlsplit(server.url)
    command = [
        *(sys.executable, "-m", "serving.bench", "--base-url", f"http://{url.netloc}"),
        *(*WHAT_GRPC_WOULD_SAY, "--disable-tqdm", *flags),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "r.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "r.json").read_text())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_agents_find_of_the_cache_what_theory_says_over_http(server, tmp_path, backend):
    flags = ["--dataset-name", "agentic", "--agentic-think-scale", "0.01"]
    flags += ["--agentic-turns", "8,12", "--agentic-sessions", "2", "--max-concurrency", "2"]
    result = bench(server, tmp_path, "--backend", backend, *flags)
    assert result["failed"] == result["cancelled"] == 0 < result["completed"]
    distance = abs(result["prefix_hit_rate"] - result["theoretical_prefix_hit_rate"])
    assert distance < ONE_POINT


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_gateway_says_how_many_tokens_came_and_when(server, tmp_path, backend):
    flags = ["--num-prompts", "4", "--input-len", "50", "--output-len", "40", "--ignore-eos"]
    result = bench(server, tmp_path, "--backend", backend, "--save-detailed", *flags)
    assert (result["completed"], result["output_lens"]) == (4, [40] * 4)
    assert all(length >= 50 for length in result["input_lens"])
    assert all(len(gaps) >= 2 for gaps in result["itls"])
