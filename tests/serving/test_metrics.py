"""Metrics: vLLM's names, with the values that the engine counted."""

import asyncio
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import Metrics, token_bounds
from serving.statistics import SequenceRecord, Statistics, StepRecord
from tests.serving.servers import FakeEngine, run

NAME = "m3.1-flash"
# Section 4.3 of the serving specification, but for `lora_requests_info`: see serving/README.md.
GAUGES = "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info"
COUNTERS = """prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens
    request_success spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"""
HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens iteration_tokens_total
    request_max_num_generation_tokens request_params_n request_params_max_tokens"""


class Counting(FakeEngine):
    """The stand-in with statistics."""

    def __init__(self, **counted):
        super().__init__()
        self.statistics = Statistics(**counted)


ENDED = SequenceRecord(
    request_id="r",
    index=0,
    reason="stop",
    n=1,
    max_tokens=40,
    prompt_tokens=12,
    cached_tokens=4,
    generation_tokens=5,
    preemptions=0,
    arrival=100.0,
    first_scheduled=100.5,
    first_token=101.0,
    last_token=103.0,
    end=103.25,
)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """name and the label beside the common ones -> value."""
    text = generate_latest(metrics.registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "0"
            model = labels.pop("model_name", None)
            assert model == NAME or sample.name == "vllm:cache_config_info"
            found[sample.name, ",".join(labels.values())] = sample.value
    return found


def test_every_name_of_the_specification_is_there():
    engine = Counting(drafts=1, accepted_at=[1])
    names = {name for name, _ in samples(Metrics(engine, NAME))}
    assert {f"vllm:{name}" for name in GAUGES.split()} <= names
    assert {f"vllm:{name}_total" for name in COUNTERS.split()} <= names
    metrics = Metrics(engine, NAME)
    metrics.on_finished(ENDED)
    metrics.on_step(StepRecord(num_tokens=9, first_token_s=[0.1], inter_token_s=[0.2]))
    names = {name for name, _ in samples(metrics)}
    assert {f"vllm:{name}_count" for name in HISTOGRAMS.split()} <= names


def test_counters_and_gauges_are_what_the_engine_counted():
    engine = Counting(
        prompt_tokens=100,
        generation_tokens=40,
        prefix_queries=100,
        prefix_hits=64,
        preemptions=2,
        running=3,
        waiting=1,
        cache_usage=0.25,
        drafts=5,
        draft_tokens=35,
        accepted_tokens=20,
        accepted_at=[5, 4],
    )
    engine.statistics.finished["length"] = 7
    found = samples(Metrics(engine, NAME))
    assert found["vllm:prompt_tokens_total", ""] == 100
    assert found["vllm:prefix_cache_hits_total", ""] == 64
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:kv_cache_usage_perc", ""] == 0.25
    assert found["vllm:request_success_total", "length"] == 7
    assert found["vllm:request_success_total", "stop"] == 0
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 4
    assert found["vllm:cache_config_info", "16,nvfp4,12"] == 1
    engine.statistics.prompt_tokens += 1
    assert samples(Metrics(engine, NAME))["vllm:prompt_tokens_total", ""] == 101


def test_speculation_has_no_series_until_drafts_are_tested():
    assert not [name for name, _ in samples(Metrics(Counting(), NAME)) if "spec_decode" in name]


def test_times_of_a_request_are_those_between_its_moments():
    metrics = Metrics(Counting(), NAME)
    metrics.on_finished(ENDED)
    metrics.on_step(StepRecord(num_tokens=9, first_token_s=[1.0], inter_token_s=[0.25, 0.75]))
    found = samples(metrics)
    sums = {
        "e2e_request_latency_seconds": 3.25,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 12,
        "request_params_max_tokens": 40,
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 1.0,
        "iteration_tokens_total": 9,
    }
    assert {name: found[f"vllm:{name}_sum", ""] for name in sums} == sums
    assert found["vllm:inter_token_latency_seconds_count", ""] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", "0.75"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", "1.0"] == 1


def test_a_request_of_two_counts_once_and_its_sequences_twice():
    metrics = Metrics(Counting(), NAME)
    metrics.on_finished(replace(ENDED, n=2))
    assert ("vllm:request_params_n_count", "") not in samples(metrics)
    metrics.on_finished(replace(ENDED, n=2, index=1, generation_tokens=20))
    found = samples(metrics)
    assert found["vllm:request_params_n_sum", ""] == 2
    assert found["vllm:request_prompt_tokens_count", ""] == 1
    assert found["vllm:request_generation_tokens_count", ""] == 2
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 20


def test_what_never_happened_to_a_request_is_not_observed():
    metrics = Metrics(Counting(), NAME)
    never = {"first_scheduled": None, "first_token": None, "last_token": None}
    metrics.on_finished(replace(ENDED, reason="abort", generation_tokens=0, **never))
    found = samples(metrics)
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 1
    assert ("vllm:request_queue_time_seconds_count", "") not in found


def test_the_port_answers_and_is_freed():
    async def test():
        part = Metrics(Counting(running=2), NAME, lambda: 3).port("127.0.0.1", 0)
        port = await part.start()
        url = f"http://127.0.0.1:{port}/metrics"
        page = await asyncio.to_thread(read, url)
        assert f'vllm:num_requests_running{{engine="0",model_name="{NAME}"}} 2.0' in page
        assert f'm3jax:recompiles_total{{engine="0",model_name="{NAME}"}} 3.0' in page
        with pytest.raises(ValueError, match=f"cannot serve metrics on 127.0.0.1:{port}: "):
            await Metrics(Counting(), NAME).port("127.0.0.1", port).start()
        await part.stop()
        with pytest.raises(urllib.error.URLError):
            read(url)

    run(test)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, [1]), (7, [1, 2, 5]), (2048, [1, 2, 5, 10, 20, 50, 100, 200, 500])]
)
def test_buckets_of_tokens_reach_up_to_the_longest_sequence(most, bounds):
    found = token_bounds(most)
    assert found[: len(bounds)] == bounds and found[-1] <= most < 2.5 * found[-1]
