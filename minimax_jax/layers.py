"""The plain layers: linear with an adapter hook, Gemma norm, SwiGLU-OAI, and the dense MLP."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from configs.parts import MLPConfig
from minimax_jax.lora import Adapter, LowRank, low_rank, part
from pallas_kernels.kv_insert import gemma_norm
from pallas_kernels.scaled_matmul import scaled_matmul


def normal(rngs: nnx.Rngs, *shape: int) -> Float[Array, "..."]:
    """Initial values of a weight [..., out, in]: N(0, 1 / in), float32."""
    return _normal(rngs.params(), shape)


@partial(jax.jit, static_argnames=("shape",))  # traced once a shape: 60 layers have a dozen
def _normal(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    return jax.random.normal(key, shape) * shape[-1] ** -0.5


class Linear(nnx.Module):
    """y = x W^T (+ the adapter's low-rank part), summed in float32. The weight may be stored in any
    format.
    """

    def __init__(
        self, out_dim: int, in_dim: int, axes: tuple[str | None, str | None], rngs: nnx.Rngs
    ):
        self.weight = nnx.Param(normal(rngs, out_dim, in_dim), axes=axes)

    def __call__(
        self, x: Float[Array, "*rows D"], adapter: LowRank | None = None
    ) -> Float[Array, "*rows F"]:
        return self.float32(x, adapter).astype(x.dtype)

    def float32(
        self, x: Float[Array, "*rows D"], adapter: LowRank | None = None
    ) -> Float[Array, "*rows F"]:
        """The same before its last rounding, as logits are wanted."""
        y = scaled_matmul(x, self.weight.get_value())
        return y if adapter is None else y + low_rank(x, adapter)


class GemmaNorm(nnx.Module):
    """RMS norm with weight (1 + w); w is stored as it is in the checkpoint, centred on 0."""

    def __init__(self, dim: int, eps: float):
        self.weight = nnx.Param(jnp.zeros(dim), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return gemma_norm(x, self.weight.get_value(), self.eps)


def swiglu(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], config: MLPConfig
) -> Float[Array, "*rows F"]:
    """SwiGLU-OAI in float32, cast once: the gate is clamped from above only (spec/model 2.10)."""
    g = jnp.minimum(gate.astype(jnp.float32), config.limit)
    u = jnp.clip(up.astype(jnp.float32), -config.limit, config.limit)
    return (g * jax.nn.sigmoid(config.alpha * g) * (u + config.beta)).astype(gate.dtype)


class MLP(nnx.Module):
    """Gate, up, SwiGLU-OAI, down: the dense layers, the shared expert and the drafter."""

    def __init__(self, dim: int, hidden: int, config: MLPConfig, rngs: nnx.Rngs):
        self.gate_proj = Linear(hidden, dim, ("mlp", "embed"), rngs)
        self.up_proj = Linear(hidden, dim, ("mlp", "embed"), rngs)
        self.down_proj = Linear(dim, hidden, ("embed", "mlp"), rngs)
        self.config = config

    def __call__(
        self, x: Float[Array, "*rows D"], adapter: Adapter = None
    ) -> Float[Array, "*rows D"]:
        gate = self.gate_proj(x, part(adapter, "gate_proj"))
        up = self.up_proj(x, part(adapter, "up_proj"))
        return self.down_proj(swiglu(gate, up, self.config), part(adapter, "down_proj"))
