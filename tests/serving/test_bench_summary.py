"""Figures of a run by hand numbers: latencies, percentiles, goodput, costs and the projection."""

import numpy as np
import pytest

from serving.bench.answers import Answer
from serving.bench.client import Facts
from serving.bench.options import Bench, Numbers, Objectives, Report, Traffic
from serving.bench.prefix_hits import Hits
from serving.bench.projection import acceptance, projected, tokens_per_step
from serving.bench.results import Run, details, results
from serving.bench.summary import (
    first_reasons,
    num_good,
    peak_concurrency,
    peak_tokens_per_s,
    speeds,
    summary,
)


def answer(name: str = "a", sent: float = 0.0, times=(0.1,), counts=None, **more) -> Answer:
    counts = [1] * len(times) if counts is None else counts
    more = {"ended": times[-1] if times else sent, "output_tokens": sum(counts)} | more
    return Answer(request_id=name, sent=sent, times=list(times), counts=list(counts), **more)


# Sent at 1 s: the first token at 1.5 s, then two and three at once, done at 2.5 s.
EXAMPLE = answer(sent=1.0, times=(1.5, 1.7, 2.3), counts=(1, 2, 3), ended=2.5, prompt_tokens=40)


def test_latencies_of_one_answer():
    assert EXAMPLE.ttft == pytest.approx(0.5)
    assert EXAMPLE.itls == pytest.approx([0.2, 0.6])
    assert EXAMPLE.e2el == pytest.approx(1.5)
    assert EXAMPLE.tpot == pytest.approx((1.5 - 0.5) / 5)


def test_an_answer_of_one_token_has_no_time_a_token():
    assert answer().tpot == 0.0
    assert speeds([answer(), EXAMPLE]) == pytest.approx([5.0])


def test_percentiles_are_those_of_numpy_and_of_hand():
    # Ten values: p90 lies 0.1 of the way from the ninth to the tenth, at place 8.1 of 0..9.
    found = summary("ttft", [0.001 * k for k in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)], (50, 90, 99, 0))
    assert found == pytest.approx(
        {
            "mean_ttft_ms": 5.5,
            "median_ttft_ms": 5.5,
            "std_ttft_ms": 2.8722813,
            "p50_ttft_ms": 5.5,
            "p90_ttft_ms": 9.1,
            "p99_ttft_ms": 9.91,
            "p0_ttft_ms": 1.0,
        }
    )
    values = np.random.default_rng(0).exponential(size=501)
    assert summary("itl", values.tolist(), (99.9,))["p99.9_itl_ms"] == pytest.approx(
        np.percentile(values, 99.9) * 1e3
    )


def test_no_values_give_zeros_as_in_vllm():
    assert set(summary("itl", [], (99,)).values()) == {0.0}


def test_goodput_counts_requests_that_meet_every_objective():
    slow_first = answer(times=(0.9, 0.95))
    slow_rest = answer(times=(0.1, 0.9))
    good = answer(times=(0.1, 0.15))
    meets = Objectives.parse(["ttft:500", "tpot:100"])
    assert num_good([slow_first, slow_rest, good, answer()], meets) == 2
    assert num_good([slow_first, slow_rest, good], Objectives.parse(["e2el:950"])) == 3
    assert num_good([good], Objectives.parse(["ttft:100"])) == 1


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:fast", "ttft:-1", "ttft:nan"])
def test_an_objective_that_is_none_is_refused_by_its_text(text):
    with pytest.raises(ValueError, match=text):
        Objectives.parse([text])


def test_peaks_of_concurrency_and_of_tokens():
    one = answer(sent=0.0, times=(0.5, 1.5, 1.6), counts=(1, 4, 2))
    two = answer(sent=1.0, times=(1.9,), counts=(3,))
    after = answer(sent=1.9, times=(2.5,))
    assert peak_concurrency([one, two, after]) == 2
    assert peak_concurrency([]) == 0
    assert peak_tokens_per_s([one, two, after], start=0.0) == 4 + 2 + 3


def test_errors_are_counted_by_their_reason_and_only_the_first_reasons_are_kept():
    errors = ["a", "b", "a", "c", "", "a"]
    answers = [answer(error=error) for error in errors]
    assert first_reasons(answers, most=2) == {"a": 3, "b": 1}


RUN = Run(
    answers=[
        EXAMPLE,
        answer("b", sent=1.0, times=(2.0,), prompt_tokens=60, cached_tokens=32),
        answer("c", sent=2.0, times=(), ended=2.1, error="full"),
        answer("d", sent=2.0, times=(2.1,), ended=2.5, is_cancelled=True),
    ],
    start=1.0,
    duration=2.0,
    facts=Facts(model="m"),
    hits={16: {"a": Hits(40, 0), "b": Hits(60, 48)}},
)


