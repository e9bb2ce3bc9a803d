"""What is trained of a model, and the model that runs with it: an adapter beside the weights as
they are served, or all plain weights but the indexer's and the experts' biases.

The same two arguments, model and adapter, go into the rollout's steps and the trainer's. There is
no second copy of the weights that could differ.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from configs.rl import GRPOConfig
from minimax_jax.loaded import LoadedModel
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from rl.adapters import as_adapter, new_adapter
from rl.optimizer import Parameters, Structure

FROZEN = (".indexer.", ".router.bias")  # parts of names that full training leaves alone


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model to be sampled from or scored; `version` counts the updates before it."""

    model: Model
    adapter: Adapter
    version: int


def initial_parameters(loaded: LoadedModel, config: GRPOConfig) -> Parameters:
    """What is trained, before the first step, in float32.

    Raises ValueError for a model that cannot be trained so.
    """
    if loaded.adapter is not None:
        raise ValueError("the model has an adapter already: give the plain model")
    if config.trained == "full":
        return _plain_weights(loaded)
    key = jax.random.key(config.seed)
    return new_adapter(loaded.config, config.expert_lora, config.rank, key)


def assembled(base: Model, parameters: Parameters, config: GRPOConfig) -> tuple[Model, Adapter]:
    """The model and adapter that these parameters stand for; within a jitted step."""
    if config.trained == "lora":
        return base, as_adapter(parameters, config.alpha / config.rank)
    structure = Structure.of(base)
    weights = structure.parameters(base)
    cast = {name: x.astype(weights[name].dtype) for name, x in parameters.items()}
    return structure.model({**weights, **cast}), None


def published(base: Model, parameters: Parameters, config: GRPOConfig) -> tuple[Model, Adapter]:
    """`assembled`, compiled, for the rollout. With an adapter all arrays stay the same ones; the
    trainer must not donate parameters that were published.
    """
    run = assembled if config.trained == "lora" else _assembled
    return run(base, parameters, config)


_assembled = jax.jit(assembled, static_argnames=("config",))


def _plain_weights(loaded: LoadedModel) -> Parameters:
    parameters: Parameters = {}
    structure = Structure.of(loaded.model)
    for name, x in structure.parameters(loaded.model).items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"{name} is stored as {x.dtype}: trained=full needs plain weights; trained=lora "
                "trains beside quantised ones"
            )
        if not any(part in name for part in FROZEN):
            parameters[name] = x.astype(jnp.float32)
    return parameters
