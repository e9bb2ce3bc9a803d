"""`python -m serving.host_bench`: what the host spends on a step, in the scheduler and in the whole
engine, and on a long prompt's look-up, with a device that answers at once. Prints JSON.
"""

import gc
import json
import platform
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial

from configs.serving import ServingConfig
from minimax_jax.chat import Tokenizer
from minimax_jax.loaded import find
from serving.engine_bench import Load, measure
from serving.scheduling.pages import Pages
from serving.scheduling.plan import RankPlan, RankResult, StepPlan, StepResult
from serving.scheduling.request import Asked, Request
from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.scheduler import Scheduler

STEPS = 2000
WARM_UP = 200
PROMPT = 1000  # tokens
LONG_PROMPT = 131_072
REPEATS = 20
ENGINE_LOADS = {
    "8_running": Load(running=8),
    "256_running": Load(running=256),
    "256_running_stop_strings": Load(running=256, stop=("STOP",)),
    "256_running_logprobs": Load(running=256, logprobs=5),
    "256_running_7_drafts": Load(running=256, drafts=7),
    "256_running_read_every_5_ms": Load(running=256, paced_s=0.005),
}


def main() -> None:
    """Measures each case and prints medians and 99th percentiles."""
    report: dict[str, object] = {"processor": platform.processor() or platform.machine()}
    report["python"] = platform.python_version()
    for running in (8, 256):
        for drafts in (0, 7):
            key = f"us_per_step_{running}_running_{drafts}_drafts"
            report[key] = _percentiles(_decode_steps(running, drafts))
    tokenizer = Tokenizer.load(find("tiny"))
    for name, load in ENGINE_LOADS.items():
        costs = measure(load, tokenizer)
        report[f"us_per_step_engine_{name}"] = _percentiles(costs.thread)
        report[f"us_per_step_event_loop_{name}"] = round(costs.loop * 1e6, 3)
    report["ms_lookup_131072_tokens"] = _percentiles(_lookups(hashed=False), 1e3)
    report["ms_lookup_131072_tokens_hashed_before"] = _percentiles(_lookups(hashed=True), 1e3)
    report["ms_admission_131072_tokens"] = _percentiles(_admissions(), 1e3)
    print(json.dumps(report, indent=2))


def _decode_steps(running: int, drafts: int) -> list[float]:
    """Seconds of plan and commit together, with two plans out, all sequences decoding."""
    config = ServingConfig(
        max_num_seqs=running,
        num_speculative_tokens=drafts,
        num_scheduler_steps=1,
        enable_prefix_caching=True,
    )
    scheduler = Scheduler(config, num_blocks=running * 160)
    params = SamplingParams(max_tokens=STEPS * 10)
    for index in range(running):
        prompt = [index, *range(PROMPT)]
        scheduler.add(Asked(request_id=str(index), prompt=prompt, sampling=params))
    plans: list[StepPlan] = []
    while scheduler.waiting or any(one.is_prefilling for one in scheduler.ranks[0].running):
        _advance(scheduler, plans, drafts)
    spent = [_timed(lambda: _advance(scheduler, plans, drafts)) for _ in range(STEPS)]
    return spent[WARM_UP:]


def _advance(scheduler: Scheduler, plans: list[StepPlan], drafts: int) -> None:
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    plan = plans.pop(0)
    scheduler.commit(StepResult(step_id=plan.step_id, ranks=[_answer(plan.ranks[0], drafts)]))


def _answer(plan: RankPlan, drafts: int) -> RankResult:
    """Half of the drafts are kept."""
    tokens = [[1] * (1 + drafts // 2)] * len(plan.decode_slots)
    return RankResult(prefills=[[1][: row.is_last] for row in plan.prefills], decodes=tokens)


def _long_request(config: ServingConfig) -> Request:
    prompt = array("i", range(LONG_PROMPT))
    asked = Asked(request_id="long", prompt=prompt, sampling=SamplingParams())
    return Request(asked, 0, seed=0, arrival=0, max_model_len=config.max_model_len)


def _lookups(*, hashed: bool) -> list[float]:
    """Seconds to hash and to find all blocks of a long prompt, or only to find them."""
    config = ServingConfig()
    count = LONG_PROMPT // config.block_size
    pages = Pages(count)
    hashes = _long_request(config).hashes(count, config.block_size)
    for block, name in zip(pages.allocate(count), hashes, strict=True):
        pages.publish(block, name)
    spent = []
    for _ in range(REPEATS):
        request = _long_request(config)
        if hashed:
            request.hashes(count, config.block_size)
        spent.append(_timed(partial(_look_up, pages, request, count, config.block_size)))
    return spent


def _look_up(pages: Pages, request: Request, count: int, block_size: int) -> None:
    assert len(pages.find(request.hashes(count, block_size))) == count


def _admissions() -> list[float]:
    """Seconds of everything between a long prompt's arrival and the plan that has its first chunk,
    with all but its last block found.
    """
    scheduler = Scheduler(ServingConfig(), num_blocks=2100)
    plans: list[StepPlan] = []
    spent = []
    for index in range(REPEATS + 1):
        prompt = list(range(LONG_PROMPT))
        asked = Asked(request_id=str(index), prompt=prompt, sampling=SamplingParams(max_tokens=1))
        spent.append(_timed(partial(_arrive, scheduler, asked, plans)))
        while plans:
            _advance(scheduler, plans, 0)
    return spent[1:]


def _arrive(scheduler: Scheduler, asked: Asked, plans: list[StepPlan]) -> None:
    scheduler.add(asked)
    plan = scheduler.plan()
    assert plan is not None
    plans.append(plan)


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _percentiles(seconds: list[float], scale: float = 1e6) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered) * scale, 3),
        "p99": round(ordered[int(len(ordered) * 0.99)] * scale, 3),
    }


if __name__ == "__main__":
    gc.freeze()
    main()