def test_counts_and_rates_are_those_of_completed_requests():
    result = results(Bench(report=Report(num_gpus=4, price=3.6)), RUN)
    expected = {
        "num_prompts": 4,
        "completed": 2,
        "failed": 1,
        "cancelled": 1,
        "failure_reasons": {"full": 1},
        "total_input_tokens": 100,
        "total_output_tokens": 7,
        "request_throughput": 1.0,
        "request_goodput": None,
        "output_throughput": 3.5,
        "total_token_throughput": 53.5,
        "output_throughput_per_gpu": 0.875,
        "median_tokens_per_s_per_user": pytest.approx(5.0),
        "median_ttft_ms": pytest.approx(750.0),
        # 4 GPUs at 3.6 $/h are 0.004 $/s, over 3.5 tokens a second.
        "cost_per_million_output_tokens": pytest.approx(0.004 / 3.5 * 1e6),
        "cost_per_million_total_tokens": pytest.approx(0.004 / 53.5 * 1e6),
    }
    assert {key: result[key] for key in expected} == expected


def test_a_hit_rate_is_of_the_requests_that_tell_and_the_theory_of_all():
    result = results(Bench(), RUN)
    assert result["prefix_hit_rate"] == pytest.approx(32 / 60)
    assert result["theoretical_prefix_hit_rate"] == pytest.approx(48 / 100)
    assert result["theoretical_prefix_hit_rate_block_16"] == pytest.approx(48 / 100)


def test_a_theory_that_lacks_a_request_is_none():
    run = Run(answers=RUN.answers, start=1, duration=2, facts=RUN.facts, hits={16: {"a": Hits()}})
    assert results(Bench(), run)["theoretical_prefix_hit_rate"] is None


def test_details_hold_one_value_a_completed_request():
    found = details(RUN)
    assert found["request_ids"] == ["a", "b"]
    assert (found["input_lens"], found["output_lens"]) == ([40, 60], [6, 1])
    assert (found["cached_lens"], found["errors"]) == ([None, 32], ["full"])


def test_only_the_asked_latencies_and_percentiles_are_there():
    report = Report(percentile_metrics="ttft", metric_percentiles=Numbers((75, 99.5)))
    result = results(Bench(report=report), RUN)
    assert {key for key in result if key.endswith("_ms")} == {
        *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p75_ttft_ms", "p99.5_ttft_ms")
    }


# 13 tokens after the first, 8 of them drafts: 5 steps, 2.6 tokens each, 0.13 s a step.
DRAFTED = answer(
    times=(0.2, 0.85), counts=(1, 13), output_tokens=14, draft_tokens=30, accepted_tokens=8
)


def test_acceptance_is_tokens_over_steps():
    assert tokens_per_step([DRAFTED]) == pytest.approx(2.6)
    assert acceptance([DRAFTED]) == {
        "spec_decode_draft_tokens": 30,
        "spec_decode_accepted_tokens": 8,
        "spec_decode_acceptance_rate": pytest.approx(100 * 8 / 30),
        "spec_decode_acceptance_length": pytest.approx(2.6),
    }
    assert acceptance([EXAMPLE])["spec_decode_acceptance_length"] is None


def test_a_projection_keeps_the_time_a_step_and_says_that_it_is_synthetic():
    found = projected([DRAFTED], 5.2, duration=1.0, is_closed=True, users=1)
    assert found["synthetic_median_tpot_ms"] == pytest.approx(1e3 * 0.13 / 5.2)
    assert found["synthetic_median_tokens_per_s_per_user"] == pytest.approx(5.2 / 0.13)
    # Half of the 0.65 s of decoding is saved.
    assert found["synthetic_output_throughput"] == pytest.approx(14 / (1.0 - 0.325))
    assert found["synthetic_note"].startswith("SYNTHETIC")


def test_a_projection_to_what_was_measured_changes_nothing():
    found = projected([DRAFTED], 2.6, duration=1.0, is_closed=True, users=1)
    assert found["synthetic_median_tpot_ms"] == pytest.approx(1e3 * DRAFTED.tpot)
    assert found["synthetic_output_throughput"] == pytest.approx(14.0)


def test_arrivals_decide_the_throughput_of_a_projected_open_loop():
    found = projected([DRAFTED], 5.2, duration=1.0, is_closed=False, users=1)
    assert found["synthetic_output_throughput"] == pytest.approx(14.0)


def test_nothing_is_projected_from_answers_without_drafts():
    bench = Bench(report=Report(synthetic_acceptance=3.2))
    result = results(bench, RUN)
    assert "no drafts" in result["synthetic_note"]
    assert not any(key.startswith("synthetic_median") for key in result)


def test_a_projected_run_has_costs_and_rates_a_gpu():
    bench = Bench(
        traffic=Traffic(max_concurrency=1),
        report=Report(synthetic_acceptance=5.2, price=3.6, num_gpus=2),
    )
    result = results(bench, Run(answers=[DRAFTED], start=0, duration=1.0, facts=RUN.facts))
    rate = 14 / (1.0 - 0.325)
    assert result["synthetic_output_throughput_per_gpu"] == pytest.approx(rate / 2)
    cost = result["synthetic_cost_per_million_output_tokens"]
    assert cost == pytest.approx(0.002 / rate * 1e6)
