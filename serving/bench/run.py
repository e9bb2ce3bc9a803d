"""One run: the workload is made, what is expected of it is printed, it is sent, and summed up."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.monitoring import MonitoringConfig
from serving.bench.answers import Answer
from serving.bench.client import AskError, Client, Facts
from serving.bench.grpc_client import GrpcClient
from serving.bench.http_client import HttpClient, base_url
from serving.bench.load import Load, until
from serving.bench.metrics_page import MetricsPage
from serving.bench.options import Bench, Target
from serving.bench.results import Run
from serving.bench.workload import Texts, Workload, make_workload

RETRY_S = 1.0


def make_client(bench: Bench) -> Client:
    """The way to the server by the backend's name."""
    kind = GrpcClient if bench.target.backend == "grpc" else HttpClient
    return kind(bench.target, bench.sampling)


async def when_ready(client: Client, timeout_s: float, console: Console) -> Facts:
    """What the server says of itself, as soon as it does. Raises ValueError when it does not."""
    deadline, has_said = time.monotonic() + timeout_s, False
    while True:
        try:
            return await client.facts()
        except AskError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise ValueError(f"the server does not answer: {error}") from error
            if not has_said:
                console.print(f"waiting up to {timeout_s:g} s for the server ({error})")
            has_said = True
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What runs have in common; `stop` ends one early, as its duration does."""

    client: Client
    facts: Facts
    texts: Texts
    console: Console
    stop: asyncio.Event = field(default_factory=asyncio.Event)


async def run(bench: Bench, setting: Setting) -> Run:
    """Sends a workload once."""
    client, console, stop = setting.client, setting.console, setting.stop
    workload = make_workload(bench, setting.facts, setting.texts)
    _say_expected(workload, console)
    traffic, page = bench.traffic, MetricsPage(urls=metrics_urls(bench.target))
    await until(workload.warm_up(Load(client)), stop, None)
    limit = None if bench.is_agentic else traffic.max_concurrency
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(page.watched())
        progress = stack.enter_context(_progress(console, bench.report.disable_tqdm))
        bar = progress.add_task("requests", total=workload.num_requests)
        load = Load(
            client,
            max_concurrency=limit,
            on_end=lambda answer: progress.advance(bar, float(answer.is_measured)),
        )
        start = time.perf_counter()
        await until(workload.send(load), stop, traffic.duration)
        duration = time.perf_counter() - start
    return Run(
        answers=_measured(load.answers),
        start=start,
        duration=duration,
        facts=setting.facts,
        hits=workload.hits,
        metrics=page.seen,
        metrics_trouble=page.trouble,
    )


def metrics_urls(target: Target) -> list[str]:
    """The page that was named, or else vLLM's, at its HTTP, and ours, on a port of its own."""
    if target.metrics_url is not None:
        return [target.metrics_url]
    address = target.base_url or target.host
    host = urlsplit(address if "//" in address else f"//{address}").hostname
    own = f"http://{host}:{MonitoringConfig().metrics_port}/metrics"
    return [own] if target.backend == "grpc" else [f"{base_url(target)}/metrics", own]


def _measured(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.is_measured]


def _say_expected(workload: Workload, console: Console) -> None:
    rates = [
        f"{rate:.2%} in blocks of {size}"
        for size, rate in workload.rates().items()
        if rate is not None
    ]
    if rates:
        requests = workload.num_requests
        text = f"theoretical prefix hit rate of {requests} requests: {', '.join(rates)}"
        console.print(text, highlight=False)


def _progress(console: Console, is_off: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=is_off)
