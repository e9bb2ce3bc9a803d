"""The jitted steps: memory, and logits of chosen rows only."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache, pool_layout
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, bucket, decode, prefill
from pallas_kernels.layouts.pool import CacheFormats
from tests.model.models import random_model, small

BLOCKS = 2048
# cuBLAS keeps 32 MiB for itself in a program with matrix products, whatever the pool
WORKSPACE = 34 * 2**20 if jax.default_backend() == "gpu" else 0


@pytest.fixture(autouse=True)
def no_shape_checks():
    """`lower` rebuilds the arguments' dataclasses around things that are no arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def step_programs(fmt: str):
    """The compiled prefill and decode steps over a large pool, and the pool's bytes."""
    model = random_model(small())
    cache = Cache.empty(pool_layout(model.config, CacheFormats(kv=fmt, index=fmt)), BLOCKS)
    table, tile = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 16), jnp.int32)
    logits = jnp.zeros((1, model.config.vocab_size))
    row = jnp.zeros(1, jnp.int32)
    batch = Batch(tokens=tile, positions=tile, block_table=table)
    state = DecodeState(logits=logits, positions=row, limits=row, running=row == 0)
    sampling = SamplingState.of([SamplingParams()])
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
        assert temporary - WORKSPACE < 0.05 * pool_bytes, (name, temporary, pool_bytes)


def test_prefill_makes_no_logits_of_the_prompt():
    """F178: the head sees the last row of each sequence alone."""
    config = small(vocab_size=5000, num_tokens=5000)
    model = random_model(config)
    cache = Cache.empty(pool_layout(config, CacheFormats(kv="f32", index="f32")), 128)
    tile, table = jnp.zeros((1, 2048), jnp.int32), jnp.zeros((1, 128), jnp.int32)
    batch = Batch(tokens=tile, positions=tile, block_table=table)
    logits, row = jnp.zeros((1, 5000)), jnp.zeros(1, jnp.int32)
    text = prefill.lower(model, None, cache, batch, row, logits).as_text()
    assert "1x5000xf32" in text and "2048x5000" not in text


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert bucket(3, smallest=16) == 16
