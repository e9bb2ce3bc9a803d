"""`minimax-serve MODEL` from its start to its end."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console

from serving.assembly import Assembly
from serving.command.listeners import Listeners, listen
from serving.command.loading import load_and_assemble
from serving.command.progress import StartProgress
from serving.command.ready import Ready, rows, show
from serving.command.resolve import Resolved
from serving.gateway import Gateway, check_free, check_installed
from serving.lifetime import EndedEarlyError, Lifetime
from serving.metrics import Metrics
from serving.processes.leader import Leader
from serving.starting_engine import StartingEngine
from serving.stats_log import RequestLog, StatsLog

LOG = logging.getLogger(__name__)
WATCH_S = 1.0  # between two looks whether the engine still serves
ENDED_EARLY = 130  # the exit code when a signal came before the server was ready


async def serve(resolved: Resolved, leader: Leader | None = None) -> int:
    """Serves until a signal (0) or until the engine fails (1). `leader` speaks to the other
    processes, if there are any. Raises ValueError with one sentence when it cannot start.
    """
    since, engine = time.monotonic(), StartingEngine()
    check_http(resolved)
    assembly: Assembly | None = None
    life = Lifetime()
    try:
        async with life:
            _heed(leader, life)
            listeners = await listen(life, engine, resolved)
            loaded, assembly = await life.unless_ended(_loaded(resolved, engine, leader))
            engine.become(assembly.engine)
            ready = Ready(
                resolved=resolved,
                loaded=loaded,
                assembly=assembly,
                listeners=listeners,
                metrics=await _monitor(life, assembly, resolved),
                http=await _http(life, listeners, resolved),
                seconds=time.monotonic() - since,
            )
            _tell(ready)
            watch = asyncio.create_task(_watch(life, assembly))
            await life.ended()
            watch.cancel()
            _give_up(life, assembly)
    except EndedEarlyError:
        if not life.fault:
            return ENDED_EARLY
    finally:
        if assembly is not None:
            _give_up(life, assembly)
            await assembly.close()
        if leader is not None and not life.fault:
            await asyncio.to_thread(leader.end)
    if not life.fault:
        return 0
    LOG.error("%s", (leader and leader.loss()) or life.fault)
    return 1


def check_served(resolved: Resolved) -> None:
    """Raises ValueError for what an engine can do and a server cannot."""
    if resolved.config.enable_return_routed_experts:
        raise ValueError(
            "--enable-return-routed-experts: the gRPC protocol has no field for them; "
            "serving.LLM(..., enable_return_routed_experts=True) returns them"
        )


def check_http(resolved: Resolved) -> None:
    """Raises ValueError, before anything is loaded, when HTTP was asked for and cannot be."""
    asked, port = resolved.asked, resolved.asked.gateway.http
    if port is None:
        return
    check_installed()
    if not (resolved.folder / "tokenizer.json").is_file():
        raise ValueError(f"HTTP needs a tokenizer, and {asked.model} has none: --no-http")
    if asked.server.ssl_ca_certs is not None:
        raise ValueError("ssl_ca_certs: the gateway asks no client for a certificate: --no-http")
    template = asked.gateway.chat_template
    if template is not None and not Path(template).is_file():
        raise ValueError(f"--chat-template {template} is no file")
    check_free(asked.server.host, port)


def _heed(leader: Leader | None, life: Lifetime) -> None:
    """Ends all when another process is gone, and in good order when one was asked to end."""
    if leader is not None:
        loop = asyncio.get_running_loop()
        leader.on_lost = partial(loop.call_soon_threadsafe, life.end)
        leader.on_drain = partial(loop.call_soon_threadsafe, life.drain)


def _give_up(life: Lifetime, assembly: Assembly) -> None:
    """After a fault nobody waits for the devices: those of a process that is gone never answer."""
    if life.fault:
        assembly.engine.give_up(life.fault)


async def _loaded(resolved: Resolved, engine: StartingEngine, leader: Leader | None):
    """The model and its engine, made in a thread, while listeners tell how far that is."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="start")
    with StartProgress(Console(stderr=True), engine.say) as progress:
        work = partial(load_and_assemble, resolved, progress, leader)
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        except ValueError as error:
            engine.say(f"failed: {error}")
            raise
        finally:
            executor.shutdown(wait=False)


async def _monitor(life: Lifetime, assembly: Assembly, resolved: Resolved) -> str | None:
    """Metrics and lines of statistics; the address of the metrics."""
    config, engine = resolved.asked.monitoring, assembly.engine
    if not config.disable_log_stats:
        await life.start(StatsLog(engine))
    if config.enable_log_requests:
        engine.listen(RequestLog())
    if config.metrics_port is None:
        return None
    metrics = Metrics(engine, resolved.name, lambda: assembly.device.compilations_after_ready)
    engine.listen(metrics)
    host = resolved.asked.server.host
    port = await life.start(metrics.port(host, config.metrics_port))
    return f"http://{host}:{port}/metrics"


async def _http(life: Lifetime, listeners: Listeners, resolved: Resolved) -> str | None:
    """The gateway; its address."""
    asked = resolved.asked
    if asked.gateway.http is None:
        return None
    gateway = Gateway(asked.gateway, asked.server, listeners.workers)
    await life.start(gateway)
    return gateway.url


async def _watch(life: Lifetime, assembly: Assembly) -> None:
    """Ends the process when the engine has failed: whoever started it starts it again."""
    while assembly.engine.state.is_healthy:
        await asyncio.sleep(WATCH_S)
    life.end(assembly.engine.state.message)


def _tell(ready: Ready) -> None:
    asked = ready.resolved.asked
    for line in ready.resolved.lines:
        LOG.info("%s", line)
    if asked.monitoring.log_format == "json":
        LOG.info("ready", extra={"fields": {"ready": rows(ready)}})
    else:
        show(ready, Console(stderr=True, highlight=False))
