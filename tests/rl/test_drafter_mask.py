"""Blocks of drafts over a pack against the drafter's equations, an anchor at a time in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.batch import pack
from minimax_jax.speculative.packed import packed_context, packed_hidden
from pallas_kernels.layouts.pool import CacheFormats
from tests.drafter.models import EXACT, WINDOW, Z, drafted, random_drafter, streams
from tests.drafter.reference import Reference
from tests.numerics import assert_close, relative_error

CONFIG = drafted()
DRAFTER = random_drafter(CONFIG)
D, T = CONFIG.hidden_size, CONFIG.drafter.draft_block
LENGTHS = (90, 37)  # of two segments; the first is longer than the window and no whole blocks
ANCHORS = ((0, 1), (0, 15), (0, 16), (0, WINDOW), (0, WINDOW + 7), (0, 89), (1, 1), (1, 36))


@pytest.fixture(scope="module")
def made():
    """A pack's tiles, its places, streams of its tokens [S, D] a segment, and blocks."""
    segments = np.repeat([0, 1], LENGTHS)
    batch, places = pack(np.zeros(len(segments), int), segments, Z, num_tiles=10, table_width=7)
    taps = streams(CONFIG, len(segments))
    tiled = [jnp.zeros((batch.tokens.size, D)).at[places].set(tap) for tap in taps]
    tiled = [tap.reshape(*batch.tokens.shape, D) for tap in tiled]
    x = jnp.asarray(np.random.default_rng(3).normal(size=(len(ANCHORS) + 1, T, D)), jnp.float32)
    return batch, places, taps, tiled, x


@jax.jit
def hidden_of(drafter, tiled, batch, x, anchors):
    keys = packed_context(drafter, tiled, batch, EXACT)
    lengths = jnp.where(anchors < 0, -1, batch.positions.reshape(-1)[anchors])
    table = batch.block_table[jnp.maximum(anchors, 0) // Z]
    return packed_hidden(drafter, x, keys, table, lengths, EXACT)


def anchors_of(places):
    starts = (0, LENGTHS[0])
    return jnp.asarray([*(places[starts[s] + t] for s, t in ANCHORS), -1])


def test_each_block_sees_its_window_before_the_anchor_and_itself_both_ways(made):
    batch, places, taps, tiled, x = made
    found = hidden_of(DRAFTER, tiled, batch, x, anchors_of(places))
    reference = Reference.of(DRAFTER, CONFIG)
    for block, (segment, anchor) in enumerate(ANCHORS):
        start = sum(LENGTHS[:segment])
        context = [np.asarray(tap)[start : start + anchor] for tap in taps]
        assert_close(found[block], reference.hidden(x[block], context), "f32")


def test_a_dummy_block_sees_itself_alone(made):
    batch, places, _, tiled, x = made
    whole = hidden_of(DRAFTER, tiled, batch, x, anchors_of(places))
    other = [tap + 1.0 for tap in tiled]
    changed = hidden_of(DRAFTER, other, batch, x, anchors_of(places))
    np.testing.assert_array_equal(changed[-1], whole[-1])
    assert np.all(np.abs(np.asarray(changed[:-1] - whole[:-1])).max((1, 2)) > 1e-3)


@pytest.mark.parametrize(
    ("moved", "seen"),
    [("anchor", False), ("before", True), ("window", True), ("beyond", False), ("other", False)],
)
def test_one_token_of_context_matters_only_inside_the_window(made, moved, seen):
    batch, places, _, tiled, x = made
    anchor = 70  # row 0 sees the WINDOW - 1 tokens before it
    at = {"anchor": anchor, "before": anchor - 1, "window": anchor - WINDOW + 1}
    at |= {"beyond": anchor - WINDOW, "other": LENGTHS[0] + 3}
    place = places[at[moved]]
    other = [tap.reshape(-1, D).at[place].add(1.0).reshape(tap.shape) for tap in tiled]
    anchors = jnp.asarray([places[anchor]])
    before, after = (hidden_of(DRAFTER, t, batch, x[:1], anchors) for t in (tiled, other))
    assert (relative_error(after, before) > 1e-4) == seen


def test_a_context_is_seen_through_the_format_of_the_draft_cache(made):
    batch, _, _, tiled, _ = made
    stored = packed_context(DRAFTER, tiled, batch, replace(EXACT, draft="fp8"))
    exact = packed_context(DRAFTER, tiled, batch, CacheFormats(kv="nvfp4", draft="f32"))
    for layer, whole in zip(stored, exact, strict=True):
        for rounded, values in zip(layer, whole, strict=True):
            expected = np.asarray(values.values.astype(jnp.float8_e4m3fn).astype(jnp.float32))
            assert_close(rounded.values, expected, "exact")
            assert relative_error(rounded.values, values.values) > 1e-3
