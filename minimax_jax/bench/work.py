"""What a step has to do: the bytes that it cannot avoid reading, and the FLOP of its products.

A decode step reads every weight but the embedding, of which it reads a row a sequence, and the
experts that some token chose; and for each sequence and layer the index keys of all blocks, and
keys and values of the chosen ones. A prefill multiplies every token by the weights it meets once.
"""

import math
from typing import Any

import jax
from flax import nnx

from configs.model import ModelConfig
from minimax_jax.model import DecoderLayer, Model
from minimax_jax.quantize import is_expert, path_of_leaf
from pallas_kernels.layouts.pool import LINE, PoolLayout


def decode_bytes(
    model: Model, layout: PoolLayout, batch: int, context: int, distinct_experts: int
) -> int:
    """Bytes of one decode step of `batch` sequences of `context` tokens; `distinct_experts` is the
    number of experts that are met, summed over layers.
    """
    layers = sum(model.config.moe_layers)
    dense, of_expert = _weight_bytes(model, layers * model.config.moe.num_experts)
    rows = batch * model.config.hidden_size * model.dtype.itemsize
    return dense + rows + distinct_experts * of_expert + batch * page_bytes(model, layout, context)


def layer_bytes(
    layer: DecoderLayer, model: Model, layout: PoolLayout, batch: int, context: int, distinct: int
) -> int:
    """Bytes of one layer with experts in a decode step; `distinct` experts are met."""
    dense, of_expert = _weight_bytes(layer, model.config.moe.num_experts)
    stream = 2 * batch * model.config.hidden_size * model.dtype.itemsize
    pages = page_bytes(model, layout, context) // len(layout.sparse_layers)
    return dense + distinct * of_expert + stream + batch * pages


def page_bytes(model: Model, layout: PoolLayout, context: int) -> int:
    """Bytes of pages that one token of a sequence of `context` tokens reads, in all layers."""
    blocks = -(-context // layout.block_size)
    total = 0
    for sparse in layout.sparse_layers:
        chosen = min(model.config.indexer.top_k, blocks) if sparse else blocks
        total += 2 * chosen * layout.kv.lines + (blocks * layout.index.lines if sparse else 0)
    return total * LINE


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Products of a prompt of `tokens` tokens: of each token with the weights it meets, with the
    index keys before it, and with keys and values of the blocks it attends to. The head sees one.
    """
    a, moe, D = config.attention, config.moe, config.hidden_size
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    index = config.indexer
    total = 2 * D * config.vocab_size
    for sparse, has_experts in zip(config.sparse_layers, config.moe_layers, strict=True):
        weights = D * (2 * q + 2 * kv)
        hidden = config.mlp.dense_dim
        if has_experts:
            hidden = moe.shared_dim + moe.experts_per_token * moe.expert_dim
            weights += D * moe.num_experts
        weights += 3 * D * hidden
        seen = tokens / 2
        if sparse:
            weights += D * index.head_dim * (index.num_heads + 1)
            scored = 2 * index.num_heads * index.head_dim * seen
            seen = min(seen, index.top_k * index.block_size)
        else:
            scored = 0
        total += tokens * int(2 * weights + scored + 4 * q * seen)
    return total


def _shard(leaf: Any) -> tuple[int, ...]:
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def _weight_bytes(module: nnx.Module, num_experts: int) -> tuple[int, int]:
    """Of one device: bytes of all weights outside of the embedding and the routed experts; and of
    the experts as a share of the `num_experts` that there are in all layers.
    """
    dense = of_experts = 0
    for keys, leaf in jax.tree_util.tree_leaves_with_path(module):
        path, nbytes = path_of_leaf(keys), math.prod(_shard(leaf)) * leaf.dtype.itemsize
        if is_expert(path):
            of_experts += nbytes
        elif path != "embedding":
            dense += nbytes
    return dense, of_experts // max(1, num_experts)
