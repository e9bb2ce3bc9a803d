"""What drawing answers and learning from them has to do: FLOP of products, and bytes that have to
be read. What `remat` computes again is no part of it, nor are the products of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.model import ModelConfig
from minimax_jax.bench.work import decode_bytes, prefill_flops
from minimax_jax.cache import PoolLayout
from minimax_jax.model import Model
from rl.optimizer import Parameters
from rl.rollouts import Rollout

# Products of an update for each of the forward pass: those again for the gradient of activations
# (attention's twice, which is left out), and for the gradient of weights where these are trained.
PASSES = {"lora": 2, "full": 3}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What something took and had to do: products, then reading, one after the other."""

    name: str
    seconds: float
    tokens: int
    flops: int
    bytes: int
    parts: dict[str, float]  # seconds of its parts, where they were told apart

    def limit(self, rates: dict[str, float]) -> float:
        """Seconds at the rates (`minimax_jax.bench.command.device_limits`) of the device."""
        return self.flops / rates["flops"] + self.bytes / rates["bytes"]


def update_flops(config: ModelConfig, sequence: int, count: int, trained: str) -> int:
    """Of an update on `count` sequences, every place of which goes through the head."""
    head = 2 * config.hidden_size * config.vocab_size
    forward = prefill_flops(config, sequence) + (sequence - 1) * head
    return count * forward * PASSES[trained]


def answer_bytes(
    model: Model, layout: PoolLayout, parameters: Parameters, rollouts: Sequence[Rollout]
) -> int:
    """Of all decode steps of answers of one length that were drawn in lock-step. The experts that
    are read are those of the rollouts' own record.
    """
    prompt, answer = len(rollouts[0].prompt), len(rollouts[0].tokens)
    adapter = sum(x.nbytes for x in parameters.values())
    contexts = range(prompt, prompt + answer)
    steps = zip(contexts, distinct_experts(rollouts), strict=True)
    batch = len(rollouts)
    return sum(adapter + decode_bytes(model, layout, batch, at, met) for at, met in steps)


def distinct_experts(rollouts: Sequence[Rollout]) -> list[int]:
    """How many experts the answers' tokens met in each decode step, summed over layers. The last
    token of an answer is not fed: that step counts as the one before.
    """
    prompt = len(rollouts[0].prompt)
    chosen = np.stack([one.choices[prompt:] for one in rollouts if one.choices is not None], axis=1)
    met = [sum(len(np.unique(step[:, layer])) for layer in range(step.shape[1])) for step in chosen]
    return [*met, met[-1]]
