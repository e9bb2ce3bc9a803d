"""A gRPC listener over an engine: started, watched, and drained.

server = Server(engine, Served(name="tiny", model_path="tiny"), ServerConfig())
port = await server.start()
await server.drain()
"""

import asyncio
import ipaddress
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from configs.server import ServerConfig
from serving.engine_api import Engine
from serving.rpc.door import Door, read_token
from serving.rpc.open_requests import OpenRequests
from serving.rpc.service import NAME, ModelFiles, Service
from serving.rpc.wire_state import Served

LOG = logging.getLogger(__name__)
HEALTH_NAMES = ("", NAME)
HEALTH_S = 1.0  # between two looks at the engine for `grpc.health.v1`
ABORT_S = 5.0  # for aborted requests to say so to their clients
GRACE_S = 0.5  # for streams without an end of their own
KEEPALIVE_MS = 30_000  # a client whose machine is gone is noticed after this and 10 s


class Server:
    """One listener with its own name, limits and requests; several may share an engine."""

    def __init__(
        self,
        engine: Engine,
        served: Served,
        config: ServerConfig,
        files: ModelFiles | None = None,
    ):
        self._engine, self._config = engine, config
        self.requests = OpenRequests(config.max_concurrent_requests)
        self._service = Service(
            engine,
            served,
            files or ModelFiles(),
            self.requests,
            profile_dir=config.profile_dir,
        )
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens; the port. Raises ValueError with a sentence when it cannot."""
        config = self._config
        token = read_token(config)
        server = grpc.aio.server(interceptors=[Door(NAME, token)], options=_options(config))
        services.add_VllmEngineServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = _bind(server, config)
        await self._tell_health()
        await server.start()
        self._server = server
        self._watch = asyncio.create_task(self._watch_engine())
        if token is None and not _is_loopback(config.host):
            LOG.warning("anyone who reaches %s:%d may use the model", config.host, port)
        return port

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Takes no more requests, lets the running ones end within `shutdown_timeout` or until
        `hurry` is set, aborts what is left then, and closes.
        """
        self.requests.take_no_more()
        await self._health.enter_graceful_shutdown()
        await _first(self.requests.none_left(self._config.shutdown_timeout), hurry)
        for request_id in self.requests.ids:
            self._engine.abort(request_id)
        if not await self.requests.none_left(ABORT_S):
            LOG.warning("%d clients did not read their last tokens", len(self.requests))
        await self.stop()

    async def stop(self) -> None:
        """Closes at once; what still runs is cancelled, and so freed."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(GRACE_S)
        self._server = self._watch = None

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            await self._tell_health()

    async def _tell_health(self) -> None:
        codes = health_pb2.HealthCheckResponse
        status = codes.SERVING if self._engine.state.is_healthy else codes.NOT_SERVING
        for name in HEALTH_NAMES:
            await self._health.set(name, status)


async def _first(waiting: Coroutine[Any, Any, bool], event: asyncio.Event | None) -> None:
    """Waits for either of the two."""
    tasks = [asyncio.ensure_future(waiting)]
    if event is not None:
        tasks.append(asyncio.ensure_future(event.wait()))
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # the log-probabilities of a long prompt are long
        ("grpc.so_reuseport", 0),  # a second server on a port is an error, not a lottery
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 3),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 6),
    ]


def _bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if config.ssl_certfile is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(config))
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {address}: {error}") from error


def _credentials(config: ServerConfig) -> grpc.ServerCredentials:
    assert config.ssl_certfile and config.ssl_keyfile
    pair = (_read(config.ssl_keyfile), _read(config.ssl_certfile))
    roots = None if config.ssl_ca_certs is None else _read(config.ssl_ca_certs)
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
