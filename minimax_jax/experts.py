"""The routed experts: every device runs its own experts, or its own part of all, over the tokens it
sees, sorted by expert. The sums over tensor-parallel ranks stay apart (`minimax_jax.shards`).

With expert parallelism the data ranks first tell one another their tokens, and each device leaves
out those of other devices' experts. With more data ranks than experts a token, large batches are
sent to their experts instead (`minimax_jax.expert_exchange`).
"""

from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from configs.model import ModelConfig
from configs.parts import MLPConfig
from minimax_jax.expert_exchange import are_sent, sum_at_experts
from minimax_jax.layers import MLP, activation, normal
from minimax_jax.lora import Adapter, LowRank, grouped_low_rank, part
from pallas_kernels.grouped_matmul import (
    Matrices,
    grouped_matmul,
    mixture,
    mixture_by,
)
from pallas_kernels.scaled_matmul import Weight
from sharding.apply import local, splits
from sharding.axes import DATA, Axes
from sharding.collectives import device_rank, gathered, ranks, scattered_total, total
from sharding.rules import SERVE, Rules

_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


class GroupedLinear(nnx.Module):
    """One matrix an expert: [E, F, D] in any stored format."""

    def __init__(
        self, experts: int, out_dim: int, in_dim: int, axes: tuple[str | None, str | None], rngs
    ):
        weight = normal(rngs, experts, out_dim, in_dim)
        self.weight = nnx.Param(weight, axes=("experts", *axes))


class Experts(nnx.Module):
    """w1 is gate, w3 up, w2 down, as in the checkpoint."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dim, moe = config.hidden_size, config.moe
        self.w1 = GroupedLinear(moe.num_experts, moe.expert_dim, dim, ("expert_mlp", "embed"), rngs)
        self.w3 = GroupedLinear(moe.num_experts, moe.expert_dim, dim, ("expert_mlp", "embed"), rngs)
        self.w2 = GroupedLinear(moe.num_experts, dim, moe.expert_dim, ("embed", "expert_mlp"), rngs)
        self.num_experts, self.config = moe.num_experts, config.mlp

    def __call__(
        self,
        x: Float[Array, "*rows D"],
        experts: Int[Array, "*rows X"],
        weights: Float[Array, "*rows X"],
        adapter: Adapter = None,
        rules: Rules = SERVE,
        shared: MLP | None = None,
    ) -> Float[Array, "ranks *rows D"]:
        """The weighted sum of each token's experts, and of an expert that all tokens `shared`, if
        one is given (`takes_shared`), as the tensor-parallel ranks' parts of it.
        """
        rows = ("batch", *[None] * (x.ndim - 1))
        linears = {"w1": self.w1, "w2": self.w2, "w3": self.w3}
        adapters = {name: part(adapter, name) for name in linears}
        matrices = {name: linear.weight.get_value() for name, linear in linears.items()}
        axes = {name: linear.weight.axes for name, linear in linears.items()}
        low = {name: [one.a, one.b] for name, one in adapters.items() if one is not None}
        own, own_axes = (None, ()) if shared is None else (shared.matrices, shared.axes)
        run = local(
            partial(
                _mixed,
                scales={name: adapters[name].scale for name in low},
                num_experts=self.num_experts,
                batch=len(x),
                config=self.config,
            ),
            in_axes=[
                axes,
                {name: _low_axes(axes[name], *low[name]) for name in low},
                own_axes,
                *[rows] * 3,
            ],
            out_axes=("partials", *rows),
            rules=rules,
        )
        return run(matrices, low, own, x, experts, weights)

    def takes_shared(self, adapter: Adapter, rules: Rules) -> bool:
        """Whether an expert that all tokens share may run with the routed ones: each rank has the
        same part of it as of each of them, and none has an adapter.
        """
        return adapter is None and not splits("experts", self.num_experts, rules)


def _low_axes(axes: Axes, a: Array, b: Array) -> list[Axes]:
    """The axes of an adapter's two matrices, [E, R, D] and [E, F, R]; one that experts share is on
    every device.
    """
    experts, out, into = axes
    of_a, of_b = (experts if len(one) > 1 else None for one in (a, b))
    return [(of_a, None, into), (of_b, out, None)]


def _mixed(
    matrices: dict[str, Weight],
    low: dict[str, list[Array]],
    shared: Matrices | None,
    x: Float[Array, "*rows D"],
    experts: Int[Array, "*rows X"],
    weights: Float[Array, "*rows X"],
    *,
    scales: dict[str, float],
    num_experts: int,
    batch: int,
    config: MLPConfig,
) -> Float[Array, "1 *rows D"]:
    """What one device does; without sharding all of it."""
    shape, is_split = (1, *x.shape), len(x) < batch  # split: the rows are those of one data rank
    x, experts, weights = (one.reshape(-1, one.shape[-1]) for one in (x, experts, weights))
    own = matrices["w1"].shape[0]
    across = own < num_experts and ranks(DATA) > 1  # other data ranks have other experts
    adapters = {name: LowRank(a=a, b=b, scale=scales[name]) for name, (a, b) in low.items()}
    own_sum = partial(_own_sum, matrices, adapters, shared, config=config)
    if across and is_split and are_sent(len(x), experts.shape[1], ranks(DATA)):
        return sum_at_experts(own_sum, x, experts, weights, own).reshape(shape)
    if across and is_split:
        x, experts, weights = (gathered(one, DATA) for one in (x, experts, weights))
    if own < num_experts:
        experts = experts - device_rank() * own
    y = own_sum(x, experts, weights)
    if across:
        y = scattered_total(y, DATA) if is_split else total(y, [DATA])
    return y.reshape(shape)


def _own_sum(
    matrices: dict[str, Weight],
    adapters: dict[str, LowRank],
    shared: Matrices | None,
    x_TD: Float[Array, "T D"],
    experts_TX: Int[Array, "T X"],
    weights_TX: Float[Array, "T X"],
    config: MLPConfig,
) -> Float[Array, "T D"]:
    """The sum over the experts 0 .. E - 1 that are here and a shared one. Other ids add nothing."""
    choice = experts_TX, weights_TX, activation(config)
    if not adapters:
        gate, up, down = (matrices[name] for name in _NAMES.values())
        return mixture(x_TD, Matrices(gate, up, down), *choice, shared)

    assert shared is None, "an adapter's products take no shared expert"
    linear = partial(_adapted, matrices, adapters)
    return mixture_by(linear, x_TD, matrices["w1"].shape[0], *choice)


def _adapted(
    matrices: dict[str, Weight],
    adapters: dict[str, LowRank],
    part: str,
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
) -> Float[Array, "M F"]:
    """Sorted rows through one of the matrices, and through its adapter if it has one."""
    name = _NAMES[part]
    y = grouped_matmul(rows, matrices[name], sizes)
    return y + grouped_low_rank(rows, adapters[name], sizes) if name in adapters else y
