"""Rollouts by a serving engine: a `RolloutFn` over whatever takes an adapter and answers prompts.

Which engine that is, is said above this package (`rl.__main__`). Its log-probabilities are those of
the model's own distribution: temperature 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from minimax_jax.lora import Adapter
from rl.policy import Policy
from rl.rollouts import Finish, Rollout, RolloutRequest


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What an engine answered to one prompt; the stop id is among the tokens. `choices` are the
    experts of all tokens but the last, the prompt's first, if the engine records them.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish
    choices: UInt8[np.ndarray, "m L X"] | None = None


@runtime_checkable
class Engine(Protocol):
    """What is asked of an engine."""

    def publish(self, adapter: Adapter) -> None:
        """From now on answers are those of this adapter; nothing cached is of another."""
        ...

    def answers(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], request: RolloutRequest
    ) -> list[Sampled]:
        """One answer to each prompt, in their order."""
        ...


class EngineRollout:
    """A `RolloutFn`; each policy is handed over once."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._published: Adapter = None

    def __call__(self, policy: Policy, request: RolloutRequest) -> list[Rollout]:
        """Raises ValueError for log-probabilities at another temperature, which an engine cannot
        give.
        """
        if request.temperature != 1:
            raise ValueError(
                f"temperature={request.temperature:g}: an engine's log-probabilities are those "
                "at temperature 1"
            )
        if policy.adapter is not self._published:
            self._engine.publish(policy.adapter)
            self._published = policy.adapter
        samples = request.seeds.shape[1]
        prompts = [prompt for prompt in request.prompts for _ in range(samples)]
        seeds = [int(seed) for seed in request.seeds.reshape(-1)]
        found = self._engine.answers(prompts, seeds, request)
        return [
            Rollout(
                prompt=tuple(prompt),
                tokens=tuple(one.tokens),
                logprobs=np.array(one.logprobs, np.float32),
                finish=one.finish,
                version=policy.version,
                choices=one.choices if request.record else None,
            )
            for prompt, one in zip(prompts, found, strict=True)
        ]
