"""The drafter against the equations in float64, sub-module by sub-module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minimax_jax.drafter import DraftContext, Drafter
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.speculative.drafting import draft_sampling, inject, propose
from pallas_kernels.layouts.pages import Blocks
from tests.drafter.models import EXACT, WINDOW, Z, at, drafted, empty_cache, random_drafter, streams
from tests.drafter.reference import Reference
from tests.model.models import random_model
from tests.numerics import assert_close

CONFIG = drafted()
MODEL, DRAFTER = random_model(CONFIG), random_drafter(CONFIG)
REFERENCE = Reference.of(DRAFTER, CONFIG)
D, T = CONFIG.hidden_size, CONFIG.drafter.draft_block
P = 8  # blocks a sequence
GREEDY = draft_sampling(SamplingState.of([SamplingParams(temperature=0.0)]), "probabilistic")

_inject, _propose = jax.jit(inject), jax.jit(propose)


@jax.jit
def _hidden(drafter, x, cache, table, lengths):
    return drafter.hidden(x, cache, table, lengths)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def cached(taps, length, drafter=DRAFTER, config=CONFIG):
    """One sequence's context in scattered pages: cache and table [1, P]."""
    table = np.random.default_rng(1).permutation(P)[None]
    positions = np.where(np.arange(P * Z) < length, np.arange(P * Z), -1)[None]
    padded = [jnp.resize(tap, (1, P * Z, D)) for tap in taps]
    cache = _inject(drafter, empty_cache(config, P), padded, at(positions, table))
    return cache, jnp.asarray(table, jnp.int32)


def test_fusion_is_one_projection_and_one_norm():
    taps = streams(CONFIG, 30)
    found = jax.jit(lambda d, taps: d.fused(taps))(DRAFTER, [tap[None] for tap in taps])
    assert_close(found[0], REFERENCE.fused(taps), "f32")


def test_the_order_of_the_taps_is_that_of_the_list():
    taps = streams(CONFIG, 5)
    swapped = DRAFTER.fused([tap[None] for tap in taps[::-1]])
    assert np.abs(np.asarray(swapped[0]) - REFERENCE.fused(taps)).max() > 0.1


def test_a_layer_over_context_and_block():
    layer, length = DRAFTER.layers[1], 50
    x, k, v = normal(T, D), *(normal(4 * Z, 4, 32, seed=seed) for seed in (1, 2))
    context = DraftContext.of(jnp.arange(4)[None], jnp.array([length]), CONFIG.drafter, EXACT)
    sources = [Blocks(rows.reshape(4, Z, 4, 32)) for rows in (k, v)]
    expected = REFERENCE.layer(1, x, k, v, length)
    assert_close(layer(x[None], *sources, context)[0], expected, "f32")


def test_context_keys_have_no_input_norm_and_block_keys_have():
    """The same rows through both paths of a layer differ just by its input norm."""
    layer, rows = DRAFTER.layers[0], normal(T, D)
    as_context = layer.attention.rows(rows)
    as_block = layer.attention.rows(layer.input_norm(rows))
    assert_close(as_context.k, REFERENCE.heads(0, "k_proj", rows), "f32")
    normed = REFERENCE.norm("layers.0.input_norm", rows)
    assert_close(as_block.v, REFERENCE.heads(0, "v_proj", normed), "f32")


@pytest.mark.parametrize(
    "length", [0, 1, 10, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 100, P * Z]
)
def test_final_states_follow_the_equations(length):
    taps, x = streams(CONFIG, length), normal(T, D, seed=3)
    cache, table = cached(streams(CONFIG, max(length, 1)), length)
    found = _hidden(DRAFTER, x[None], cache, table, jnp.array([length], jnp.int32))
    assert_close(found[0], REFERENCE.hidden(x, taps), "f32")


def test_proposals_follow_the_equations():
    """F118, of drafts: padding ids are impossible."""
    taps, anchor, length = streams(CONFIG, 60), 17, 60
    cache, table = cached(taps, length)
    one = jnp.array([anchor]), jnp.array([length])
    found = _propose(MODEL, DRAFTER, cache, table, *one, GREEDY)
    embedding, head = (np.asarray(w.get_value()) for w in (MODEL.embedding, MODEL.head.weight))
    block = embedding[[anchor] + [CONFIG.drafter.noise_token] * 6]
    hidden = REFERENCE.hidden(block.astype(np.float64), taps)
    tokens, logits, confidence = REFERENCE.chain(hidden, head.astype(np.float64), anchor)
    np.testing.assert_array_equal(found.tokens[0], tokens)
    n = CONFIG.num_tokens
    assert_close(found.logits[0, :, :n], logits[:, :n], "f32_logits")
    assert bool(jnp.all(found.logits[..., n:] == -jnp.inf))
    assert_close(found.confidence[0], confidence, "f32")


def test_a_new_drafter_adds_no_markov_bias():
    fresh = Drafter(CONFIG, nnx.Rngs(0))
    assert not np.asarray(fresh.markov(fresh.markov.embedded(jnp.arange(5)))).any()
