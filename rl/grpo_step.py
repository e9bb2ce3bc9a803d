"""One GRPO update, jitted: the gradient of each pack added up, then AdamW once.

The model runs over packs as it ran in the rollout: the same weights in their stored formats, keys
and values as the cache gives them back (with `replay_cache` the rollout's own), and the experts
that the rollout chose. The indexer has no gradient and chooses by itself.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from configs.model import ModelConfig
from configs.rl import GRPOConfig
from minimax_jax.cache import NO_ROUTE, PoolLayout
from minimax_jax.model import Model
from rl.corrections import Tokens, detached
from rl.experience import ExperiencePack
from rl.losses import DIVERGENCES, LossRule, k3, policy_losses
from rl.optimizer import Metrics, Parameters, TrainState, make_optimizer
from rl.placement import Places
from rl.policy import assembled
from rl.token_statistics import frozen_head_statistics, token_statistics

MAXIMA = "max/"  # names of metrics that are combined by their maximum, all others by their sum
RULE = ("clip_low", "clip_high", "dual_clip", "correction", "correction_low", "correction_high")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the update is compiled for: equal programs share one compilation."""

    model: ModelConfig
    layout: PoolLayout
    config: GRPOConfig
    places: Places = Places()  # on a mesh; on one device everything is where it is

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The run's optimiser."""
        return make_optimizer(self.config)

    @cached_property
    def rule(self) -> LossRule:
        """The run's loss."""
        bounds = {name: getattr(self.config, name) for name in RULE}
        return LossRule(kind=self.config.loss, **bounds)


@partial(jax.jit, static_argnames=("program",), donate_argnames=("gradient",))
def accumulate(
    gradient: Parameters,
    base: Model,
    parameters: Parameters,
    pack: ExperiencePack,
    program: Program,
) -> tuple[Parameters, Metrics]:
    """The gradient with that of one more pack, and sums over the pack's sampled tokens."""
    more, sums = jax.grad(pack_loss, has_aux=True)(parameters, base, pack, program)
    return program.places.constrained(jax.tree.map(jnp.add, gradient, more)), sums


@partial(jax.jit, static_argnames=("program",), donate_argnames=("gradient",))
def apply(
    state: TrainState, gradient: Parameters, program: Program
) -> tuple[TrainState, Float[Array, ""]]:
    """The state after one update along a gradient, and the gradient's norm before it was clipped.

    The state is not donated: its parameters may be those of a running rollout.
    """
    updated = state.updated(gradient, program.optimizer)
    return program.places.constrained(updated), optax.tree.norm(gradient)


def pack_loss(
    parameters: Parameters, base: Model, pack: ExperiencePack, program: Program
) -> tuple[Float[Array, ""], Metrics]:
    """A pack's part of the loss: the sum of weight x loss over its sampled tokens."""
    config, mask = program.config, _flat(pack.mask)
    logprobs, entropies, overlap = _scored(parameters, base, pack, program)
    tokens = Tokens.of(
        logprobs,
        _flat(pack.rollout_logprobs),
        _flat(pack.advantages),
        mask,
        _flat(pack.sequences),
    )
    found = policy_losses(tokens, program.rule)
    weights = _flat(pack.weights)
    policy_loss = jnp.sum(weights * found.losses)
    sums = {"actor/pg_loss": policy_loss, **_mismatch(tokens, found.weights)}
    sums |= {
        "tokens": jnp.sum(mask),
        "rollout_corr/not_finite": jnp.sum(mask) - jnp.sum(tokens.mask),
        "actor/entropy": jnp.sum(entropies * mask),
        "actor/pg_clipfrac": jnp.sum(found.clipped),
        "actor/pg_clipfrac_lower": jnp.sum(found.dual_clipped),
        **overlap,
    }
    loss = policy_loss
    if config.divergence_weight > 0:
        reference = detached(_reference(base, pack, program))
        apart = jnp.where(tokens.mask > 0, tokens.logprobs - reference, 0.0)
        divergence = DIVERGENCES[config.divergence](apart)
        loss += config.divergence_weight * jnp.sum(weights * divergence)
        sums["actor/kl_loss"] = jnp.sum(divergence)
    return loss, sums | {"loss": loss}


def _scored(parameters: Parameters, base: Model, pack: ExperiencePack, program: Program):
    """Log-probabilities, entropies, and how the own choice of experts agrees with the replayed."""
    model, adapter = assembled(base, parameters, program.config)
    replay = None if pack.choices is None else jnp.asarray(pack.choices).astype(jnp.int32)
    pages = None if pack.pages is None else jnp.asarray(pack.pages)
    remat, layout = program.config.remat, program.layout
    walked = model.walk(pack.batch, layout, None, adapter, remat=remat, replay=replay, record=pages)
    targets, temperature = jnp.asarray(pack.targets), program.config.temperature
    if program.config.trained == "lora":  # never of the head: rl/adapters.py
        found = frozen_head_statistics(model, walked.hidden, targets, temperature)
    else:
        found = token_statistics(model, adapter, walked.hidden, targets, temperature)
    return *found, {} if replay is None else _agreement(walked.choices, replay)


def _reference(base: Model, pack: ExperiencePack, program: Program) -> Float[Array, "T"]:
    """Log-probabilities of the untrained model, which is the base without an adapter."""
    hidden, _, _ = base.hidden(pack.batch, program.layout)
    targets, temperature = jnp.asarray(pack.targets), program.config.temperature
    return frozen_head_statistics(base, hidden, targets, temperature)[0]


def _mismatch(tokens: Tokens, weights: Float[Array, "T"]) -> Metrics:
    """How far the rollout's log-probabilities are from the trainer's (spec/rl 1.7)."""
    apart, on = detached(tokens.log_ratio), tokens.mask
    return {
        "rollout_corr/kl": -jnp.sum(apart * on),
        "rollout_corr/k3_kl": jnp.sum(k3(-apart) * on),
        "rollout_corr/logprob_abs_diff": jnp.sum(jnp.abs(apart) * on),
        f"{MAXIMA}rollout_corr/logprob_abs_diff_max": jnp.max(jnp.abs(apart) * on),
        "rollout_corr/rollout_is_mean": jnp.sum(weights * on),
        "rollout_corr/rollout_is_square": jnp.sum(weights**2 * on),
    }


def _agreement(own: Array, replayed: Array) -> Metrics:
    """Of the tokens whose experts were recorded: the sum over layers of the share of the own
    choice among the replayed, how often they differ, and how often nothing is common.
    """
    known = replayed[..., 0] != NO_ROUTE
    common = jnp.any(own[..., :, None] == replayed[..., None, :], axis=-1)
    share = jnp.mean(common.astype(jnp.float32), axis=-1)
    return {
        "routing/places": jnp.sum(known).astype(jnp.float32),
        "routing/overlap_mean": jnp.sum(share * known),
        "routing/flip_frac": jnp.sum((share < 1) & known).astype(jnp.float32),
        "routing/zero_overlap_frac": jnp.sum((share == 0) & known).astype(jnp.float32),
    }


def _flat(x) -> Array:
    return jnp.asarray(x).reshape(-1)
