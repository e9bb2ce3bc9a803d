"""All of a run's figures as one flat dictionary, under the keys of `vllm bench serve` where it has
them (specification serving 4.4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from serving.bench.answers import Answer
from serving.bench.client import Facts
from serving.bench.options import Bench
from serving.bench.prefix_hits import Hits
from serving.bench.projection import acceptance, projected
from serving.bench.summary import (
    first_reasons,
    latencies,
    num_good,
    peak_concurrency,
    peak_tokens_per_s,
    speeds,
    summary,
)

MILLION, HOUR_S = 1e6, 3600.0
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What happened: the measured answers, from `start` on by the clock of their times.

    `hits` are the theoretical ones by request id, for each size of blocks, the server's first;
    `metrics` is what the server's own page said.
    """

    answers: Sequence[Answer]
    start: float
    duration: float
    facts: Facts
    hits: Mapping[int, Mapping[str, Hits]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_trouble: str = ""

    def of(self, fate: str) -> list[Answer]:
        """The answers that ended so."""
        return [one for one in self.answers if one.fate == fate]


def results(bench: Bench, run: Run) -> Result:
    """The figures. Latencies, tokens and rates are those of completed requests."""
    done, report = run.of("completed"), bench.report
    result = _header(bench, run) | _counts(bench, run, done)
    for name, seconds in latencies(done).items():
        if name in report.metrics:
            result |= summary(name, seconds, report.metric_percentiles.values)
    result |= _speeds(done, result, report.num_gpus)
    result |= hit_rates(run, done) | acceptance(done)
    result["num_preemptions"] = run.metrics.get("num_preemptions")
    result["peak_kv_cache_usage"] = run.metrics.get("kv_cache_usage_perc")
    result["metrics_trouble"] = run.metrics_trouble
    if report.price is not None:
        result |= costs(result, report.price, report.num_gpus)
    if report.synthetic_acceptance is not None and done:
        result |= _synthetic(bench, run, done)
    return result


def details(run: Run) -> Result:
    """Each completed request's own figures, in vLLM's lists, and the errors of the others."""
    ordered = sorted(run.answers, key=lambda one: one.sent)
    done = [one for one in ordered if one.fate == "completed"]
    return {
        "request_ids": [one.request_id for one in done],
        "input_lens": [one.prompt_tokens for one in done],
        "output_lens": [one.output_tokens for one in done],
        "cached_lens": [one.cached_tokens for one in done],
        "start_times": [one.sent - run.start for one in done],
        "ttfts": [one.ttft for one in done],
        "itls": [one.itls for one in done],
        "errors": [one.error for one in ordered if one.error],
    }


def hit_rates(run: Run, done: Sequence[Answer]) -> Result:
    """The measured share of prompt tokens that came from the cache, and the theoretical ones of the
    same requests; None where the server does not say, or the tokens are not known.
    """
    result: Result = {}
    told = [one for one in done if one.cached_tokens is not None]
    cached = sum(one.cached_tokens or 0 for one in told)
    tokens = sum(one.prompt_tokens for one in told)
    result["total_cached_tokens"] = cached if told else None
    result["prefix_hit_rate"] = cached / tokens if tokens else None
    for size, hits in run.hits.items():
        known = [hits[one.request_id] for one in done if one.request_id in hits]
        rate = sum(known, Hits()).rate if len(known) == len(done) else None
        result.setdefault("theoretical_prefix_hit_rate", rate)
        result[f"theoretical_prefix_hit_rate_block_{size}"] = rate
    return result


def costs(result: Result, price: float, num_gpus: int) -> Result:
    """Dollars a million tokens at a price a GPU hour; None where there was no such token."""
    per_second = price * num_gpus / HOUR_S
    rates = {
        "output": result["output_throughput"],
        "total": result["total_token_throughput"],
    }
    return {
        "price_per_gpu_hour": price,
        **{
            f"cost_per_million_{name}_tokens": per_second / rate * MILLION if rate else None
            for name, rate in rates.items()
        },
    }


def _header(bench: Bench, run: Run) -> Result:
    traffic, target = bench.traffic, bench.target
    rate = traffic.request_rate
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": target.backend,
        "label": bench.report.label or target.backend,
        "model_id": run.facts.model,
        "tokenizer_id": target.tokenizer,
        "dataset_name": bench.dataset.dataset_name,
        "num_prompts": len(run.answers),
        "request_rate": rate if rate < float("inf") else "inf",
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        "seed": traffic.seed,
        "num_gpus": bench.report.num_gpus,
    }


def _counts(bench: Bench, run: Run, done: Sequence[Answer]) -> Result:
    duration, failed = run.duration, run.of("failed")
    inputs, outputs = (sum(one.prompt_tokens for one in done), sum(o.output_tokens for o in done))
    objectives = bench.objectives
    good = num_good(done, objectives) / duration if objectives.limits else None
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(failed),
        "cancelled": len(run.of("cancelled")),
        "failure_reasons": first_reasons(failed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": good,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_tokens_per_s(done, run.start),
        "max_concurrent_requests": peak_concurrency(run.answers),
    }


def _speeds(done: Sequence[Answer], result: Result, num_gpus: int) -> Result:
    seen = speeds(done)
    return {
        "mean_tokens_per_s_per_user": float(np.mean(seen)) if seen else None,
        "median_tokens_per_s_per_user": float(np.median(seen)) if seen else None,
        "output_throughput_per_gpu": result["output_throughput"] / num_gpus,
        "total_token_throughput_per_gpu": result["total_token_throughput"] / num_gpus,
    }


def _synthetic(bench: Bench, run: Run, done: Sequence[Answer]) -> Result:
    traffic, report = bench.traffic, bench.report
    assert report.synthetic_acceptance is not None
    result = projected(
        done,
        report.synthetic_acceptance,
        duration=run.duration,
        is_closed=traffic.request_rate == float("inf") and traffic.ramp_up_strategy is None,
        users=traffic.max_concurrency or peak_concurrency(done),
    )
    rate = result.get("synthetic_output_throughput")
    if rate is not None:
        result["synthetic_output_throughput_per_gpu"] = rate / report.num_gpus
    if rate is not None and report.price is not None:
        cost = report.price * report.num_gpus / HOUR_S / rate * MILLION
        result["synthetic_cost_per_million_output_tokens"] = cost
    return result
