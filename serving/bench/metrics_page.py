"""The server's Prometheus page, read before and after a run and now and then meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
from prometheus_client.parser import text_string_to_metric_families

PERIOD_S = 1.0
PREFIX = "vllm:"
COUNTERS = ("num_preemptions", "spec_decode_num_drafts")
GAUGES = ("kv_cache_usage_perc",)
_TIMEOUT_S = 5.0


@dataclass(kw_only=True)
class MetricsPage:
    """`seen` are the counters' growth and the gauges' peaks, by their names without `vllm:`, over
    all engines, from the first of `urls` that has a page; `trouble` says why there are none.
    """

    urls: Sequence[str]
    trouble: str = ""
    seen: dict[str, float] = field(default_factory=dict)
    _first: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Reads it at the start, now and then, and at the end."""
        async with httpx2.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
            url = await self._choose(http)
            if url is None:
                yield
                return
            polling = asyncio.create_task(self._poll(http, url))
            try:
                yield
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                await self._look(http, url)

    async def _choose(self, http: httpx2.AsyncClient) -> str | None:
        troubles = []
        for url in self.urls:
            try:
                self._first = await _read(http, url)
                return url
            except _PageError as error:
                troubles.append(str(error))
        self.trouble = "; ".join(troubles)
        return None

    async def _poll(self, http: httpx2.AsyncClient, url: str) -> None:
        while not self.trouble:
            await asyncio.sleep(PERIOD_S)
            await self._look(http, url)

    async def _look(self, http: httpx2.AsyncClient, url: str) -> None:
        try:
            self._update(await _read(http, url))
        except _PageError as error:
            self.trouble = str(error)

    def _update(self, now: dict[str, float]) -> None:
        for name, value in now.items():
            if name in GAUGES:
                self.seen[name] = max(value, self.seen.get(name, 0.0))
            else:
                self.seen[name] = value - self._first.get(name, 0.0)


def read_page(text: str) -> dict[str, float]:
    """The counters, summed over their labels, and the gauges, of which the largest counts."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX).removesuffix("_total")
            if name in COUNTERS:
                values[name] = values.get(name, 0.0) + sample.value
            elif name in GAUGES:
                values[name] = max(values.get(name, 0.0), sample.value)
    return values


class _PageError(Exception):
    """There is no page of metrics, for the reason in the text."""


async def _read(http: httpx2.AsyncClient, url: str) -> dict[str, float]:
    try:
        response = await http.get(url)
        if response.status_code == 200:
            return read_page(response.text)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise _PageError(f"{url}: {type(error).__name__}: {error}") from error
    raise _PageError(f"{url}: HTTP {response.status_code}")
