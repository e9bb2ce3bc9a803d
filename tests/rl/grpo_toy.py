"""A random model of two layers with the small tokenizer, and rollouts of it, for tests of GRPO."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.rl import GRPOConfig
from minimax_jax.cache import CacheFormats
from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.loaded import LoadedModel
from minimax_jax.model import Model
from rl.experience import Experience
from rl.grpo_step import Program
from rl.optimizer import Parameters
from rl.packing import PackShape
from rl.policy import Policy, initial_parameters, published
from rl.rollouts import Rollout, RolloutRequest
from tests.rl.toy import MODEL, TEXT

CONFIG = GRPOConfig(
    rank=4,
    prompts=2,
    samples=4,
    max_tokens=24,
    wave=16,
    steps=4,
    learning_rate=1e-2,
    warmup_steps=1,
    pack_tokens=256,
    eval_every=100,
    eval_problems=4,
    save_every=100,
    dump_every=2,
)
SHAPE = PackShape(tiles=16, tile_tokens=16, blocks=8)
PROMPTS = ([5, 6, 7], list(range(20, 36)), list(range(40, 80)))  # within, at the end of a block


def toy_loaded(kv: str = "f32", seed: int = 0) -> LoadedModel:
    """A model of random weights, of which no answer is right."""
    return LoadedModel(
        model=Model(replace(MODEL, num_tokens=500), nnx.Rngs(seed)),
        formats=CacheFormats(kv=kv, index=kv),
        folder=TEXT,
        tokenizer=Tokenizer.load(TEXT),
        template=ChatTemplate.load(TEXT),
    )


def program(loaded: LoadedModel, config: GRPOConfig = CONFIG) -> Program:
    return Program(model=loaded.config, layout=loaded.layout, config=config)


def shaken(parameters: Parameters, size: float = 0.1) -> Parameters:
    """Parameters of an adapter that does something: `b` is 0 in a new one."""
    return {
        name: x + size * jax.random.normal(jax.random.key(number), x.shape)
        for number, (name, x) in enumerate(sorted(parameters.items()))
    }


def toy_policy(loaded: LoadedModel, config: GRPOConfig = CONFIG) -> tuple[Parameters, Policy]:
    parameters = shaken(initial_parameters(loaded, config))
    model, adapter = published(loaded.model, parameters, config)
    return parameters, Policy(model=model, adapter=adapter, version=3)


def toy_request(temperature: float = 1.0, samples: int = 3, **changes) -> RolloutRequest:
    request = RolloutRequest(
        prompts=PROMPTS,
        seeds=np.arange(len(PROMPTS) * samples).reshape(len(PROMPTS), samples),
        max_tokens=24,
        temperature=temperature,
        stop_ids=(3, 4, 9, 11, 17),
        record=True,
    )
    return replace(request, **changes)


def experiences(rollouts: list[Rollout], *, choices: bool = True) -> list[Experience]:
    """Rollouts with advantages of both signs and the weights of a token mean."""
    count = sum(len(rollout.tokens) for rollout in rollouts)
    return [
        Experience(
            tokens=np.array([*rollout.prompt, *rollout.tokens]),
            logprobs=rollout.logprobs,
            advantage=(-1.0) ** number * (1 + number / 10),
            weight=1 / count,
            choices=rollout.choices if choices else None,
            pages=rollout.pages,
        )
        for number, rollout in enumerate(rollouts)
    ]


def on_device(pack):
    return jax.tree.map(jnp.asarray, pack)
