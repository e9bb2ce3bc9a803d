"""A new adapter for a model: which linears have one, its arrays as a flat dict by name, and the
tree that the model takes (`minimax_jax.lora`).

Adapted are the attention's four projections, the dense MLPs, the shared expert and the routed ones;
never the indexer, the router, the embedding or the head (spec/rl 3.1). A new adapter changes
nothing, since its `b` is 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from configs.model import ModelConfig
from minimax_jax.lora import LowRank
from rl.optimizer import Parameters


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A linear that has an adapter: `a` is [*a_experts, R, in_dim], `b` [*b_experts, out_dim, R].

    Experts that share a matrix have a 1 there.
    """

    path: str
    in_dim: int
    out_dim: int
    a_experts: tuple[int, ...] = ()
    b_experts: tuple[int, ...] = ()


def adapted_linears(config: ModelConfig, expert_lora: str) -> Iterator[Adapted]:
    """The linears of a model; the routed experts' have a pair each (`per_expert`), share what lies
    on the side of the residual stream (`shared_outer`), or have none.
    """
    for i, has_experts in enumerate(config.moe_layers):
        layer = f"layers.{i}"
        yield from _attention(config, f"{layer}.attention")
        if not has_experts:
            yield from _mlp(config.hidden_size, config.mlp.dense_dim, f"{layer}.mlp")
            continue
        yield from _mlp(config.hidden_size, config.moe.shared_dim, f"{layer}.mlp.shared")
        if expert_lora != "none":
            outer = 1 if expert_lora == "shared_outer" else config.moe.num_experts
            yield from _experts(config, f"{layer}.mlp.experts", outer)


def new_adapter(
    config: ModelConfig, expert_lora: str, rank: int, key: Key[Array, ""]
) -> Parameters:
    """Arrays by name, float32: `a` uniform in +-1 / sqrt(in_dim) as PEFT's, `b` 0.

    Raises ValueError for a rank that is larger than a side of every linear.
    """
    parameters: Parameters = {}
    linears = list(adapted_linears(config, expert_lora))
    most = max(min(one.in_dim, one.out_dim) for one in linears)
    if rank > most:
        raise ValueError(f"rank={rank} is more than {most}, the largest rank of any linear")
    for number, one in enumerate(linears):
        a_key, bound = jax.random.fold_in(key, number), one.in_dim**-0.5
        shape = (*one.a_experts, rank, one.in_dim)
        parameters[f"{one.path}.a"] = jax.random.uniform(a_key, shape, minval=-bound, maxval=bound)
        parameters[f"{one.path}.b"] = jnp.zeros((*one.b_experts, one.out_dim, rank))
    return parameters


def as_adapter(parameters: Parameters, scale: float) -> dict[str, Any]:
    """The tree that the model takes, of the same arrays."""
    tree: dict[str, Any] = {}
    for name, a in parameters.items():
        path, _, side = name.rpartition(".")
        if side != "a":
            continue
        *parents, leaf = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = LowRank(a=a, b=parameters[f"{path}.b"], scale=scale)
    return tree


def _attention(config: ModelConfig, path: str) -> Iterator[Adapted]:
    c, dim = config.attention, config.hidden_size
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for name, in_dim, out_dim in (
        ("q_proj", dim, heads),
        ("k_proj", dim, kv),
        ("v_proj", dim, kv),
        ("o_proj", heads, dim),
    ):
        yield Adapted(path=f"{path}.{name}", in_dim=in_dim, out_dim=out_dim)


def _mlp(dim: int, hidden: int, path: str) -> Iterator[Adapted]:
    yield Adapted(path=f"{path}.gate_proj", in_dim=dim, out_dim=hidden)
    yield Adapted(path=f"{path}.up_proj", in_dim=dim, out_dim=hidden)
    yield Adapted(path=f"{path}.down_proj", in_dim=hidden, out_dim=dim)


def _experts(config: ModelConfig, path: str, outer: int) -> Iterator[Adapted]:
    """`outer` matrices on the side of the residual stream, one an expert on the inner side."""
    dim, hidden, own = config.hidden_size, config.moe.expert_dim, (config.moe.num_experts,)
    shared = (outer,)
    for name in ("w1", "w3"):
        yield Adapted(
            path=f"{path}.{name}", in_dim=dim, out_dim=hidden, a_experts=shared, b_experts=own
        )
    yield Adapted(path=f"{path}.w2", in_dim=hidden, out_dim=dim, a_experts=own, b_experts=shared)
