"""The gateway's supervisor over a process that stands in for it."""

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from configs.gateway import GatewayConfig
from configs.server import ServerConfig
from serving import gateway as module
from serving import gateway_process
from serving.gateway import Gateway, Workers, check_free, check_installed, free_port
from serving.gateway_probe import Probe
from tests.serving import stand_in_gateway
from tests.serving.servers import run, soon

WORKERS = Workers(ports={"m": 5001, "poet": 5002}, aliases=["gpt"])
PATIENCE_S = 10.0  # a process starts in less


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(gateway_process, "__file__", stand_in_gateway.__file__)
    monkeypatch.setattr(module, "check_installed", lambda: None)
    monkeypatch.setattr(module, "DELAYS_S", (0.01, 0.02))


@asynccontextmanager
async def started(config: GatewayConfig | None = None, **server):
    gateway = Gateway(config or GatewayConfig(http=0), ServerConfig(**server), WORKERS)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


def arguments_of(caplog) -> list[list[str]]:
    texts = [r.getMessage() for r in caplog.records]
    found = [t.removeprefix("arguments arguments=") for t in texts if t.startswith("arguments ")]
    return [json.loads(one) for one in found]


def test_it_is_configured_for_our_workers_and_answers_once_started(caplog):
    caplog.set_level(logging.INFO)

    async def test():
        async with started(shutdown_timeout=12) as gateway:
            assert re.fullmatch("http://127.0.0.1:[0-9]+", gateway.url)

    run(test)
    [arguments] = arguments_of(caplog)
    assert arguments[0] == "launch"
    assert arguments[arguments.index("--worker-urls") + 1 :] == [
        "grpc://127.0.0.1:5001",
        "grpc://127.0.0.1:5002",
    ]
    value = dict(itertools.pairwise(arguments))
    assert value["--reasoning-parser"] == value["--tool-call-parser"] == "minimax_m3"
    assert value["--model-alias"] == "gpt=m"
    assert value["--shutdown-grace-period-secs"] == "13"
    assert "--api-key" not in value and "--tls-cert-path" not in value
    assert len(value["--control-plane-api-keys"]) > 64  # so that nobody guesses it


def test_its_log_joins_ours_without_banner_and_noise(caplog):
    caplog.set_level(logging.INFO)

    async def test():
        async with started():
            pass

    run(test)
    ours = [r for r in caplog.records if r.name == "serving.gateway"]
    assert {r.levelname for r in ours} == {"INFO"}
    assert not any("banner" in r.getMessage() or "images" in r.getMessage() for r in ours)


def test_a_key_reaches_it_but_not_the_list_of_processes(caplog):
    caplog.set_level(logging.INFO)

    async def test():
        async with started(api_key="sesame") as gateway:
            assert gateway._process is not None
            shown = Path(f"/proc/{gateway._process.pid}/cmdline").read_text()
            assert "sesame" not in shown and stand_in_gateway.__file__ in shown

    run(test)
    [arguments] = arguments_of(caplog)
    assert arguments[arguments.index("--api-key") + 1] == "sesame"


def test_it_starts_again_when_it_ends_by_itself(caplog):
    async def test():
        async with started() as gateway:
            for times in (1, 2):
                await asyncio.to_thread(gateway._probe._ask, "/v1/tokenize", {"model": "die"})
                await soon(lambda times=times: gateway.restarts == times, PATIENCE_S)
                await soon(lambda: gateway._probe.knows(["m"]), PATIENCE_S)

    run(test)
    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert [one for one in said if "starts again" in one] == [
        "the gateway ended with code 7; it starts again in 0.01 s",
        "the gateway ended with code 7; it starts again in 0.02 s",
    ]


def test_one_that_cannot_start_is_a_sentence():
    async def test():
        with pytest.raises(ValueError, match=r"the gateway on port [0-9]+ ended with code 3; its"):
            async with started(GatewayConfig(http=0, reasoning_parser="broken")):
                pass

    run(test)


def test_one_that_is_silent_is_ended(monkeypatch):
    monkeypatch.setattr(module, "READY_S", 0.3)
    monkeypatch.setattr(Probe, "knows", lambda self, names: False)

    async def test():
        gateway = Gateway(GatewayConfig(http=0), ServerConfig(), WORKERS)
        with pytest.raises(ValueError, match=r"the gateway on port [0-9]+ was silent for 0.3 s"):
            await gateway.start()
        assert gateway._process is None

    run(test)


def test_a_taken_port_is_a_sentence():
    async def test():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: "):
                async with started(GatewayConfig(http=port)):
                    pass

    run(test)
    check_free("127.0.0.1", free_port("127.0.0.1"))


def test_draining_ends_it_in_peace_and_does_not_start_it_again(caplog):
    caplog.set_level(logging.DEBUG)

    async def test():
        async with started() as gateway:
            await gateway.drain()
            assert gateway._process is not None
            assert await asyncio.wait_for(gateway._process.wait(), PATIENCE_S) == 0
            await asyncio.sleep(0.1)
            assert gateway.restarts == 0

    run(test)
    assert any(r.getMessage() == "left in peace" for r in caplog.records)


def test_one_that_does_not_listen_to_us_is_ended_by_force(monkeypatch):
    monkeypatch.setattr(module, "LEAVE_S", 0.05)

    async def test():
        async with started() as gateway:
            assert gateway._process is not None
            process = gateway._process
            os.kill(process.pid, signal.SIGSTOP)
        assert process.returncode == -signal.SIGKILL

    run(test)


def test_a_missing_package_is_one_sentence_with_the_line_that_installs_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(ValueError, match=r"pip install 'smg==1.13.0', or --no-http for gRPC"):
        check_installed()


def test_the_process_ends_when_ours_is_killed(tmp_path: Path):
    """kill -9 leaves no gateway behind that would hold the port."""
    program = textwrap.dedent(
        f"""
        import json, subprocess, sys, time
        child = subprocess.Popen([sys.executable, {stand_in_gateway.__file__!r}],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        arguments = ["launch", "--reasoning-parser", "p", "--host", "127.0.0.1", "--port", "0"]
        child.stdin.write(json.dumps(arguments).encode() + b"\\n")
        child.stdin.flush()
        print(child.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    while is_running(child):
        assert time.monotonic() < deadline, "the gateway is still there"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("host", "with_tls", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:80"),
        ("0.0.0.0", True, "https://127.0.0.1:80"),
        ("::", False, "http://[::1]:80"),
        ("192.0.2.7", False, "http://192.0.2.7:80"),
    ],
)
def test_a_probe_asks_where_this_machine_can_reach_it(host, with_tls, url):
    assert Probe(host=host, port=80, with_tls=with_tls).url == url


def test_a_probe_of_nothing_knows_nothing():
    assert not Probe(host="127.0.0.1", port=free_port("127.0.0.1")).knows(["m"])
