"""Log-probabilities: raw, of the chosen and the likeliest, and of prompts chunk by chunk."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.batch import pack
from minimax_jax.cache import pool_layout
from minimax_jax.sampling import chunked_logprobs, token_logprobs
from pallas_kernels.layouts.pool import CacheFormats
from tests.model.models import random_model, small, tokens

RNG = np.random.default_rng(0)


def test_they_are_those_of_the_softmax():
    logits = RNG.normal(size=(5, 30)) * 3
    logits[2, 7:] = -np.inf
    chosen = RNG.integers(0, 7, 5)
    found = token_logprobs(jnp.asarray(logits), jnp.asarray(chosen), 4)
    wanted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(found.chosen, wanted[np.arange(5), chosen], rtol=1e-5, atol=1e-6)
    best = np.argsort(-wanted, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(found.top_tokens, best)
    np.testing.assert_allclose(found.top, np.take_along_axis(wanted, best, 1), rtol=1e-5)


def test_equal_ids_are_reported_from_the_lower_on():
    found = token_logprobs(jnp.zeros((1, 9)), jnp.array([0]), 3)
    assert found.top_tokens.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("chunk", [1, 16, 37, 100])
def test_prompt_logprobs_in_chunks_are_those_of_the_whole(chunk):
    model, ids = random_model(small()), np.asarray(tokens(37, seed=4))
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    batch, places = pack(ids, np.zeros(37, int), layout.block_size)
    hidden = model.hidden(batch, layout, None)[0]
    rows = hidden.reshape(-1, hidden.shape[-1])[places]
    following = jnp.asarray(ids[1:])
    found = chunked_logprobs(model.logits, rows[:-1], following, 3, chunk)
    whole = token_logprobs(model.logits(rows[:-1]), following, 3)
    assert found.chosen.shape == (36,) and found.top.shape == (36, 3)
    np.testing.assert_allclose(found.chosen, whole.chosen, atol=1e-4)
    np.testing.assert_allclose(found.top, whole.top, atol=1e-4)


def test_no_logits_of_a_whole_prompt_are_made():
    T, D, size = 4096, 8, 5000
    head = jax.ShapeDtypeStruct((D, size), jnp.float32)
    rows = jax.ShapeDtypeStruct((T, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((T,), jnp.int32)

    @partial(jax.jit, static_argnums=3)
    def scored(head, rows, ids, chunk):
        found = chunked_logprobs(lambda some: some @ head, rows, ids, 2, chunk)
        return found.chosen, found.top

    def temporary(chunk: int) -> int:
        memory = scored.lower(head, rows, ids, chunk).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary(128) < T * size  # a quarter of float32 logits
    assert temporary(T) >= 4 * T * size
