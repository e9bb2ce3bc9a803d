"""What a rollout is asked for and what it gives back. Any `RolloutFn` will do: the local one
(`rl.local_rollout`) or a server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, UInt8

from configs.model import ModelConfig
from minimax_jax.speculative.stats import SpeculationStats
from rl.policy import Policy

Finish = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Prompts to be answered `len(seeds[p])` times each. Sampling is at the temperature alone:
    with a cut such as top-p the two sides would not speak of the same distribution.
    """

    prompts: Sequence[Sequence[int]]
    seeds: Int[np.ndarray, "P G"]
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    record: bool  # the experts of each token
    record_cache: bool = False  # the pages with its keys and values


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One answer. `tokens` are those generated, the stop id among them.

    `logprobs` are at the temperature, from the program that drew the tokens. `choices` are the
    experts of all tokens but the last, which was never fed; prompt's and answer's together.
    `pages` are the blocks of all tokens as the rollout's cache holds them, `speculation` what
    became of drafts, if there were any.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Float[np.ndarray, "n"]
    finish: Finish
    version: int  # updates before the weights that drew it
    choices: UInt8[np.ndarray, "m L X"] | None = None
    pages: UInt8[np.ndarray, "W lines 128"] | None = None
    speculation: SpeculationStats | None = None


@runtime_checkable
class RolloutFn(Protocol):
    """Answers prompts with a policy's weights: all samples of the first prompt, then of the
    second, and so on.
    """

    def __call__(self, policy: Policy, request: RolloutRequest) -> list[Rollout]: ...


def check_rollouts(
    rollouts: Sequence[Rollout], request: RolloutRequest, version: int, config: ModelConfig
) -> None:
    """Raises ValueError when a rollout is not of its request: a wrong number of answers, old
    weights, log-probabilities or a record of experts of the wrong length.
    """
    wanted = request.seeds.size
    if len(rollouts) != wanted:
        raise ValueError(f"the rollout gave {len(rollouts)} answers, not {wanted}")
    samples = request.seeds.shape[1]
    for number, rollout in enumerate(rollouts):
        where = f"answer {number} of the rollout"
        if rollout.prompt != tuple(request.prompts[number // samples]):
            raise ValueError(f"{where} is to another prompt than was asked")
        if rollout.version != version:
            raise ValueError(f"{where} is of weights {rollout.version}, not {version}")
        if len(rollout.logprobs) != len(rollout.tokens):
            raise ValueError(
                f"{where} has {len(rollout.logprobs)} log-probabilities "
                f"for {len(rollout.tokens)} tokens"
            )
        if request.record:
            _check_choices(rollout, where, config)
        if request.record_cache and rollout.pages is None:
            raise ValueError(
                f"{where} has no pages of its cache, which replay_cache=true needs: record them in "
                "the rollout too, or set replay_cache=false"
            )


def _check_choices(rollout: Rollout, where: str, config: ModelConfig) -> None:
    if rollout.choices is None:
        raise ValueError(
            f"{where} has no record of experts, which replay=true needs: record them in the "
            "rollout too, or set replay=false"
        )
    rows = max(len(rollout.prompt) + len(rollout.tokens) - 1, 0)
    wanted = (rows, sum(config.moe_layers), config.moe.experts_per_token)
    if rollout.choices.shape != wanted:
        raise ValueError(
            f"{where} has a record of experts {list(rollout.choices.shape)}, "
            f"not {list(wanted)} (tokens but the last, MoE layers, experts a token)"
        )
