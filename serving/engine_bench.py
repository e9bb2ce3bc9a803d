"""What the whole engine costs the host in a step, with a device that answers when it is asked.

The thread's share and the event loop's are processor times: beside them a real device works, and
neither has to wait for the other.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from configs.serving import ServingConfig
from minimax_jax.chat import Tokenizer
from serving.engine import BatchingEngine
from serving.engine_api import EngineInfo, Output, Profile
from serving.scheduling.plan import RankResult, RowLogprobs, StepPlan, StepResult
from serving.scheduling.request import Asked
from serving.scheduling.sampling_params import SamplingParams

STEPS = 1000
WARM_UP = 200
PROMPT = 100  # tokens
VARIETY = 61  # steps, after which the same tokens come again


@dataclass(frozen=True, kw_only=True)
class Load:
    """So many sequences, all decoding. With `paced_s` a step takes so long and readers read each
    output; without, steps follow one another and nobody reads.
    """

    running: int
    drafts: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    paced_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of processor time: of each step on the engine's thread, and of a step's outputs on
    the event loop on average.
    """

    thread: list[float]
    loop: float


def measure(load: Load, tokenizer: Tokenizer) -> Costs:
    """Runs an engine under the load for `STEPS` steps."""
    return asyncio.run(_measure(load, tokenizer))


async def _measure(load: Load, tokenizer: Tokenizer) -> Costs:
    config = ServingConfig(
        max_num_seqs=load.running,
        num_speculative_tokens=load.drafts,
        num_scheduler_steps=1,
        enable_prefix_caching=False,
    )
    device = _Answers(load)
    engine = BatchingEngine(_info(load), config, device, tokenizer=tokenizer)
    params = SamplingParams(
        max_tokens=(WARM_UP + 2 * STEPS) * (1 + load.drafts), stop=load.stop, logprobs=load.logprobs
    )
    prompts = ([index, *range(PROMPT)] for index in range(load.running))
    streams = [
        engine.submit(Asked(request_id=str(i), prompt=prompt, sampling=params))
        for i, prompt in enumerate(prompts)
    ]
    readers = [asyncio.ensure_future(_read(one)) for one in streams if load.paced_s]
    began, step = time.thread_time(), 0
    while len(device.times) < WARM_UP + STEPS:
        await asyncio.sleep(0.01)
        if len(device.times) < WARM_UP:
            began, step = time.thread_time(), len(device.times)
    spent = (time.thread_time() - began) / max(1, len(device.times) - step)
    times = device.times[WARM_UP : WARM_UP + STEPS]
    await engine.close()
    await asyncio.gather(*readers)
    return Costs(thread=[b - a for a, b in pairwise(times)], loop=spent)


async def _read(stream: AsyncIterator[Output]) -> None:
    async for _ in stream:
        pass


class _Answers:
    """A device that keeps half of the drafts; `times` are the thread's processor times at each
    step in which everyone decoded.
    """

    def __init__(self, load: Load):
        self.num_blocks = load.running * (PROMPT // 128 + 2 + 3 * STEPS * (1 + load.drafts) // 128)
        self.times: list[float] = []
        self._load = load
        count = 1 + load.drafts // 2
        self._decodes = [_rows(load.running, count, step) for step in range(VARIETY)]
        top_ids, top_values = [[1, 2, 3, 4, 5]] * count, [[-1.0, -2.0, -3.0, -4.0, -5.0]] * count
        self._logprobs = RowLogprobs(values=[-1.0] * count, top_ids=top_ids, top_values=top_values)

    def check(self, sampling: SamplingParams) -> None:
        """Takes everything."""

    def dispatch(self, plan: StepPlan, masks: object) -> "_Answer":
        return _Answer(self, plan)

    def result(self, plan: StepPlan) -> StepResult:
        (part,) = plan.ranks
        if self._load.paced_s:
            time.sleep(self._load.paced_s)
        if len(part.decode_slots) == self._load.running:
            self.times.append(time.thread_time())
        wants = self._load.logprobs is not None
        slots = [*(row.slot for row in part.prefills), *part.decode_slots]
        rank = RankResult(
            prefills=[[1][: row.is_last] for row in part.prefills],
            decodes=self._decodes[plan.step_id % VARIETY][: len(part.decode_slots)],
            logprobs=dict.fromkeys(slots, self._logprobs) if wants else {},
        )
        return StepResult(step_id=plan.step_id, ranks=[rank])

    def experts(self, rank: int, block_ids: Sequence[int], count: int) -> np.ndarray:
        raise NotImplementedError("nothing is recorded")

    def update(self, **changes: object) -> None:
        """Has no weights."""

    def start_profile(self, profile: Profile) -> None:
        """Has nothing to show."""

    def stop_profile(self) -> None:
        """Has nothing to show."""


@dataclass(frozen=True)
class _Answer:
    device: _Answers
    plan: StepPlan

    def result(self) -> StepResult:
        return self.device.result(self.plan)


def _rows(running: int, count: int, step: int) -> list[list[int]]:
    """Tokens of every row, which differ by row, place and step: merges, as most of a text is, from
    behind the single bytes up to the markers.
    """
    first = range(step * 37, step * 37 + running * 7, 7)
    return [[256 + (one + 3 * place) % 224 for place in range(count)] for one in first]


def _info(load: Load) -> EngineInfo:
    return EngineInfo(
        max_model_len=ServingConfig().max_model_len,
        vocab_size=512,
        model_type="",
        architectures=(),
        eos_token_ids=(),
        max_num_seqs=load.running,
        block_size=128,
        kv_cache_dtype="",
        model_dtype="",
        attention_backend="",
    )
