"""The plain layers: linear with an adapter hook, Gemma norm, SwiGLU-OAI, and the dense MLP."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from configs.parts import MLPConfig
from minimax_jax.lora import Adapter, LowRank, low_rank, part
from pallas_kernels.grouped_matmul import Activation, Matrices, swiglu
from pallas_kernels.kv_insert import gemma_norm
from pallas_kernels.scaled_matmul import scaled_matmuls
from sharding.mesh import is_partitioned


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
        return linears(x, [(self, adapter)])[0]

    def float32(
        self, x: Float[Array, "*rows D"], adapter: LowRank | None = None
    ) -> Float[Array, "*rows F"]:
        """The same before its last rounding, as logits are wanted."""
        return _float32(x, [(self, adapter)])[0]


def linears(
    x: Float[Array, "*rows D"], of: Sequence[tuple[Linear, LowRank | None]]
) -> list[Float[Array, "*rows F"]]:
    """What several linears, each with its adapter, make of the same rows: one launch where a kernel
    takes their weights together.
    """
    if all(adapter is None for _, adapter in of):
        return _products(x, of, x.dtype)
    return [y.astype(x.dtype) for y in _float32(x, of)]


def _float32(x: Array, of: Sequence[tuple[Linear, LowRank | None]]) -> list[Array]:
    sums = _products(x, of, jnp.float32)
    return [
        y if adapter is None else y + low_rank(x, adapter)
        for y, (_, adapter) in zip(sums, of, strict=True)
    ]


def _products(x: Array, of: Sequence[tuple[Linear, Any]], dtype: DTypeLike) -> list[Array]:
    weights = [linear.weight.get_value() for linear, _ in of]
    return scaled_matmuls(x, weights, out_dtype=dtype, one_device=not is_partitioned())


class GemmaNorm(nnx.Module):
    """RMS norm with weight (1 + w); w is stored as it is in the checkpoint, centred on 0."""

    def __init__(self, dim: int, eps: float):
        self.weight = nnx.Param(jnp.zeros(dim), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return gemma_norm(x, self.weight.get_value(), self.eps)


def activation(config: MLPConfig) -> Activation:
    """The constants of SwiGLU-OAI."""
    return Activation(alpha=config.alpha, limit=config.limit, beta=config.beta)


class MLP(nnx.Module):
    """Gate, up, SwiGLU-OAI, down: the dense layers, the shared expert and the drafter."""

    def __init__(self, dim: int, hidden: int, config: MLPConfig, rngs: nnx.Rngs):
        self.gate_proj = Linear(hidden, dim, ("mlp", "embed"), rngs)
        self.up_proj = Linear(hidden, dim, ("mlp", "embed"), rngs)
        self.down_proj = Linear(dim, hidden, ("embed", "mlp"), rngs)
        self.config = config

    @property
    def matrices(self) -> Matrices:
        """Its three weights."""
        of = self.gate_proj, self.up_proj, self.down_proj
        return Matrices(*(one.weight.get_value() for one in of))

    @property
    def axes(self) -> Matrices:
        """The logical axes of the three."""
        of = self.gate_proj, self.up_proj, self.down_proj
        return Matrices(*(one.weight.axes for one in of))

    def __call__(
        self, x: Float[Array, "*rows D"], adapter: Adapter = None
    ) -> Float[Array, "*rows D"]:
        of_gate, of_up = part(adapter, "gate_proj"), part(adapter, "up_proj")
        gate, up = linears(x, [(self.gate_proj, of_gate), (self.up_proj, of_up)])
        return self.down_proj(swiglu(gate, up, activation(self.config)), part(adapter, "down_proj"))
