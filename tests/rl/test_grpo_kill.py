"""A run that is killed outright goes on, in a new process, to the curve it would have had."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimax_jax.peft import MATRICES
from rl.grpo_export import ADAPTER
from rl.run_log import read_log

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS, SAVED, KILLED = 10, 2, 3  # killed after a step that no checkpoint has
TRAIN = f"""
import sys
from pathlib import Path
from rl.grpo import train_grpo
from tests.rl.test_grpo_run import QUIET, toy_run

run = toy_run(Path(sys.argv[1]), steps={STEPS}, save_every={SAVED})
train_grpo(run, QUIET, resume=len(sys.argv) > 2)
"""
LIMIT_S = 600


def started(out: Path, *resume: str) -> subprocess.Popen:
    # one cache of programs for all three processes, so that two of them compile nothing
    programs = {"JAX_COMPILATION_CACHE_DIR": str(out.parent / "programs")}
    environment = {**os.environ, **programs}
    return subprocess.Popen([sys.executable, "-c", TRAIN, out, *resume], cwd=ROOT, env=environment)


def curve(out: Path) -> list[dict]:
    timed = ("timing", "perf/", "seconds", "tokens_per_second")
    return [
        {name: value for name, value in record.items() if not name.startswith(timed)}
        for record in read_log(out / "train.jsonl")
    ]


def killed(out: Path) -> int:
    """Kills a run soon after a step of its own; the last step that its log holds then."""
    process, end = started(out), time.monotonic() + LIMIT_S
    try:
        while not (out / "checkpoints" / str(SAVED)).is_dir() or last_step(out) < KILLED:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return last_step(out)


def last_step(out: Path) -> int:
    return max((record["step"] for record in read_log(out / "train.jsonl")), default=0)


def test_a_killed_run_goes_on_to_the_same_curve(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert started(straight).wait(LIMIT_S) == 0
    assert KILLED <= killed(broken) < STEPS
    assert not (broken / ADAPTER).exists()
    assert started(broken, "--resume").wait(LIMIT_S) == 0
    assert [record["step"] for record in curve(broken)] == [0, *range(1, STEPS + 1), STEPS]
    assert curve(broken) == curve(straight)
    one, other = (out / ADAPTER / MATRICES for out in (straight, broken))
    assert one.read_bytes() == other.read_bytes()
