"""What a drafted row depends on, found by moving one thing at a time (spec/dspark 7)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.cache import layer_pages
from minimax_jax.drafter import DraftContext
from minimax_jax.rope import rope_angles
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.speculative import drafting
from minimax_jax.speculative.drafting import Proposal, draft_sampling, inject, propose
from tests.drafter.models import WINDOW, Z, at, drafted, empty_cache, random_drafter, streams
from tests.drafter.reference import Reference
from tests.model.models import random_model, small
from tests.numerics import assert_close

CONFIG = drafted()
MODEL, DRAFTER = random_model(CONFIG), random_drafter(CONFIG)
D, T = CONFIG.hidden_size, CONFIG.drafter.draft_block
P = 8  # blocks a sequence
TABLE = jnp.asarray(np.random.default_rng(1).permutation(2 * P).reshape(2, P), jnp.int32)
_inject, _propose = jax.jit(inject), jax.jit(propose)


@jax.jit
def _hidden(drafter, x, cache, lengths):
    return drafter.hidden(x, cache, TABLE, lengths)


def lengths(*values):
    return jnp.array(values, jnp.int32)


def block(seed=0):
    """Embedded blocks of two sequences."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, T, D)), jnp.float32)


def cached(taps, ends):
    """Two sequences' context up to `ends`; positions beyond hold NaN."""
    positions = np.broadcast_to(np.arange(taps[0].shape[1]), taps[0].shape[:2])
    positions = np.where(positions < np.array(ends)[:, None], positions, -1)
    return _inject(DRAFTER, empty_cache(CONFIG, 2 * P), taps, at(positions, TABLE))


def changed_rows(before, after) -> list[list[bool]]:
    """Which rows of which sequence moved."""
    return (np.asarray(before) != np.asarray(after)).any(axis=-1).tolist()


def test_every_row_of_the_block_sees_every_other():
    cache = cached(streams(CONFIG, 2, 60), (60, 60))
    x = block()
    before = _hidden(DRAFTER, x, cache, lengths(60, 60))
    for row in range(T):
        after = _hidden(DRAFTER, x.at[0, row].add(0.5), cache, lengths(60, 60))
        assert changed_rows(before, after) == [[True] * T, [False] * T]


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 100])
def test_the_window_ends_where_it_should(length):
    """Row i, at length + i, sees the keys from length + i - (window - 1) on, and none before."""
    taps, x = streams(CONFIG, 2, length), block()
    ends = lengths(length, length)
    one_layer = replace(CONFIG, drafter=replace(CONFIG.drafter, num_layers=1))
    # with one layer nothing passes from row to row, so that each row tells what it sees itself
    shallow = random_drafter(one_layer)
    before = _hidden(shallow, x, _context(shallow, one_layer, taps), ends)
    for position in (0, length - WINDOW, length - WINDOW + 1, length - WINDOW + 6, length - 1):
        if position < 0:
            continue
        moved = [tap.at[0, position].add(1.0) for tap in taps]
        after = _hidden(shallow, x, _context(shallow, one_layer, moved), ends)
        sees = [position > length + i - WINDOW for i in range(T)]
        assert changed_rows(before, after) == [sees, [False] * T], position


def _context(drafter, config, taps):
    positions = np.broadcast_to(np.arange(taps[0].shape[1]), taps[0].shape[:2])
    return _inject(drafter, empty_cache(config, 2 * P), taps, at(positions, TABLE))


@pytest.mark.parametrize("length", [4095, 4096, 4097, 4140])
def test_the_released_window_against_the_equations(length):
    """Window 4096 over pages of 128, blocks scattered."""
    target = small(2, num_tokens=501)
    target = replace(target, indexer=replace(target.indexer, block_size=128))
    config = drafted(target, num_layers=1, window=4096)
    drafter, blocks = random_drafter(config), 34
    taps, x = streams(config, 1, length), block()[:1]
    table = np.random.default_rng(2).permutation(blocks)[None]
    cache = empty_cache(config, blocks)
    cache = _inject(drafter, cache, taps, at(np.arange(length)[None], table))
    found = drafter.hidden(x, cache, jnp.asarray(table, jnp.int32), lengths(length))
    expected = Reference.of(drafter, config).hidden(x[0], [tap[0] for tap in taps])
    assert_close(found[0], expected, "f32")


