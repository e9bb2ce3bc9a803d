"""The experts of each token: taken down by a cache that records, and used again by the packed
path.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minimax_jax.batch import Batch, pack
from minimax_jax.cache import NO_ROUTE, Cache, pool_layout
from minimax_jax.model import Model
from pallas_kernels.layouts.pool import CacheFormats
from tests.rl.toy import MODEL

CONFIG = replace(MODEL, moe_layers=(True, True))
LAYOUT = pool_layout(CONFIG, CacheFormats(kv="f32", index="f32"))
LENGTH = 40


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, nnx.Rngs(0))


TOKENS = np.random.default_rng(0).integers(0, CONFIG.num_tokens, LENGTH)
PACK, PLACES = pack(TOKENS, np.zeros(LENGTH, int), LAYOUT.block_size)


@jax.jit
def packed(model, replay=None):
    walked = model.walk(PACK, LAYOUT, replay=replay)
    return walked.hidden.reshape(-1, CONFIG.hidden_size)[PLACES], walked.choices


@jax.jit
def step(model, cache, tokens, positions, table):
    batch = Batch(tokens=tokens, positions=positions, block_table=table)
    return model.hidden(batch, LAYOUT, cache)[1]


def recorded(model, chunks):
    """The record of the tokens, run through the cache in chunks of some lengths."""
    table = jnp.array([[4, 2, 1]])
    cache, start = Cache.empty(LAYOUT, 6).recording(CONFIG), 0
    for chunk in chunks:
        width = -(-chunk // 8) * 8  # padded, as steps are
        tokens, positions = np.zeros((1, width), np.int32), np.full((1, width), -1, np.int32)
        tokens[0, :chunk] = TOKENS[start : start + chunk]
        positions[0, :chunk] = np.arange(start, start + chunk)
        cache = step(model, cache, tokens, positions, table)
        start += chunk
    return cache.choices


@pytest.mark.parametrize("chunks", [(40,), (16, 17, 1, 6), (1,) * 40])
def test_a_record_has_the_choices_of_each_token_and_none_elsewhere(model, chunks):
    pages = np.asarray(recorded(model, chunks))
    assert pages.shape == (6, 2, 16, 2) and pages.dtype == np.uint8
    found = np.moveaxis(pages[[4, 2, 1]], 1, 0).reshape(2, 48, 2)
    expected = np.asarray(packed(model)[1]).reshape(2, -1, 2)[:, PLACES]
    np.testing.assert_array_equal(found[:, :LENGTH], expected)
    assert (found[:, LENGTH:] == NO_ROUTE).all() and (pages[[0, 3, 5]] == NO_ROUTE).all()


def test_replaying_the_own_choices_changes_nothing(model):
    hidden, choices = packed(model)
    again, own = packed(model, choices)
    np.testing.assert_array_equal(hidden, again)
    np.testing.assert_array_equal(choices, own)


def test_no_route_means_the_own_choice(model):
    hidden, choices = packed(model)
    again, _ = packed(model, jnp.full_like(choices, NO_ROUTE))
    np.testing.assert_array_equal(hidden, again)


def test_replayed_experts_are_used_and_the_own_choice_is_still_told(model):
    hidden, choices = packed(model)
    others = (choices.at[0].add(1)) % CONFIG.moe.num_experts
    again, own = packed(model, others)
    assert np.abs(hidden - again).max() > 1e-3
    np.testing.assert_array_equal(own[0], choices[0])  # of the first layer, whose input is the same


def test_replayed_scores_have_a_gradient(model):
    """Gathered from all scores, not from those of the own choice, whose others would be 0."""
    choices = packed(model)[1]
    others = (choices + 1) % CONFIG.moe.num_experts

    def total(weight):
        changed = nnx.clone(model)
        changed.layers[1].mlp.router.weight.set_value(weight)
        return jnp.sum(packed(changed, others)[0] ** 2)

    slope = jax.grad(total)(model.layers[1].mlp.router.weight.get_value())
    assert np.abs(slope).min(axis=1).max() > 0 and np.isfinite(slope).all()


def test_more_experts_than_a_byte_holds_are_refused():
    many = replace(CONFIG, moe=replace(CONFIG.moe, num_experts=256))
    with pytest.raises(ValueError, match="256 experts are too many for a byte"):
        Cache.empty(LAYOUT, 1).recording(many)
