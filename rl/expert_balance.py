"""Keeps the experts evenly used without a loss: after each step the selection bias of an expert
that was chosen too often goes down by a fixed amount, of one chosen too rarely up (the
auxiliary-loss-free method of DeepSeek-V3).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from minimax_jax.batch import Batch
from minimax_jax.context import Context
from minimax_jax.model import DecoderLayer, Model
from minimax_jax.moe import MoE

SHARE = 8  # an eighth of the pack's tiles is counted


def expert_loads(
    model: Model, inputs: Sequence[Float[Array, "B Z D"]], context: Context
) -> dict[int, Float[Array, "E"]]:
    """By layer: each expert's share of the choices, in the first tiles of the pack, as multiples of
    an even share.

    `inputs` is the residual stream before each layer. The first tiles never look at later ones, so
    they can be run alone.
    """
    B = context.batch.tokens.shape[0]
    tiles = max(1, B // SHARE)
    batch = jax.tree.map(lambda x: x[:tiles], context.batch)
    context = Context.of(batch, model.config, context.layout)
    return {
        i: _loads(layer, layer.mlp, lax.stop_gradient(x[:tiles]), context)
        for i, (layer, x) in enumerate(zip(model.layers, inputs, strict=True))
        if isinstance(layer.mlp, MoE)
    }


def balanced_bias(
    bias: Float[Array, "E"], load: Float[Array, "E"], rate: float
) -> Float[Array, "E"]:
    """The bias after one step of `rate` towards an even load."""
    return bias + rate * jnp.sign(1.0 - load)


def _loads(
    layer: DecoderLayer, moe: MoE, x: Float[Array, "b Z D"], context: Context
) -> Float[Array, "E"]:
    attended, _ = layer.attention(layer.input_norm(x), None, 0, context)
    normed = layer.post_attention_norm(x + attended)
    experts_TX, _ = moe.router(normed.reshape(-1, x.shape[-1]))
    E = moe.router.config.num_experts
    real = _real(context.batch)[:, None]
    chosen = jnp.zeros(E).at[experts_TX].add(jnp.broadcast_to(real, experts_TX.shape))
    return chosen * E / jnp.maximum(jnp.sum(chosen), 1.0)


def _real(batch: Batch) -> Float[Array, "T"]:
    return (batch.positions >= 0).astype(jnp.float32).reshape(-1)
