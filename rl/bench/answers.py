"""The time of answers: a wave of the local rollout with its prefill, each of full length."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from configs.rl import GRPOConfig
from minimax_jax.bench.work import prefill_flops
from minimax_jax.loaded import LoadedModel
from rl.bench.work import Measured, answer_bytes
from rl.local_rollout import LocalRollout
from rl.optimizer import Parameters
from rl.policy import Policy, published
from rl.rollouts import Rollout, RolloutRequest

REPEATS = 3  # rollouts of which the median counts; one before them compiles


@dataclass(frozen=True, kw_only=True)
class Answers:
    """So many answers at once, groups of the config's size to a prompt each."""

    rows: int
    prompt: int  # tokens
    answer: int  # tokens

    def check(self, config: GRPOConfig, block_size: int) -> None:
        """Raises ValueError for a part of a group."""
        if self.rows < 1 or self.rows % config.samples:
            raise ValueError(f"{self.rows} answers are no groups of samples={config.samples}")

    def request(self, config: GRPOConfig, num_tokens: int) -> RolloutRequest:
        """Random prompts, no token that ends an answer."""
        rng, count = np.random.default_rng(0), self.rows // config.samples
        return RolloutRequest(
            prompts=rng.integers(0, num_tokens, (count, self.prompt)).tolist(),
            seeds=np.arange(self.rows).reshape(count, config.samples),
            max_tokens=self.answer,
            temperature=config.temperature,
            stop_ids=(),
            record=True,
            record_cache=config.replay_cache,
        )


class TimedAnswers:
    """A rollout that `compile` runs once and `measure` times."""

    def __init__(
        self, loaded: LoadedModel, config: GRPOConfig, parameters: Parameters, case: Answers
    ):
        self.loaded, self.case, self.parameters = loaded, case, parameters
        self.name = f"rollout {case.rows} x ({case.prompt} + {case.answer})"
        model, adapter = published(loaded.model, parameters, config)
        self._policy = Policy(model=model, adapter=adapter, version=0)
        self._request = case.request(config, loaded.config.num_tokens)
        self._rollout = LocalRollout(loaded=loaded, wave=case.rows)

    def compile(self) -> None:
        """One rollout, which compiles its programs."""
        self._drawn()

    def measure(self) -> Measured:
        """The median of some."""
        times, rollouts = [], []
        for _ in range(REPEATS):
            start = time.perf_counter()
            rollouts = self._drawn()
            times.append(time.perf_counter() - start)
        case, model = self.case, self.loaded.model
        prefilled = len(self._request.prompts) * prefill_flops(model.config, case.prompt)
        return Measured(
            name=self.name,
            seconds=statistics.median(times),
            tokens=sum(len(one.tokens) for one in rollouts),
            flops=prefilled,
            bytes=answer_bytes(model, self.loaded.layout, self.parameters, rollouts),
            parts={},
        )

    def _drawn(self) -> list[Rollout]:
        return self._rollout(self._policy, self._request)
