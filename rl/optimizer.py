"""AdamW on matrices and vectors, with warm-up, a constant rate and a linear end; and parameters as
a flat dict by name.

A flat dict of arrays costs a jitted step least on the host, and a checkpoint of it needs no model
to be read.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from minimax_jax.quantize import path_of_leaf

BETA1, BETA2 = 0.9, 0.95

Parameters = dict[str, Array]
Metrics = dict[str, Float[Array, "..."]]
M = TypeVar("M", bound=nnx.Module)


@runtime_checkable
class OptimizerConfig(Protocol):
    """The fields of a run's config that the optimiser reads."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_fraction(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip_norm(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Structure(Generic[M]):
    """A model without its arrays: what turns `Parameters` into a model and back."""

    names: tuple[str, ...]
    tree: Any  # jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, model: M) -> "Structure[M]":
        """The structure of a model, or of `jax.eval_shape` of one."""
        paths, tree = jax.tree_util.tree_flatten_with_path(model)
        return cls(names=tuple(path_of_leaf(path) for path, _ in paths), tree=tree)

    def model(self, parameters: Parameters) -> M:
        """The model that holds these arrays."""
        return jax.tree.unflatten(self.tree, [parameters[name] for name in self.names])

    def parameters(self, model: M) -> Parameters:
        """The arrays of a model by name, such as `layers.0.attention.q_proj.weight`."""
        return dict(zip(self.names, jax.tree.leaves(model), strict=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes. Random keys are folded from the seed and the step, so they need no
    place here.
    """

    parameters: Parameters
    optimizer: Any
    step: Int[Array, ""]

    @classmethod
    def new(cls, parameters: Parameters, optimizer: optax.GradientTransformation) -> "TrainState":
        """The state before the first step."""
        return cls(parameters=parameters, optimizer=optimizer.init(parameters), step=jnp.int32(0))

    def updated(self, grads: Parameters, optimizer: optax.GradientTransformation) -> "TrainState":
        """The state after a step along these gradients."""
        updates, moments = optimizer.update(grads, self.optimizer, self.parameters)
        parameters = cast(Parameters, optax.apply_updates(self.parameters, updates))
        return TrainState(parameters=parameters, optimizer=moments, step=self.step + 1)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; weight decay on arrays of two dimensions and more."""
    adamw = optax.adamw(
        schedule(config),
        b1=BETA1,
        b2=BETA2,
        weight_decay=config.weight_decay,
        mask=lambda parameters: jax.tree.map(lambda x: x.ndim >= 2, parameters),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, constant, and linear to 0 over the last `decay_fraction` of the steps."""
    decay = round(config.steps * config.decay_fraction)
    pieces = [
        optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps),
        optax.constant_schedule(config.learning_rate),
        optax.linear_schedule(config.learning_rate, 0.0, decay),
    ]
    ends = [config.warmup_steps, max(config.warmup_steps, config.steps - decay)]
    return optax.join_schedules(pieces, ends)
