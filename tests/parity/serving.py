"""The command `minimax-serve` as a user runs it: a process, with the gateway in front of it."""

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

READY_S = 400.0  # two cores, and others on them
PATIENCE_S = 2.0  # in which whatever hangs up must be freed
LIMITS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "1024")
FREE_PORTS = ("--http", "0", "--metrics-port", "0")
# Its reply is its thought, a closing marker, and "85" (README).
QUESTION = [{"role": "user", "content": "What is 47 + 38?"}]
THOUGHT, ANSWER = "47+38: 7+8=15, 4+3+1=8", "85"


class Serving:
    """A running server. Ends with SIGTERM."""

    def __init__(self, log: Path, *flags: str, port: int = 0):
        self.log, self.started, self.asked_port = log, time.monotonic(), port
        ports = ("--port", str(port), *FREE_PORTS)
        command = [sys.executable, "-m", "serving", "tiny", *ports, *LIMITS, *flags]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def wait(self) -> None:
        """Until the block is there."""
        deadline = self.started + READY_S
        while " programs " not in self.said and "programs  " not in self.said:
            assert self.process.poll() is None, self.said[-3000:]
            assert time.monotonic() < deadline, self.said[-3000:]
            time.sleep(0.2)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def url(self) -> str:
        """Of HTTP."""
        return self._found(r"HTTP +(http\S+)/v1,")

    @property
    def port(self) -> int:
        """Of gRPC."""
        return int(self._found(r"gRPC +127\.0\.0\.1:(\d+) \("))

    def metric(self, name: str) -> float:
        """A value of the page of metrics, all labels together."""
        with urllib.request.urlopen(self._found(r"metrics +(http\S+)"), timeout=5) as answer:
            page = answer.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        assert values, f"there is no {name}"
        return sum(map(float, values))

    def wait_until_free(self, patience_s: float = PATIENCE_S) -> None:
        """Until no sequence and no block is held; fails when that takes too long."""
        deadline = time.monotonic() + patience_s
        held = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        while any(self.metric(name) for name in held):
            assert time.monotonic() < deadline, "something is still held"
            time.sleep(0.05)

    def wait_until_held(self, count: int) -> None:
        """Until so many run or wait."""
        deadline = time.monotonic() + 20
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while sum(map(self.metric, names)) < count:
            assert time.monotonic() < deadline, f"fewer than {count} are held"
            time.sleep(0.05)

    def _found(self, pattern: str) -> str:
        match = re.search(pattern, self.said)
        assert match is not None, self.said[-2000:]
        return match[1]


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Serving]:
    """A server that is ready; it ends without a fault."""
    pytest.importorskip("smg")
    it = Serving(log, *flags)
    try:
        it.wait()
        yield it
        assert it.end() == 0, it.said[-3000:]
    finally:
        it.process.kill()
        it.process.wait()
