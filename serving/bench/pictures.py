"""Pictures: a run's latencies over time, and the frontier of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.bench.answers import Answer
from serving.bench.results import Run
from serving.bench.summary import MS

Result = Mapping[str, Any]
Point = tuple[float, float, int]  # tok/s a user, tok/s a GPU, users
MEASURED = ("median_tokens_per_s_per_user", "output_throughput_per_gpu")
SYNTHETIC = ("synthetic_median_tokens_per_s_per_user", "synthetic_output_throughput_per_gpu")


def plot_run(result: Result, run: Run, picture: str) -> None:
    """Times to the first token and per token, by when a request was sent, and tokens a second.

    Raises ValueError when no request was completed, or the picture cannot be written.
    """
    from matplotlib.figure import Figure  # 0.4 s, and only pictures need it

    done = run.of("completed")
    if not done:
        raise ValueError("there is nothing to draw: no request was completed")
    sent = [one.sent - run.start for one in done]
    figure = Figure(figsize=(8, 8), layout="constrained")
    first, each, rate = figure.subplots(3, sharex=True)
    first.plot(sent, [one.ttft * MS for one in done], ".", color="tab:blue")
    first.set(ylabel="TTFT (ms)", title=_title_of_run(result))
    each.plot(sent, [one.tpot * MS for one in done], ".", color="tab:orange")
    each.set(ylabel="TPOT (ms)")
    rate.stairs(_tokens_per_s(done, run), color="tab:green")
    rate.set(ylabel="output tokens/s", xlabel="seconds since the start (of sending, above)")
    for axes in (first, each, rate):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _save(figure, picture)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats both ways, from the fastest for a user on."""
    best, kept = -np.inf, []
    for point in sorted(points, key=lambda one: (-one[0], -one[1])):
        if point[1] > best:
            kept.append(point)
            best = point[1]
    return kept


def points(results: Sequence[Result], keys: tuple[str, str] = MEASURED) -> list[Point]:
    """What of a sweep has both figures."""
    return [
        (result[keys[0]], result[keys[1]], result["max_concurrency"])
        for result in results
        if result.get(keys[0]) is not None and result.get(keys[1]) is not None
    ]


def plot_frontier(results: Sequence[Result], picture: str) -> None:
    """Tokens a second a user against those a GPU, each run with its users, and the frontier; a
    synthetic one is dashed and says so. ValueError as above.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    drawn = 0
    for keys, style, label in ((MEASURED, "o-", "measured"), (SYNTHETIC, "s--", "SYNTHETIC")):
        all_points = points(results, keys)
        best = frontier(all_points)
        if not best:
            continue
        drawn += 1
        line = axes.plot([p[0] for p in best], [p[1] for p in best], style, label=label)[0]
        for x, y, users in all_points:
            axes.plot(x, y, style[0], color=line.get_color(), alpha=0.4)
            axes.annotate(str(users), (x, y), xytext=(4, 4), textcoords="offset points")
    if not drawn:
        raise ValueError("there is nothing to draw: no run has tokens after the first")
    axes.set(title=_title_of_sweep(results[0]))
    axes.set(xlabel="tokens/s a user, median", ylabel="output tokens/s a GPU")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, picture)


def _title(result: Result) -> str:
    return f"{result['model_id']}, {result['dataset_name']}, {result['backend']}"


def _title_of_run(result: Result) -> str:
    note = "\nas measured; the SYNTHETIC projection is not drawn"
    return _title(result) + (note if "synthetic_note" in result else "")


def _title_of_sweep(result: Result) -> str:
    return _title(result) + (f"\n{result['synthetic_note']}" if "synthetic_note" in result else "")


def _tokens_per_s(done: Sequence[Answer], run: Run) -> np.ndarray:
    """Tokens of each second; an event's tokens at the time of the event."""
    times = [time - run.start for one in done for time in one.times]
    counts = [count for one in done for count in one.counts]
    seconds = int(max(times)) + 1
    return np.histogram(times, bins=seconds, range=(0, seconds), weights=counts)[0]


def _save(figure: Any, picture: str) -> None:
    if not Path(picture).parent.is_dir():
        raise ValueError(f"plot={picture!r} is in no folder that exists")
    figure.savefig(picture, dpi=100)
