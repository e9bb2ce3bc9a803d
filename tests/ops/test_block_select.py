"""block_select against picking blocks query by query in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_select import block_select, reference
from pallas_kernels.layouts.pool import Component
from tests.ops.oracles import as_source, pick_blocks, scattered, stored, temporary_share

Z, C, K, I = 16, 4, 2, 32
B, S = 2, 192  # 12 blocks, three times as many as are chosen

_select = jax.jit(block_select, static_argnames=("top_k", "init_blocks", "local_blocks"))
each_source = pytest.mark.parametrize("kind", ["blocks", "f32", "bf16", "fp8", "nvfp4"])


def _inputs(positions, seed=0):
    """Index queries [B, T, K, I], keys [B, S, I] and positions [B, T]."""
    rng = np.random.default_rng(seed)
    positions = np.broadcast_to(np.asarray(positions, np.int32), (B, len(positions)))
    q = rng.standard_normal((*positions.shape, K, I), dtype=np.float32)
    return q, rng.standard_normal((B, S, I), dtype=np.float32), positions


def _run(q, keys, positions, kind="f32", **options):
    rows, table = scattered(keys[:, :, None], Z)
    options = {"top_k": C, **options}
    return np.asarray(_select(q, as_source(rows, kind), table, positions, **options))


def _as_sets(ids):
    """The set of ids of each query and head; ids must be distinct."""
    sets = np.empty(ids.shape[:-1], object)
    for where in np.ndindex(sets.shape):
        chosen = [int(i) for i in ids[where] if i != -1]
        assert len(set(chosen)) == len(chosen), f"an id twice at {where}: {ids[where]}"
        sets[where] = set(chosen)
    return sets


def _expected(q, keys, positions, **options):
    sets = np.empty(q.shape[:3], object)
    for b, i, head in np.ndindex(sets.shape):
        sets[b, i, head] = pick_blocks(q[b, i, head], keys[b], positions[b, i], Z, C, **options)
    return sets


def _assert_same(ids, expected):
    found = _as_sets(ids)
    for where in np.ndindex(found.shape):
        assert found[where] == expected[where], f"at {where}"


LENGTHS = [1, Z - 1, Z, Z + 1, 3 * Z, C * Z, C * Z + 1, 7 * Z - 1, 7 * Z, 7 * Z + 1, 11 * Z + 5, S]
POSITIONS = [length - 1 for length in LENGTHS]


@each_source
def test_the_best_blocks_are_chosen_at_every_length(kind):
    q, keys, positions = _inputs(POSITIONS)
    expected = _expected(q, stored(keys, kind), positions)
    _assert_same(_run(q, keys, positions, kind), expected)


def test_all_causal_blocks_are_chosen_while_they_fit():
    """F60: no more are asked for than there are."""
    q, keys, positions = _inputs(POSITIONS)
    sets = _as_sets(_run(q, keys, positions))
    for i, position in enumerate(POSITIONS):
        if position < C * Z:
            assert (sets[:, i] == set(range(position // Z + 1))).all()


def test_unused_places_are_minus_one():
    """F60."""
    q, keys, positions = _inputs(POSITIONS)
    ids = _run(q, keys, positions)
    causal = np.minimum(positions // Z + 1, C)
    assert ((ids >= 0).sum(-1) == causal[..., None]).all() and ids.min() == -1


def test_more_blocks_asked_for_than_the_table_holds_leaves_the_rest_minus_one():
    """F60."""
    q, keys, positions = _inputs([5, 31])
    ids = _run(q, keys[:, : 2 * Z], positions)
    assert ids.shape == (B, 2, K, C)
    assert (_as_sets(ids) == np.array([{0}, {0, 1}], object)[None, :, None]).all()


def test_one_index_head_of_a_rank_chooses_as_it_does_beside_the_others():
    """F60: tensor-parallel ranks have one index head each."""
    q, keys, positions = _inputs(POSITIONS)
    together = _run(q, keys, positions)
    for head in range(K):
        alone = _run(q[:, :, head : head + 1], keys, positions)
        _assert_same(alone[:, :, 0], _as_sets(together[:, :, head]))


def test_each_head_of_each_token_prefers_its_own_block():
    """F61: token and head are told apart where ids are stored."""
    # 3 tokens, 4 heads; key block b points along axis b, head h of token t looks along axis 4t + h
    keys = np.zeros((1, S, I), np.float32)
    keys[0, np.arange(S), np.arange(S) // Z] = 1
    q = np.zeros((1, 3, 4, I), np.float32)
    wanted = np.array([[0, 5, 9, 2], [7, 1, 3, 8], [4, 10, 6, 0]])
    for token, head in np.ndindex(wanted.shape):
        q[0, token, head, wanted[token, head]] = 1
    sets = _as_sets(_run(q, keys, np.full((1, 3), S - 1, np.int32), top_k=2))
    for token, head in np.ndindex(wanted.shape):
        assert sets[0, token, head] == {wanted[token, head], 11}


def test_the_local_block_is_always_chosen():
    """F64."""
    q, keys, positions = _inputs(POSITIONS)
    q, keys = np.abs(q), np.abs(keys)
    for position in POSITIONS:
        keys[:, position // Z * Z : position + 1] = -9  # the worst of all
    sets = _as_sets(_run(q, keys, positions))
    assert all(p // Z in s for i, p in enumerate(POSITIONS) for s in sets[:, i].ravel())


@pytest.mark.parametrize(("init", "local"), [(0, 2), (1, 1), (2, 2), (1, 3)])
def test_init_and_local_blocks_count_inside_the_chosen(init, local):
    """F64: forced blocks take none beyond the budget."""
    q, keys, positions = _inputs(POSITIONS)
    options = {"init_blocks": init, "local_blocks": local}
    ids = _run(q, keys, positions, **options)
    _assert_same(ids, _expected(q, keys, positions, **options))


def test_a_block_that_is_both_init_and_local_is_chosen_once():
    """F64."""
    q, keys, positions = _inputs([3, 17])
    sets = _as_sets(_run(q, keys, positions, init_blocks=2, local_blocks=2))
    assert (sets == np.array([{0}, {0, 1}], object)[None, :, None]).all()


def test_equal_scores_go_to_the_lower_ids():
    q, keys, positions = _inputs([S - 1])
    assert (_as_sets(_run(q, 0 * keys, positions)) == {0, 1, 2, 11}).all()


def test_zero_and_negative_zero_are_equal_scores(monkeypatch):
    scores = jnp.asarray([[[[-0.0, 0.0, 0.0, -0.0, 0.0, 0.0]]]])
    monkeypatch.setattr(reference, "block_scores", lambda *arguments: scores)
    q = jnp.zeros((1, 1, 1, I))
    source, table = as_source(np.zeros((6, Z, 1, I), np.float32), "blocks"), jnp.arange(6)[None]
    options = {"top_k": 3, "init_blocks": 0, "local_blocks": 1}
    ids = reference.block_select(q, source, table, jnp.array([[6 * Z - 1]]), **options)
    assert set(np.asarray(ids).ravel().tolist()) == {0, 1, 5}


def test_a_nan_score_loses_to_every_number():
    q, keys, positions = _inputs([S - 1])
    keys[:, [0, 2 * Z + 3, 5 * Z, 6 * Z - 1], :] = np.nan
    finite = np.where(np.isnan(keys), -1e6 * np.sign(q[:, 0, :1]), keys)  # far below any other key
    # block 0, 2 and 5 keep their other keys
    ids = _run(q[:, :, :1], keys, positions)
    _assert_same(ids, _expected(q[:, :, :1], finite, positions))


def test_a_nan_query_still_gets_its_local_block_and_the_lower_ids():
    q, keys, positions = _inputs([S - 1])
    assert (_as_sets(_run(q * np.nan, keys, positions)) == {0, 1, 2, 11}).all()


def test_an_infinite_score_does_not_push_out_the_local_block():
    q, keys, positions = _inputs([S - 1])
    keys[:, : 8 * Z] = np.inf * np.sign(q[:, 0, :1])
    assert (_as_sets(_run(q[:, :, :1], keys, positions)) == {0, 1, 2, 11}).all()


def test_a_score_of_minus_infinity_is_still_a_block_that_can_be_seen():
    q, keys, positions = _inputs([2 * Z - 1])
    keys[:, :Z] = -np.inf * np.sign(q[:, 0, :1])
    assert (_as_sets(_run(q[:, :, :1], keys, positions)) == {0, 1}).all()


def test_future_keys_do_not_matter():
    q, keys, positions = _inputs([7 * Z + 4])
    before = _run(q, keys, positions)
    keys[:, 7 * Z + 5 :] = 100
    assert (_run(q, keys, positions) == before).all()


def test_physical_block_numbers_do_not_matter():
    q, keys, positions = _inputs(POSITIONS)
    rows, table = scattered(keys[:, :, None], Z)
    again, other_table = scattered(keys[:, :, None], Z, seed=5)
    first = _select(q, as_source(rows, "f32"), table, positions, top_k=C)
    second = _select(q, as_source(again, "f32"), other_table, positions, top_k=C)
    assert (table != other_table).any() and (np.asarray(first) == np.asarray(second)).all()


def test_padding_queries_choose_nothing():
    q, keys, positions = _inputs([-1, 40, -1])
    ids = _run(q, keys, positions, init_blocks=1)
    assert (ids[:, [0, 2]] == -1).all() and (ids[:, 1] >= 0).any()


def test_rows_of_a_verification_choose_as_plain_decodes_at_their_lengths():
    """F65: a draft window over the edge of block 0."""
    # a draft window over the edge of block 0
    window = [Z - 2, Z - 1, Z, Z + 1, Z + 2]
    q, keys, positions = _inputs(window)
    together = _as_sets(_run(q, keys, positions))
    for i, position in enumerate(window):
        _assert_same(_run(q[:, i : i + 1], keys, positions[:, i : i + 1])[:, 0], together[:, i])
        assert all(max(chosen) == position // Z for chosen in together[:, i].ravel())


@pytest.mark.parametrize("tokens", [1025, 8193])
def test_scoring_in_many_parts_chooses_as_scoring_in_one(tokens, monkeypatch):
    """F68: with rows of padding and of drafts."""
    rng = np.random.default_rng(2)
    blocks = -(-tokens // Z)
    q = rng.standard_normal((2, 3, K, I), dtype=np.float32)
    rows, table = scattered(rng.standard_normal((1, blocks * Z, 1, I), dtype=np.float32), Z)
    table = np.stack([table[0], table[0]])
    positions = np.array(
        [[tokens - 3, tokens - 2, tokens - 1], [5, 40, -1]]
    )  # a draft, a short row
    arguments = (q, as_source(rows, "f32"), table, positions)
    whole = np.asarray(_select(*arguments, top_k=C))
    monkeypatch.setattr(reference, "_MAX_SCORES", 7 * 2 * 3 * K * Z)  # 7 blocks at once
    parts = jax.jit(lambda *a: block_select(*a, top_k=C))(*arguments)
    assert (np.asarray(parts) == whole).all()


def test_selecting_from_pages_does_not_copy_the_pool():
    q, table = jnp.ones((1, 1, K, I)), jnp.arange(16)[None]
    position = jnp.full((1, 1), 16 * Z - 1)
    share = temporary_share(
        lambda pages: block_select(q, pages, table, position, top_k=C),
        Component(format="f32", heads=1, tokens=Z, width=I),
    )
    assert share < 0.05
