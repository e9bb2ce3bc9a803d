"""Mixture of experts: sigmoid router with a selection bias, routed experts, one shared expert."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.model import ModelConfig
from configs.parts import MoEConfig
from minimax_jax.cache import NO_ROUTE
from minimax_jax.experts import Experts
from minimax_jax.layers import MLP, normal
from minimax_jax.lora import Adapter, part
from minimax_jax.shards import by_row, gathered_tokens, partial_sums, summed
from pallas_kernels.route import route
from pallas_kernels.route.reference import mixing, scores
from sharding.apply import constrain
from sharding.mesh import is_partitioned
from sharding.rules import SERVE, Rules


class Router(nnx.Module):
    """Scores and chooses experts in float32. The bias takes part in the choice only (spec/model
    2.11).
    """

    def __init__(self, dim: int, config: MoEConfig, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, config.num_experts, dim), axes=(None, "embed"))
        self.bias = nnx.Param(jnp.zeros(config.num_experts), axes=(None,))
        self.config = config

    def __call__(
        self, x: Float[Array, "*rows D"]
    ) -> tuple[Int[Array, "*rows X"], Float[Array, "*rows X"]]:
        """Expert ids (equal scores: the lower id) and mixing weights, which sum to
        `routed_scale`.
        """
        return route(
            x,
            self.weight.get_value(),
            self.bias.get_value(),
            count=self.config.experts_per_token,
            scale=self.config.routed_scale,
            one_device=not is_partitioned(),
        )

    def mixing(
        self, x: Float[Array, "*rows D"], experts: Int[Array, "*rows X"]
    ) -> Float[Array, "*rows X"]:
        """The mixing weights of these experts, whoever chose them, so that each score has its
        gradient.
        """
        return mixing(scores(x, self.weight.get_value()), experts, self.config.routed_scale)


class MoE(nnx.Module):
    """routed_scale x sum of the chosen experts, weighted, plus the shared expert."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.router = Router(config.hidden_size, config.moe, rngs)
        self.experts = Experts(config, rngs)
        self.shared = MLP(config.hidden_size, config.moe.shared_dim, config.mlp, rngs)

    def __call__(
        self, x: Float[Array, "*rows D"], adapter: Adapter = None
    ) -> Float[Array, "*rows D"]:
        return self.with_choice(x, adapter)[0]

    def with_choice(
        self,
        x: Float[Array, "*rows D"],
        adapter: Adapter = None,
        replay: Int[Array, "*rows X"] | None = None,
        rules: Rules = SERVE,
    ) -> tuple[Float[Array, "*rows D"], Int[Array, "*rows X"]]:
        """The output, and the experts that the router chooses. Where `replay` holds ids (not
        `NO_ROUTE`) these are used instead.

        A rank routes the tokens that it has; all tokens then meet every rank's part of the experts.
        Where that is the same part of routed and shared ones, few tokens meet them in the same
        launches.
        """
        own, weights = by_row(self.router, x, rules)
        used = own
        if replay is not None:
            used = jnp.where(replay == NO_ROUTE, own, replay)
            weights = self.router.mixing(x, used)
        into = ("batch", *[None] * (x.ndim - 1))
        x = gathered_tokens(x, rules)
        used, weights = (constrain(one, *into, rules=rules) for one in (used, weights))
        together, of_experts = self.experts.takes_shared(adapter, rules), part(adapter, "experts")
        shared = self.shared if together else None
        parts = [self.experts(x, used, weights, of_experts, rules, shared)]
        if not together:
            of_shared = part(adapter, "shared")
            parts.append(partial_sums(self.shared, x, of_shared, into=into, rules=rules))
        return summed(parts, rules), own
