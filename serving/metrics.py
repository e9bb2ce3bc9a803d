"""Prometheus metrics under vLLM's names, on a port of their own (specification serving 4.3).

Counters and gauges are read from the engine's `Statistics` when somebody asks; histograms are fed
by the engine, which calls `on_step` and `on_finished`. What vLLM has no name for begins with
`m3jax:`.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Thread
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.engine_api import EngineInfo, RankLoad
from serving.statistics import SequenceRecord, Statistics, StepRecord

LABELS = ("model_name", "engine")
# Bounds of buckets, as vLLM has them: seconds, and tokens.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)
# name: what it tells, and the field of `Statistics`
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens of requests.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated.", "generation_tokens"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up.", "prefix_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hits"),
    "vllm:num_preemptions": ("Sequences that were put back to be computed again.", "preemptions"),
    "m3jax:steps": ("Dispatches to the device.", "steps"),
    "m3jax:broken_sequences": ("Sequences whose logits were not numbers.", "broken"),
}
SPECULATION = {
    "vllm:spec_decode_num_drafts": ("Rows that tested drafts.", "drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Drafts tested.", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Drafts accepted.", "accepted_tokens"),
}
GAUGES = {
    "vllm:num_requests_running": ("Sequences that run.", "running"),
    "vllm:num_requests_waiting": ("Sequences that wait.", "waiting"),
    "vllm:kv_cache_usage_perc": ("Share of the blocks in use, 0 to 1.", "cache_usage"),
    "m3jax:weight_version": ("How often the weights were changed.", "weight_version"),
}


class Watched(Protocol):
    """What is read of an engine."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def statistics(self) -> Statistics: ...

    def loads(self) -> Sequence[RankLoad]: ...


class Metrics(Collector):
    """The metrics of one engine, under the first name that it is served as. `recompiles` tells how
    many programs were compiled since it was ready.
    """

    def __init__(
        self, engine: Watched, model_name: str, recompiles: Callable[[], int] | None = None
    ):
        self._engine, self._values, self._recompiles = engine, (model_name, "0"), recompiles
        self.registry = CollectorRegistry()
        self._histograms = _histograms(self.registry, engine.info.max_model_len)
        self._unfinished: dict[str, list[SequenceRecord]] = {}
        self.registry.register(self)

    def port(self, host: str, port: int) -> "MetricsPort":
        """What answers `GET /metrics`, once it is started; port 0 takes a free one."""
        return MetricsPort(self.registry, host, port)

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges as they are now."""
        statistics = self._engine.statistics
        counters = COUNTERS | (SPECULATION if statistics.drafts else {})
        for name, (text, field) in counters.items():
            yield self._one(CounterMetricFamily, name, text, getattr(statistics, field))
        for name, (text, field) in GAUGES.items():
            yield self._one(GaugeMetricFamily, name, text, getattr(statistics, field))
        ended = "Sequences that ended, by reason."
        yield self._many("vllm:request_success", ended, "finished_reason", statistics.finished)
        accepted = dict(enumerate(statistics.accepted_at))
        if accepted:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            yield self._many(name, "Drafts accepted, by place.", "position", accepted)
        yield self._cache_config()
        if self._recompiles is not None:
            text, count = "Programs compiled since the start was over.", self._recompiles()
            yield self._one(CounterMetricFamily, "m3jax:recompiles", text, count)

    def on_step(self, step: StepRecord) -> None:
        """Feeds the histograms of steps."""
        self._observe("vllm:iteration_tokens_total", step.num_tokens)
        for seconds in step.first_token_s:
            self._observe("vllm:time_to_first_token_seconds", seconds)
        for seconds in step.inter_token_s:
            self._observe("vllm:inter_token_latency_seconds", seconds)

    def on_finished(self, sequence: SequenceRecord) -> None:
        """Feeds the histograms of requests."""
        self._observe("vllm:e2e_request_latency_seconds", sequence.e2e_s)
        self._observe("vllm:request_queue_time_seconds", sequence.queue_s)
        self._observe("vllm:request_prefill_time_seconds", sequence.prefill_s)
        self._observe("vllm:request_decode_time_seconds", sequence.decode_s)
        self._observe("vllm:request_inference_time_seconds", sequence.inference_s)
        self._observe("vllm:request_time_per_output_token_seconds", sequence.per_token_s)
        self._observe("vllm:request_generation_tokens", sequence.generation_tokens)
        group = self._unfinished.setdefault(sequence.request_id, [])
        group.append(sequence)
        if len(group) == sequence.n:
            self._on_request(self._unfinished.pop(sequence.request_id))

    def _on_request(self, group: Sequence[SequenceRecord]) -> None:
        first, longest = group[0], max(one.generation_tokens for one in group)
        self._observe("vllm:request_prompt_tokens", first.prompt_tokens)
        self._observe("vllm:request_params_n", first.n)
        self._observe("vllm:request_params_max_tokens", first.max_tokens)
        self._observe("vllm:request_max_num_generation_tokens", longest)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].labels(*self._values).observe(value)

    def _one(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _many(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._values, str(value)), count)
        return family

    def _cache_config(self) -> Metric:
        """What does not change, as labels of a 1."""
        info, loads = self._engine.info, self._engine.loads()
        blocks = loads[0].max_tokens // info.block_size
        names = ("engine", "block_size", "cache_dtype", "num_gpu_blocks")
        text = "The cache, in the labels."
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=names)
        family.add_metric(("0", str(info.block_size), info.kv_cache_dtype, str(blocks)), 1)
        return family


class MetricsPort:
    """The HTTP port that answers, in a thread of its own: a part of the process."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int):
        self._registry, self._host, self._port = registry, host, port
        self._server: Any = None
        self._thread: Thread | None = None

    async def start(self) -> int:
        """Listens; the port. Raises ValueError with a sentence when it cannot."""
        try:
            server, self._thread = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            where, reason = f"{self._host}:{self._port}", error.strerror or error
            raise ValueError(f"cannot serve metrics on {where}: {reason}") from error
        self._server = server
        return server.server_port

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Goes on, to the last request's end."""

    async def stop(self) -> None:
        """Ends the thread and frees the port."""
        if self._thread is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            self._thread.join()


