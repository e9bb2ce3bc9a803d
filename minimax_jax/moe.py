"""Mixture of experts: sigmoid router with a selection bias, routed experts, one shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from configs.model import ModelConfig
from configs.parts import MoEConfig
from minimax_jax.cache import NO_ROUTE
from minimax_jax.experts import Experts
from minimax_jax.layers import MLP, normal
from minimax_jax.lora import Adapter, part
from sharding.rules import SERVE, Rules


class Router(nnx.Module):
    """Scores and chooses experts in float32. The bias takes part in the choice only (spec/model
    2.11).
    """

    def __init__(self, dim: int, config: MoEConfig, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, config.num_experts, dim), axes=(None, "embed"))
        self.bias = nnx.Param(jnp.zeros(config.num_experts), axes=(None,))
        self.config = config

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        """Expert ids (equal scores: the lower id) and mixing weights, which sum to
        `routed_scale`.
        """
        scores = self.scores(x)
        experts = self.choice(scores)
        return experts, self.mixing(scores, experts)

    def scores(self, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
        """Every expert's score, in (0, 1)."""
        weight = self.weight.get_value().astype(jnp.float32)
        logits = jnp.einsum("TD,ED->TE", x.astype(jnp.float32), weight, precision="highest")
        return jax.nn.sigmoid(logits)

    def choice(self, scores: Float[Array, "T E"]) -> Int[Array, "T X"]:
        """The experts of the best biased scores."""
        biased = scores + self.bias.get_value().astype(jnp.float32)
        _, experts = lax.top_k(biased, self.config.experts_per_token)
        return experts

    def mixing(
        self, scores: Float[Array, "T E"], experts: Int[Array, "T X"]
    ) -> Float[Array, "T X"]:
        """The scores of these experts, whoever chose them, so that each has its gradient; their sum
        is `routed_scale`.
        """
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
        total = jnp.sum(chosen, axis=-1, keepdims=True)
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # all of them may underflow to 0
        return chosen / total * self.config.routed_scale


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
        replay: Int[Array, "T X"] | None = None,
        rules: Rules = SERVE,
    ) -> tuple[Float[Array, "*rows D"], Int[Array, "T X"]]:
        """The output, and the experts that the router chooses for the flattened rows. Where
        `replay` holds ids (not `NO_ROUTE`) these are used instead.
        """
        flat_TD = x.reshape(-1, x.shape[-1])
        own, weights = self.router(flat_TD)
        used = own
        if replay is not None:
            used = jnp.where(replay == NO_ROUTE, own, replay)
            weights = self.router.mixing(self.router.scores(flat_TD), used)
        routed = self.experts(flat_TD, used, weights, part(adapter, "experts"), rules)
        return routed.reshape(x.shape) + self.shared(x, part(adapter, "shared")), own
