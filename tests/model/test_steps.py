"""The jitted steps: memory, logits of chosen rows only, and k steps a dispatch."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache, pool_layout
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, bucket, decode, prefill
from pallas_kernels.layouts.pool import CacheFormats
from tests.model.models import random_model, small

BLOCKS = 16384


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def step_programs(fmt: str):
    """The compiled prefill and decode steps over a large pool, and the pool's bytes."""
    model = jax.eval_shape(partial(random_model, small()))
    layout = pool_layout(model.config, CacheFormats(kv=fmt, index=fmt))
    cache = jax.eval_shape(partial(Cache.empty, layout, BLOCKS))
    table = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    logits = jax.ShapeDtypeStruct((1, model.config.vocab_size), jnp.float32)
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    tile = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    batch = Batch(tokens=tile, positions=tile, block_table=table)
    running = jax.ShapeDtypeStruct((1,), jnp.bool_)
    state = DecodeState(logits=logits, positions=row, limits=row, running=running)
    sampling = abstract(SamplingState.of([SamplingParams()]))
    options = DecodeOptions(steps=4)
    yield "prefill", prefill.lower(model, None, cache, batch, row, logits).compile()
    yield "decode", decode.lower(model, None, cache, table, state, sampling, options).compile()


@pytest.mark.parametrize("fmt", ["f32", "nvfp4"])
def test_no_step_program_copies_the_pool(fmt):
    config = small()
    layout = pool_layout(config, CacheFormats(kv=fmt, index=fmt))
    pool_bytes = layout.block_bytes * BLOCKS
    for name, program in step_programs(fmt):
        temporary = program.memory_analysis().temp_size_in_bytes
        assert temporary < 0.05 * pool_bytes, (name, temporary, pool_bytes)


def test_prefill_makes_no_logits_of_the_prompt():
    """F178: the head sees the last row of each sequence alone."""
    config = small(vocab_size=5000, num_tokens=5000)
    model = jax.eval_shape(partial(random_model, config))
    layout = pool_layout(config, CacheFormats(kv="f32", index="f32"))
    cache = jax.eval_shape(partial(Cache.empty, layout, 128))
    tile = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    table = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    batch = Batch(tokens=tile, positions=tile, block_table=table)
    logits = jax.ShapeDtypeStruct((1, 5000), jnp.float32)
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    text = prefill.lower(model, None, cache, batch, row, logits).as_text()
    assert "1x5000xf32" in text and "2048x5000" not in text


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert bucket(3, smallest=16) == 16
