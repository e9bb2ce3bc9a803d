"""Full-width layers on the GPU, a dense one and one with experts: the kernels' path gives the
reference path's logits at a context far beyond selection.

Nearly all of it is compiling, so each case is best a process of its own: `pytest -n 3 -m gpu`, each
with XLA_PYTHON_CLIENT_MEM_FRACTION=0.3.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.presets import m3_1_flash
from minimax_jax.batch import Batch
from minimax_jax.bench.command import shortened
from minimax_jax.cache import Cache, pool_layout
from minimax_jax.random_model import random_model
from pallas_kernels import dispatch
from pallas_kernels.layouts.pool import CacheFormats
from tests.numerics import relative_error

pytestmark = pytest.mark.gpu

CONTEXT, CHUNK, Z = 40_960, 8192, 128
# Logits after two layers in bfloat16 with NVFP4 pages: two orders of summation, each a rounding
# of 2^-9 a step, and now and then another code or another block. Measured: see the test's output.
BOUND = 5e-2


@pytest.fixture(scope="module")
def model():
    config = replace(shortened(m3_1_flash(), 2), moe_layers=(False, True))
    return random_model(config, jnp.bfloat16)


def _run(model, cache, batch):
    """The cache after a step, and the logits of its last token."""

    @jax.jit  # a new one each time, so that dispatch is asked again
    def run(model, cache, batch):
        hidden, cache, _ = model.hidden(batch, cache.layout, cache)
        return cache, model.logits(hidden[:, -1])

    return run(model, cache, batch)


def _batch(tokens, start, table):
    places = jnp.arange(start, start + len(tokens), dtype=jnp.int32)[None]
    return Batch(tokens=jnp.asarray(tokens)[None], positions=places, block_table=table)


@pytest.fixture(scope="module")
def filled(model):
    """A cache of 40,960 tokens written by the kernels, and the tokens that follow."""
    layout = pool_layout(model.config, CacheFormats(kv="nvfp4", index="nvfp4"))
    width = CONTEXT // Z + 5
    table = jnp.asarray(np.random.default_rng(0).permutation(width)[None], jnp.int32)
    tokens = np.random.default_rng(1).integers(0, model.config.num_tokens, CONTEXT + 512, np.int32)
    cache = Cache.empty(layout, width)
    prefill = jax.jit(lambda model, cache, batch: model.hidden(batch, layout, cache)[1])
    for start in range(0, CONTEXT, CHUNK):
        cache = prefill(model, cache, _batch(tokens[start : start + CHUNK], start, table))
    return cache, table, tokens[CONTEXT:]


@pytest.mark.parametrize("queries", [1, 8, 512])
def test_logits_are_the_reference_paths(model, filled, monkeypatch, queries):
    """Decode, verification and a chunk of a prompt, from the same pages."""
    cache, table, tokens = filled
    batch = _batch(tokens[:queries], CONTEXT, table)
    _, fast = _run(model, cache, batch)
    monkeypatch.setattr(dispatch, "_on_gpu", lambda: False)  # every kernel refuses
    _, expected = _run(model, cache, batch)
    known = slice(model.config.num_tokens)
    fast, expected = np.asarray(fast)[:, known], np.asarray(expected)[:, known]
    error = relative_error(fast, expected)
    print(f"{queries} queries: relative error of the logits {error:.2e}")
    assert error < BOUND
    assert np.isfinite(fast).all()