def _histograms(registry: CollectorRegistry, max_model_len: int) -> dict[str, Histogram]:
    tokens = token_bounds(max_model_len)
    bounds: dict[str, tuple[str, Sequence[float]]] = {
        "vllm:time_to_first_token_seconds": ("From arrival to first token.", FIRST_TOKEN_S),
        "vllm:inter_token_latency_seconds": ("Between outputs of a sequence.", PER_TOKEN_S),
        "vllm:request_time_per_output_token_seconds": ("Mean, after the first.", PER_TOKEN_S),
        "vllm:e2e_request_latency_seconds": ("From arrival to end.", REQUEST_S),
        "vllm:request_queue_time_seconds": ("From arrival to first step.", REQUEST_S),
        "vllm:request_prefill_time_seconds": ("From first step to first token.", REQUEST_S),
        "vllm:request_decode_time_seconds": ("From first token to last.", REQUEST_S),
        "vllm:request_inference_time_seconds": ("From first step to last token.", REQUEST_S),
        "vllm:request_prompt_tokens": ("Tokens of a prompt.", tokens),
        "vllm:request_generation_tokens": ("Tokens of a sequence.", tokens),
        "vllm:request_max_num_generation_tokens": ("Of a request's longest sequence.", tokens),
        "vllm:request_params_max_tokens": ("The limit that requests set.", tokens),
        "vllm:request_params_n": ("Sequences asked for.", SEQUENCES),
        "vllm:iteration_tokens_total": ("Tokens of a step.", STEP_TOKENS),
    }
    return {
        name: Histogram(name, text, LABELS, buckets=at, registry=registry)
        for name, (text, at) in bounds.items()
    }


def token_bounds(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, scale = [], 1
    while True:
        for step in (1, 2, 5):
            if step * scale > most:
                return bounds
            bounds.append(step * scale)
        scale *= 10
