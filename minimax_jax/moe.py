"""Mixture of experts: sigmoid router with a selection bias, routed experts over sorted tokens, one
shared expert.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from configs.model import ModelConfig
from configs.parts import MoEConfig
from minimax_jax.layers import MLP, normal, swiglu
from minimax_jax.lora import Adapter, LowRank, grouped_low_rank, part
from pallas_kernels.grouped_matmul import grouped_matmul, permute_rows


class Router(nnx.Module):
    """Scores and chooses experts in float32. The bias takes part in the choice only (spec/model
    2.11).
    """

    def __init__(self, dim: int, config: MoEConfig, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, config.num_experts, dim), axes=("experts", "embed"))
        self.bias = nnx.Param(jnp.zeros(config.num_experts), axes=("experts",))
        self.config = config

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        """Expert ids (equal scores: the lower id) and mixing weights, which sum to
        `routed_scale`.
        """
        weight = self.weight.get_value().astype(jnp.float32)
        logits = jnp.einsum("TD,ED->TE", x.astype(jnp.float32), weight, precision="highest")
        scores = jax.nn.sigmoid(logits)
        biased = scores + self.bias.get_value().astype(jnp.float32)
        _, experts = lax.top_k(biased, self.config.experts_per_token)
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
        total = jnp.sum(chosen, axis=-1, keepdims=True)
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # all of them may underflow to 0
        return experts, chosen / total * self.config.routed_scale


class GroupedLinear(nnx.Module):
    """One matrix an expert: [E, F, D] in any stored format."""

    def __init__(
        self, experts: int, out_dim: int, in_dim: int, axes: tuple[str | None, str | None], rngs
    ):
        weight = normal(rngs, experts, out_dim, in_dim)
        self.weight = nnx.Param(weight, axes=("experts", *axes))

    def __call__(
        self, x: Float[Array, "M D"], group_sizes: Int[Array, "E"], adapter: LowRank | None = None
    ) -> Float[Array, "M F"]:
        y = grouped_matmul(x, self.weight.get_value(), group_sizes)
        if adapter is not None:
            y += grouped_low_rank(x, adapter, group_sizes)
        return y.astype(x.dtype)


class Experts(nnx.Module):
    """The routed experts; w1 is gate, w3 up, w2 down, as in the checkpoint."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, moe = config.hidden_size, config.moe
        self.w1 = GroupedLinear(moe.num_experts, moe.expert_dim, dim, ("expert_mlp", "embed"), rngs)
        self.w3 = GroupedLinear(moe.num_experts, moe.expert_dim, dim, ("expert_mlp", "embed"), rngs)
        self.w2 = GroupedLinear(moe.num_experts, dim, moe.expert_dim, ("embed", "expert_mlp"), rngs)
        self.config = config.mlp

    def __call__(
        self, x: Float[Array, "M D"], group_sizes: Int[Array, "E"], adapter: Adapter = None
    ) -> Float[Array, "M D"]:
        gate = self.w1(x, group_sizes, part(adapter, "w1"))
        up = self.w3(x, group_sizes, part(adapter, "w3"))
        return self.w2(swiglu(gate, up, self.config), group_sizes, part(adapter, "w2"))


class MoE(nnx.Module):
    """routed_scale x sum of the chosen experts, weighted, plus the shared expert."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.router = Router(config.hidden_size, config.moe, rngs)
        self.experts = Experts(config, rngs)
        self.shared = MLP(config.hidden_size, config.moe.shared_dim, config.mlp, rngs)

    def __call__(
        self, x: Float[Array, "*rows D"], adapter: Adapter = None
    ) -> Float[Array, "*rows D"]:
        flat_TD = x.reshape(-1, x.shape[-1])
        experts, weights = self.router(flat_TD)
        routed = self._routed(flat_TD, experts, weights, part(adapter, "experts"))
        return routed.reshape(x.shape) + self.shared(x, part(adapter, "shared"))

    def _routed(self, x_TD, experts_TX, weights_TX, adapter: Adapter):
        T, X = experts_TX.shape
        flat = experts_TX.reshape(T * X)
        order = jnp.argsort(flat, stable=True)  # (token, choice) pairs sorted by expert
        back = jnp.argsort(order)
        sizes = jnp.bincount(flat, length=self.router.config.num_experts)
        pairs = jnp.repeat(x_TD, X, axis=0)
        y = self.experts(permute_rows(pairs, order, back), sizes, adapter)
        y_TXD = permute_rows(y, back, order).reshape(T, X, -1).astype(jnp.float32)
        return jnp.einsum("TXD,TX->TD", y_TXD, weights_TX, precision="highest").astype(x_TD.dtype)
