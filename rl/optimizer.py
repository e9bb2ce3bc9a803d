"""AdamW on matrices and vectors, with warm-up, a constant rate and a linear end; and parameters as
a flat dict by name.

A flat dict of arrays costs a jitted step least on the host, and a checkpoint of it needs no model
to be read.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jaxtyping import Array

from configs.sft import SFTConfig
from minimax_jax.model import Model
from minimax_jax.quantize import path_of_leaf

BETA1, BETA2 = 0.9, 0.95

Parameters = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model without its arrays: what turns `Parameters` into a `Model` and back."""

    names: tuple[str, ...]
    tree: Any  # jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, model: Model) -> "Structure":
        """The structure of a model, or of `jax.eval_shape` of one."""
        paths, tree = jax.tree_util.tree_flatten_with_path(model)
        return cls(names=tuple(path_of_leaf(path) for path, _ in paths), tree=tree)

    def model(self, parameters: Parameters) -> Model:
        """The model that holds these arrays."""
        return jax.tree.unflatten(self.tree, [parameters[name] for name in self.names])

    def parameters(self, model: Model) -> Parameters:
        """The arrays of a model by name, such as `layers.0.attention.q_proj.weight`."""
        return dict(zip(self.names, jax.tree.leaves(model), strict=True))


def make_optimizer(config: SFTConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; weight decay on arrays of two dimensions and more."""
    adamw = optax.adamw(
        schedule(config),
        b1=BETA1,
        b2=BETA2,
        weight_decay=config.weight_decay,
        mask=lambda parameters: jax.tree.map(lambda x: x.ndim >= 2, parameters),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def schedule(config: SFTConfig) -> optax.Schedule:
    """Linear warm-up, constant, and linear to 0 over the last `decay_fraction` of the steps."""
    decay = round(config.steps * config.decay_fraction)
    pieces = [
        optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps),
        optax.constant_schedule(config.learning_rate),
        optax.linear_schedule(config.learning_rate, 0.0, decay),
    ]
    ends = [config.warmup_steps, max(config.warmup_steps, config.steps - decay)]
    return optax.join_schedules(pieces, ends)
