"""The `smg` gateway in front of our listeners: it answers OpenAI's and Anthropic's clients.

It is started once the listeners serve, with a worker for each, and watched: its log joins ours, an
end that nobody asked for is followed by a new start, later each time, and it drains when we do.
"""

import asyncio
import json
import logging
import socket
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from secrets import token_hex

from configs.gateway import GatewayConfig
from configs.server import ServerConfig
from serving import gateway_process
from serving.gateway_probe import Probe
from serving.rpc.door import read_token

LOG = logging.getLogger(__name__)
PACKAGE = "smg==1.13.0"  # the version whose behaviour the tests hold it to
READY_S = 60.0  # from its start until it answers
STEADY_S = 60.0  # after which an end counts as the first one again
DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before the next start
LEAVE_S = 1.0  # for the last bytes; by itself it would wait 3 s for load balancers
LONG_S = 24 * 3600  # thoughts about a million tokens take their time
MAX_LINE = 1 << 20
KNOWN = "SECURITY POSTURE"
LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40}


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The served names with the loopback ports of their listeners, and more names for the first."""

    ports: Mapping[str, int]
    aliases: Sequence[str] = ()

    @property
    def urls(self) -> list[str]:
        """Where the gateway finds them."""
        return [f"grpc://127.0.0.1:{port}" for port in self.ports.values()]


class Gateway:
    """One gateway, started again whenever it ends. `server` has host, key and certificates."""

    def __init__(self, config: GatewayConfig, server: ServerConfig, workers: Workers):
        check_installed()
        self._config, self._server, self._workers = config, server, workers
        self._token = read_token(server)
        self._port = config.http or free_port(server.host)
        self._process: Process | None = None
        self._is_leaving = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts = 0

    @property
    def url(self) -> str:
        """Of its API, for this machine."""
        return self._probe.url

    async def start(self) -> int:
        """Starts it and waits until it answers for every name; the port. Raises ValueError with a
        sentence when it does not.
        """
        check_free(self._server.host, self._port)
        try:
            await self._launch()
        except ValueError:
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._keep_up())
        return self._port

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Takes no new requests. Those that run end as the listeners behind it let them."""
        self._is_leaving.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stop(self) -> None:
        """Ends it: at once when it was drained, else by force a moment later."""
        await self.drain()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), LEAVE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    @property
    def _probe(self) -> Probe:
        return Probe(
            host=self._server.host,
            port=self._port,
            with_tls=self._server.ssl_certfile is not None,
            token=self._token,
        )

    async def _launch(self) -> None:
        command = (sys.executable, gateway_process.__file__)
        # A session of its own: ^C in the terminal is for us, who then drain it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, limit=MAX_LINE, start_new_session=True
        )
        self._process = process
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(_join_log(process, self._is_leaving)))
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._arguments()).encode() + b"\n")
        await process.stdin.drain()
        await self._answers(process)

    async def _answers(self, process: Process) -> None:
        deadline = time.monotonic() + READY_S
        while process.returncode is None and time.monotonic() < deadline:
            if await asyncio.to_thread(self._probe.knows, list(self._workers.ports)):
                return
            await asyncio.sleep(0.1)
        reason = f"ended with code {process.returncode}"
        if process.returncode is None:
            reason = f"was silent for {READY_S:g} s"
            process.kill()
        raise ValueError(f"the gateway on port {self._port} {reason}; its log is above")

    async def _keep_up(self) -> None:
        failures = 0
        while True:
            assert self._process is not None
            started = time.monotonic()
            code = await self._process.wait()
            failures = 0 if time.monotonic() - started > STEADY_S else failures
            delay = DELAYS_S[min(failures, len(DELAYS_S) - 1)]
            LOG.error("the gateway ended with code %s; it starts again in %g s", code, delay)
            await asyncio.sleep(delay)
            failures, self.restarts = failures + 1, self.restarts + 1
            try:
                await self._launch()
            except ValueError as error:
                LOG.error("%s", error)

    def _arguments(self) -> list[str]:
        config, server = self._config, self._server
        options: dict[str, object] = {
            "host": server.host,
            "port": self._port,
            "prometheus-host": "127.0.0.1",
            "prometheus-port": free_port("127.0.0.1"),
            "reasoning-parser": config.reasoning_parser,
            "tool-call-parser": config.tool_call_parser,
            "log-level": "info" if LOG.isEnabledFor(logging.DEBUG) else "warn",
            "max-payload-size": server.max_message_bytes,
            "request-timeout-secs": LONG_S,
            "shutdown-grace-period-secs": int(server.shutdown_timeout) + 1,
            "worker-startup-check-interval": 1,
            "health-check-interval-secs": 5,
            # One worker a name: there is no other to turn to while one is slow, so slowness and
            # errors are the engine's to tell.
            "policy": "round_robin",
            "worker-wedge-secs": LONG_S,
            # Which workers there are is ours to say: nobody has this key.
            "control-plane-api-keys": f"own:{__name__}:admin:{token_hex(32)}",
            "chat-template": config.chat_template,
            "api-key": self._token,
            "tls-cert-path": server.ssl_certfile,
            "tls-key-path": server.ssl_keyfile,
        }
        given = {name: value for name, value in options.items() if value is not None}
        pairs = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        switches = ["--log-json", "--disable-circuit-breaker", "--disable-retries"]
        first = next(iter(self._workers.ports))
        names = [t for a in self._workers.aliases for t in ("--model-alias", f"{a}={first}")]
        return ["launch", *pairs, *switches, *names, "--worker-urls", *self._workers.urls]


def check_installed() -> None:
    """Raises ValueError with the line that installs the gateway where it is missing."""
    try:
        found = version("smg")
    except PackageNotFoundError as error:
        line = f"pip install '{PACKAGE}'"
        raise ValueError(f"HTTP needs the gateway: {line}, or --no-http for gRPC alone") from error
    LOG.debug("smg %s is installed", found)


def check_free(host: str, port: int) -> None:
    """Raises ValueError when nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.bind((host, 0))
        return one.getsockname()[1]


async def _join_log(process: Process, is_leaving: asyncio.Event) -> None:
    """Its lines in our log, but while it leaves, when it misses the listeners that are gone."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line longer than the limit, which is dropped
            LOG.warning("the gateway logged a line of more than %d bytes", MAX_LINE)
            continue
        if not line:
            return
        most = logging.DEBUG if is_leaving.is_set() else logging.ERROR
        _log_line(line.decode(errors="replace").strip(), most)


def _log_line(line: str, most: int) -> None:
    try:
        record = json.loads(line)
    except ValueError:
        LOG.debug("%s", line)  # its banner
        return
    if "multimodal" in record.get("target", "") or record.get("message", "").startswith(KNOWN):
        most = logging.DEBUG  # about images, which we refuse, and what our listeners warn of
    known = {"timestamp", "level", "message", "target", "filename", "line_number"}
    more = " ".join(f"{name}={value}" for name, value in record.items() if name not in known)
    text = f"{record.get('message', '')} {more}".strip()
    LOG.log(min(LEVELS.get(record.get("level", ""), logging.INFO), most), "%s", text)
