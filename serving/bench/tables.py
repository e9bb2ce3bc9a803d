"""A run's figures, and those of a sweep, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from serving.bench.options import Bench

Result = Mapping[str, Any]
NAMES = {
    "ttft": "TTFT, first token",
    "tpot": "TPOT, each token",
    "itl": "ITL, each event",
    "e2el": "E2EL, to the end",
}
_COUNTS = (
    ("completed, failed, cancelled", "{completed:,}, {failed:,}, {cancelled:,}"),
    ("duration", "{duration:.2f} s"),
    ("input and output tokens", "{total_input_tokens:,} and {total_output_tokens:,}"),
    ("requests/s", "{request_throughput:.2f}"),
    ("good requests/s", "{request_goodput:.2f}"),
    ("output tokens/s", "{output_throughput:.1f}, at most {max_output_tokens_per_s:.0f}"),
    ("all tokens/s", "{total_token_throughput:.1f}"),
    ("output tokens/s a GPU", "{output_throughput_per_gpu:.1f}"),
    ("tokens/s a user, median", "{median_tokens_per_s_per_user:.1f}"),
    ("requests at a time, at most", "{max_concurrent_requests}"),
    ("prefix hit rate, measured", "{prefix_hit_rate:.2%}"),
    ("prefix hit rate, theoretical", "{theoretical_prefix_hit_rate:.2%}"),
    ("preemptions", "{num_preemptions:.0f}"),
    ("KV cache in use, at most", "{peak_kv_cache_usage:.1%}"),
    ("drafts accepted", "{spec_decode_acceptance_rate:.1f} %"),
    ("tokens a verification step", "{spec_decode_acceptance_length:.2f}"),
    ("$ per M output tokens", "{cost_per_million_output_tokens:.3f}"),
    ("$ per M tokens", "{cost_per_million_total_tokens:.3f}"),
    ("SYNTHETIC tokens/s a user", "{synthetic_median_tokens_per_s_per_user:.1f}"),
    ("SYNTHETIC output tokens/s a GPU", "{synthetic_output_throughput_per_gpu:.1f}"),
    ("SYNTHETIC $ per M output tokens", "{synthetic_cost_per_million_output_tokens:.3f}"),
)
_SWEEP = (
    ("users", "{max_concurrency}"),
    ("tok/s a user", "{median_tokens_per_s_per_user:.1f}"),
    ("tok/s a GPU", "{output_throughput_per_gpu:.1f}"),
    ("TTFT ms, median", "{median_ttft_ms:.1f}"),
    ("TPOT ms, median", "{median_tpot_ms:.2f}"),
    ("hit rate", "{prefix_hit_rate:.1%}"),
    ("failed", "{failed}"),
    ("$/M output", "{cost_per_million_output_tokens:.3f}"),
    ("SYNTHETIC tok/s a user", "{synthetic_median_tokens_per_s_per_user:.1f}"),
    ("SYNTHETIC tok/s a GPU", "{synthetic_output_throughput_per_gpu:.1f}"),
)


def print_result(bench: Bench, result: Result, console: Console) -> None:
    """Two tables, and what has to be said beside them."""
    counts = Table(title=f"{result['model_id']}, {result['dataset_name']}", show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for name, form in _COUNTS:
        if (text := _formatted(form, result)) is not None:
            counts.add_row(name, text)
    console.print(counts)
    console.print(_latencies(bench, result))
    for reason, count in result["failure_reasons"].items():
        console.print(f"{count} failed: {reason}", markup=False, highlight=False)
    if result["metrics_trouble"]:
        console.print(f"no metrics: {result['metrics_trouble']}", markup=False, highlight=False)
    _print_note(result, console)


def print_sweep(results: Sequence[Result], console: Console) -> None:
    """One row a run."""
    table = Table(title=f"{results[0]['model_id']}, {results[0]['dataset_name']}")
    shown = [
        (name, [_formatted(form, result) for result in results])
        for name, form in _SWEEP
        if any(_formatted(form, result) is not None for result in results)
    ]
    for name, _ in shown:
        table.add_column(name, justify="right")
    for row in zip(*(texts for _, texts in shown), strict=True):
        table.add_row(*(text or "-" for text in row))
    console.print(table)
    _print_note(results[0], console)


def _latencies(bench: Bench, result: Result) -> Table:
    table = Table(title="ms")
    percentiles = [f"p{p:g}" for p in bench.report.metric_percentiles.values]
    columns = ["mean", "median", "std", *percentiles]
    table.add_column()
    for column in columns:
        table.add_column(column, justify="right")
    for name in bench.report.metrics:
        values = (f"{result[f'{column}_{name}_ms']:.2f}" for column in columns)
        table.add_row(NAMES[name], *values)
    return table


def _print_note(result: Result, console: Console) -> None:
    if "synthetic_note" in result:
        console.print(result["synthetic_note"], markup=False, highlight=False)


def _formatted(form: str, result: Result) -> str | None:
    """The text with its figures; None where one of them is not known."""
    try:
        return form.format_map(result)
    except (KeyError, TypeError):  # not among the figures, or None
        return None
