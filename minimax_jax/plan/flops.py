"""Floating-point operations of one layer for one token on one rank, from the shapes of its weights
and of what attention reads.

A product of a token with a matrix takes two operations an element of the matrix. A routed expert
meets its even share of the tokens. Attention takes four operations an element of the chosen keys
(scores and values), an indexer two an element of all keys in the context.
"""

import math

from jax.sharding import AbstractMesh

from minimax_jax.checkpoint import abstract_model, parameters_of
from minimax_jax.inspect import part_of
from minimax_jax.plan.program import DTYPE, Step
from minimax_jax.quantize import is_expert, is_router
from sharding.apply import named_sharding
from sharding.axes import MESH_AXES
from sharding.rules import SERVE, with_parallel


def layer_flops(step: Step) -> dict[str, float]:
    """By part of the last layer; the parts of a checkpoint, then `attend` and `index`."""
    parallel, config = step.parallel, step.few_layers
    mesh = AbstractMesh((parallel.dp, parallel.tp), MESH_AXES)
    rules = with_parallel(SERVE, parallel)
    is_split = parallel.sp and step.tokens % parallel.tp == 0
    found: dict[str, float] = {}
    for path, parameter in parameters_of(abstract_model(config, DTYPE)).items():
        shape = tuple(parameter.get_value().shape)
        if not path.startswith("layers.0.") or len(shape) < 2:
            continue
        shard = named_sharding(mesh, parameter.axes, rules, shape).shard_shape(shape)
        tokens = 1.0
        if is_expert(path):
            # With whole experts on each device the tokens of all data ranks come to them.
            spread = parallel.dp if parallel.ep > 1 else 1
            tokens = spread * config.moe.experts_per_token / config.moe.num_experts
        elif is_split and (is_router(path) or path.endswith("attention.o_proj.weight")):
            tokens = 1 / parallel.tp
        part = part_of(path)
        found[part] = found.get(part, 0.0) + 2 * math.prod(shard) * tokens
    return found | _attention(step)


def _attention(step: Step) -> dict[str, float]:
    attention, indexer, tp = step.config.attention, step.config.indexer, step.parallel.tp
    heads, width = max(1, attention.num_heads // tp), attention.head_dim
    is_sparse = step.config.sparse_layers[-1]
    chosen = min(step.context, indexer.top_k * indexer.block_size if is_sparse else step.context)
    found = {"attend": 4.0 * heads * width * chosen}
    if is_sparse:
        index_heads = max(1, indexer.num_heads // tp)
        found["index"] = 2.0 * index_heads * indexer.head_dim * step.context
    return found
