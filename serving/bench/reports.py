"""A run, or one at each concurrency of a sweep, with its tables, file and picture."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.bench.client import AskError
from serving.bench.options import Bench
from serving.bench.pictures import frontier, plot_frontier, plot_run, points
from serving.bench.results import details, results
from serving.bench.run import Setting, run
from serving.bench.tables import print_result, print_sweep

PROMPTS_A_USER = 10  # in a sweep, as published ones do
Result = dict[str, Any]


async def run_once(bench: Bench, setting: Setting) -> list[Result]:
    """One run and all of its reports."""
    done = await run(bench, setting)
    result = results(bench, done)
    print_result(bench, result, setting.console)
    if bench.report.save_result:
        detailed = details(done) if bench.report.save_detailed else {}
        _save(bench, result, result | detailed, setting)
    if bench.report.plot is not None and result["completed"]:
        plot_run(result, done, bench.report.plot)
    return [result]


async def run_sweep(bench: Bench, setting: Setting) -> list[Result]:
    """A run at each concurrency, with prompts of its own, and the frontier that they draw."""
    assert bench.report.sweep is not None
    all_results: list[Result] = []
    for place, users in enumerate(map(int, bench.report.sweep.values)):
        if setting.stop.is_set():
            break
        await _flush(setting)
        setting.console.print(f"{users} at a time", highlight=False)
        level = _level(bench, users, bench.traffic.seed + place)
        all_results.append(results(level, await run(level, setting)))
    print_sweep(all_results, setting.console)
    if bench.report.save_result:
        first, best = all_results[0], frontier(points(all_results))
        whole = {"results": all_results, "frontier": [_point(point) for point in best]}
        _save(bench, first, whole, setting)
    if bench.report.plot is not None:
        plot_frontier(all_results, bench.report.plot)
    return all_results


def _level(bench: Bench, users: int, seed: int) -> Bench:
    count = None if bench.is_agentic else bench.traffic.num_prompts or PROMPTS_A_USER * users
    traffic = replace(bench.traffic, max_concurrency=users, num_prompts=count, seed=seed)
    return replace(bench, traffic=traffic, report=replace(bench.report, sweep=None))


async def _flush(setting: Setting) -> None:
    """Drops the prefix cache: prompts of a file are the same in every run."""
    try:
        await setting.client.flush()
    except AskError as error:
        text = f"the prefix cache was not dropped before this run: {error}"
        setting.console.print(text, markup=False, highlight=False)


def _point(point: Sequence[float]) -> Result:
    names = ("tokens_per_s_per_user", "output_throughput_per_gpu", "max_concurrency")
    return dict(zip(names, point, strict=True))


def _save(bench: Bench, result: Result, whole: Result, setting: Setting) -> None:
    name = bench.report.result_filename or _filename(bench, result)
    path = Path(bench.report.result_dir) / name
    path.write_text(json.dumps(whole, indent=1), "utf-8")
    setting.console.print(f"written to {path}", markup=False, highlight=False)


def _filename(bench: Bench, result: Result) -> str:
    """As vLLM names it: the label, the rate, the concurrency, the model and the time."""
    users = result["max_concurrency"]
    concurrency = f"-concurrency{users}" if users is not None else ""
    kind = "-sweep" if bench.report.sweep is not None else concurrency
    model = str(result["model_id"]).rpartition("/")[2]
    return f"{result['label']}-{result['request_rate']}qps{kind}-{model}-{result['date']}.json"