def test_the_block_is_rotated_from_the_anchors_position():
    """Rotation is relative: a context and a block moved along together give the same states (7.1).
    A block that is rotated one position too early, over the same keys, does not.
    """
    config = drafted(window=1000)
    drafter, taps, x = random_drafter(config), streams(config, 2, 20), block()

    def run(shift):
        positions = np.broadcast_to(np.arange(20) + shift, (2, 20))
        cache = _inject(drafter, empty_cache(config, 2 * P), taps, at(positions, TABLE))
        table = jnp.where(jnp.arange(P) < shift // Z, -1, TABLE)  # only what is written
        layout = cache.layout.draft_part
        context = DraftContext.of(
            table, lengths(20 + shift, 20 + shift), config.drafter, cache.layout.formats
        )
        k, v, _ = layer_pages(cache.pool, layout, layout.layer_line(0), sparse=False)
        positions = jnp.broadcast_to(shift + 19 + jnp.arange(T), (2, T))
        cos, sin = rope_angles(positions, config.drafter.attention)
        early = replace(context, cos=cos, sin=sin)
        return [drafter.layers[0](x, k, v, one) for one in (context, early)]

    (still, early), (moved, _) = run(0), run(32)
    assert_close(moved, still, "f32")
    assert np.abs(np.asarray(early - still)).max() > 1e-2


def test_each_row_is_its_own_draft():
    """Raising one row's logits changes that draft and, through the Markov bias, later ones only."""
    hidden = jnp.asarray(np.random.default_rng(4).normal(size=(1, T, D)), jnp.float32)
    greedy = draft_sampling(SamplingState.of([SamplingParams(temperature=0.0)]), "greedy")
    one = lengths(3), lengths(40), greedy
    before = chain(hidden, *one)
    for row in range(T):
        after = chain(hidden.at[0, row].multiply(-3.0), *one)
        differs = np.asarray(before[0] != after[0])[0]
        assert differs[row] and not differs[:row].any()


def chain(hidden, anchors, positions, sampling):
    """Drafts and logits of given final states."""
    run = jax.jit(drafting.chain)
    return run(MODEL, DRAFTER, hidden, anchors, positions, sampling)[:2]


def test_the_markov_bias_of_a_row_is_of_the_token_before_it():
    """Without base logits row k follows W2 W1[previous] alone: a chain that a table of argmaxes
    gives.
    """
    greedy = draft_sampling(SamplingState.of([SamplingParams(temperature=0.0)]), "greedy")
    tokens, _ = chain(jnp.zeros((1, T, D)), lengths(17), lengths(40), greedy)
    w1, w2 = (np.asarray(w.get_value()) for w in (DRAFTER.markov.w1, DRAFTER.markov.w2.weight))
    following = (w1 @ w2.T)[:, : CONFIG.num_tokens].argmax(axis=1)
    expected, previous = [], 17
    for _ in range(T):
        previous = int(following[previous])
        expected.append(previous)
    assert tokens[0].tolist() == expected


def proposed(cache, sampling, anchors=(5, 9), ends=(60, 60), table=TABLE) -> Proposal:
    return _propose(MODEL, DRAFTER, cache, table, lengths(*anchors), lengths(*ends), sampling)


def sampled(*temperatures, **options) -> SamplingState:
    """One row a temperature, as drafts are drawn."""
    params = [SamplingParams(temperature=t, **options) for t in temperatures]
    return draft_sampling(SamplingState.of(params), "probabilistic")


def test_confidence_knows_the_token_before_a_draft_and_not_the_draft():
    cache = cached(streams(CONFIG, 2, 60), (60, 60))
    one, other = proposed(cache, sampled(4.0, 4.0)), proposed(cache, sampled(4.0, 4.0, seed=8))
    first = int(np.argmax(np.asarray(one.tokens[0] != other.tokens[0])))
    same = np.asarray(one.confidence[0] == other.confidence[0])
    assert same[: first + 1].all() and not same[first + 1], (first, same)


def test_a_drafter_without_a_confidence_head_proposes_the_same():
    config = drafted(confidence_head=False)
    drafter = random_drafter(config)
    headless = [leaf for leaf in jax.tree.leaves(DRAFTER) if leaf.shape not in ((1, D + 16), (1,))]
    drafter = jax.tree.unflatten(jax.tree.structure(drafter), headless)
    cache = cached(streams(CONFIG, 2, 60), (60, 60))
    sampling = sampled(1.0, 1.0)
    found = _propose(MODEL, drafter, cache, TABLE, lengths(5, 9), lengths(60, 60), sampling)
    assert found.confidence is None
    np.testing.assert_array_equal(found.tokens, proposed(cache, sampling).tokens)


def test_a_row_is_drafted_at_its_own_temperature_and_from_its_own_seed():
    cache = cached([tap.at[1].set(tap[0]) for tap in streams(CONFIG, 2, 60)], (60, 60))
    mixed = proposed(cache, sampled(0.0, 2.0), anchors=(5, 5))
    np.testing.assert_array_equal(mixed.tokens[0], mixed.logits[0].argmax(-1))
    assert np.asarray(mixed.tokens[0] != mixed.tokens[1]).any()
    again = proposed(cache, sampled(2.0, 2.0), anchors=(5, 5))
    np.testing.assert_array_equal(mixed.tokens[1], again.tokens[1])
    np.testing.assert_array_equal(again.tokens[0], again.tokens[1])


def test_drafts_are_not_cut_and_certain_requests_draft_greedily():
    state = SamplingState.of(
        [SamplingParams(temperature=0.7, top_p=0.5, top_k=k, min_p=0.1) for k in (5, 1)]
    )
    drafts = draft_sampling(state, "probabilistic")
    assert drafts.temperature.tolist() == [np.float32(0.7), 0.0]
    assert not drafts.top_k.any() and not drafts.min_p.any() and (drafts.top_p == 1).all()
    assert not draft_sampling(state, "greedy").temperature.any()


def test_kept_logits_are_the_ones_drawn_from_in_bfloat16():
    """F104: verification has the numbers, rounding included."""
    model = random_model(CONFIG)
    model.dtype = jnp.dtype(jnp.bfloat16)
    cache = cached(streams(CONFIG, 2, 60), (60, 60))
    greedy = sampled(0.0, 0.0)
    found = _propose(model, DRAFTER, cache, TABLE, lengths(5, 9), lengths(60, 60), greedy)
    assert found.logits.dtype == jnp.bfloat16 and found.confidence.dtype == jnp.float32
    np.testing.assert_array_equal(found.tokens, found.logits.argmax(-1))
