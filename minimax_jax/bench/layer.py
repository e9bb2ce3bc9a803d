"""The time of one decoder layer with experts in a decode step, between its residuals: the layer is
called several times in a row, on another layer's pages each time, as a step calls its layers.
"""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from minimax_jax.batch import Batch
from minimax_jax.bench.calls import fallbacks_of
from minimax_jax.bench.steps import Measured
from minimax_jax.bench.work import layer_bytes
from minimax_jax.context import Context
from minimax_jax.model import Model
from pallas_kernels.benchmark import random_pool, random_tables
from pallas_kernels.layouts.pool import PoolLayout
from pallas_kernels.timing import Chain, time_of_a_call

CALLS = 9  # of the chain; a third of them is its other length


def of_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """A model of so many sparse layers with experts."""
    return replace(config, sparse_layers=(True,) * layers, moe_layers=(True,) * layers)


def measure_layer(model: Model, layout: PoolLayout, batch: int, context: int) -> Measured:
    """The first layer of a model, which has experts, on the pages of each of `CALLS` layers.

    The weights are the same ones every time: those that a call reads, 0.3 GB and more, do not stay
    in the L2 for the next.
    """
    assert len(layout.sparse_layers) == CALLS
    layer, width = model.layers[0], -(-(context + 1) // layout.block_size)
    places = jnp.full((batch, 1), context, jnp.int32)
    table = random_tables(batch, width)
    tokens = Batch(tokens=jnp.zeros_like(places), positions=places, block_table=table)
    shared = Context.of(tokens, model.config, layout)
    x = jax.random.normal(jax.random.key(0), (batch, 1, model.config.hidden_size), model.dtype)

    def call(constants, carry, line):
        layer, context = constants
        x, pool, chosen = layer.with_choice(*carry, line, context, None, None)
        return (x, pool), chosen

    pool = random_pool(layout, batch * width)[None]
    lines = [jnp.int32(layout.layer_line(i)) for i in range(CALLS)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        time = time_of_a_call(Chain(call, (layer, shared), (x, pool), lines))
    distinct = [len(np.unique(np.asarray(chosen))) for chosen in time.outputs]
    return Measured(
        name=f"layer {batch} x {context}",
        seconds=time.whole / 1e6,
        tokens=batch,
        bytes=layer_bytes(layer, model, layout, batch, context, round(np.mean(distinct))),
        flops=0,
        timeline=time.timeline,
        fallbacks=fallbacks_of(caught),
        first_call=time.first_calls,
    )
