"""Full-width steps as a Hopper GPU would run them, lowered on a machine without one: every op has a
kernel, and no step falls back to the reference.
"""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from configs.presets import m3_1_flash
from minimax_jax.batch import Batch
from minimax_jax.bench.command import shortened
from minimax_jax.cache import Cache, pool_layout
from minimax_jax.random_model import random_model
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages
from pallas_kernels.layouts.pool import CacheFormats

BLOCKS = 325  # of a sequence of 41,600 tokens


def _shape(*axes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(axes, dtype)


@pytest.mark.slow  # 40 s in all
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (32, 8), (1, 4096)])
def test_a_step_has_a_kernel_for_every_op(hopper, batch, queries):
    config = replace(shortened(m3_1_flash(), 2), moe_layers=(False, True))
    model = jax.eval_shape(lambda: random_model(config, jnp.bfloat16))
    assert isinstance(model.layers[1].mlp.experts.w1.weight.get_value(), NVFP4Pages)
    layout = pool_layout(config, CacheFormats(kv="nvfp4", index="nvfp4"))
    pool = _shape(1, batch * BLOCKS, layout.lines, 128, dtype=jnp.uint8)
    arrays = pool, _shape(batch, queries), _shape(batch, BLOCKS)
    weights, tree = jax.tree.flatten(model)

    def run(weights, pool, tile, table):
        step = Batch(tokens=tile, positions=tile, block_table=table)
        model, cache = jax.tree.unflatten(tree, weights), Cache(pool=pool, layout=layout)
        hidden, cache, _ = model.hidden(step, layout, cache)
        return cache, model.logits(hidden[:, -1])

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback is a warning
        lowered = jax.jit(run).trace(weights, *arrays).lower(lowering_platforms=("cuda",)).as_text()
    names = ("few_rows", "block_scores", "top_blocks", "sparse_attention", "kv_insert", "route")
    few = batch * queries <= 128
    assert all(name in lowered for name in names[0 if few else 1 :])
