"""Every implementation of sparse and dense attention against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.sparse_attention import DENSE, SPARSE, dense_attention, sparse_attention
from tests.numerics import assert_close
from tests.ops.oracles import (
    as_source,
    attend_blocks,
    pick_blocks,
    portable,
    scattered,
    stored,
)

Z, C, K, G, H = 16, 4, 2, 2, 32
P, N, T = 8, K * G, 3
S = P * Z  # twice as many keys as are chosen
SCALE = H**-0.5
# Tiles of queries: inside a block, over a block edge, at the end, at the very start.
POSITIONS = np.array([[70, 71, 72], [95, 96, 97], [125, 126, 127], [0, 1, 2]], np.int32)
B = len(POSITIONS)

_sparse = jax.jit(sparse_attention, static_argnames=("scale", "implementation"))
_dense = jax.jit(dense_attention, static_argnames=("scale", "implementation"))
each_sparse = pytest.mark.parametrize("name", portable(SPARSE))
each_dense = pytest.mark.parametrize("name", [one.name for one in DENSE])


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _inputs():
    """q [B, T, N, H], and k and v [B, S, K, H]."""
    return _normal(B, T, N, H), _normal(B, S, K, H, seed=1), _normal(B, S, K, H, seed=2)


def _block_ids(positions=POSITIONS, seed=0):
    """Up to C distinct causal blocks a query and head, its own among them, in random order."""
    rng = np.random.default_rng(seed)
    ids = np.full((*positions.shape, K, C), -1, np.int32)
    for where in np.ndindex(*positions.shape, K):
        own = positions[where[:-1]] // Z
        chosen = [own, *rng.permutation(own)[: C - 1]] if own >= 0 else []
        ids[where][: len(chosen)] = rng.permutation(chosen)
    return ids


def _run(q, k, v, ids, positions, name, kind="f32", seed=0):
    (rows_k, table), (rows_v, _) = scattered(k, Z, seed), scattered(v, Z, seed)
    sources = as_source(rows_k, kind), as_source(rows_v, kind)
    return _sparse(q, *sources, ids, table, positions, scale=SCALE, implementation=name)


# ---- meaning


@each_sparse
@pytest.mark.parametrize("kind", ["blocks", "f32", "bf16", "fp8", "nvfp4"])
def test_each_query_attends_to_the_causal_keys_of_its_blocks(name, kind):
    q, k, v = _inputs()
    ids = _block_ids()
    out, _ = _run(q, k, v, ids, POSITIONS, name, kind)
    expected, _ = attend_blocks(q, stored(k, kind), stored(v, kind), ids, POSITIONS, Z, SCALE)
    assert_close(out, expected, "f32")


@each_sparse
def test_lse_is_the_log_of_the_sum_of_exponentials_of_scaled_scores(name):
    """F150."""
    q, k, v = _inputs()
    ids = _block_ids()
    _, lse = _run(q, k, v, ids, POSITIONS, name)
    assert lse.dtype == jnp.float32
    assert_close(lse, attend_blocks(q, k, v, ids, POSITIONS, Z, SCALE)[1], "f32")


@each_sparse
def test_large_scores_do_not_overflow(name):
    q, k, v = _inputs()
    ids = _block_ids()
    out, lse = _run(100 * q, 100 * k, v, ids, POSITIONS, name)
    expected, expected_lse = attend_blocks(100 * q, 100 * k, v, ids, POSITIONS, Z, SCALE)
    assert_close(lse, expected_lse, "f32")
    assert_close(out, expected, "bf16")  # one part in 2^24 of a score of 10^5 moves a weight by 1 %


@each_sparse
def test_the_output_has_the_dtype_of_the_queries(name):
    q, k, v = _inputs()
    ids = _block_ids()
    q = jnp.asarray(q, jnp.bfloat16)
    out, lse = _run(q, k, v, ids, POSITIONS, name)
    expected, _ = attend_blocks(np.asarray(q, np.float32), k, v, ids, POSITIONS, Z, SCALE)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert_close(out, expected, "bf16")


@each_sparse
def test_the_order_of_block_ids_carries_no_meaning(name):
    """F57."""
    q, k, v = _inputs()
    ids = _block_ids()
    turned = np.random.default_rng(9).permuted(ids, axis=-1)
    assert (turned != ids).any()
    first, second = (_run(q, k, v, i, POSITIONS, name) for i in (ids, turned))
    assert_close(second[0], first[0], "f32")
    assert_close(second[1], first[1], "f32")


@each_sparse
def test_no_key_after_the_query_is_used(name):
    """F57: of its own block only the keys up to the query."""
    q, k, v = _inputs()
    ids = _block_ids()
    before = _run(q, k, v, ids, POSITIONS, name)
    for b, position in enumerate(POSITIONS[:, 0]):
        k[b, position + 1 :], v[b, position + 1 :] = 50, 1e6
    after = _run(q, k, v, ids, POSITIONS, name)
    assert_close(after[0][:, 0], before[0][:, 0], "f32")
    assert_close(after[1][:, 0], before[1][:, 0], "f32")


@each_sparse
def test_physical_block_numbers_do_not_matter(name):
    q, k, v = _inputs()
    ids = _block_ids()
    first = _run(q, k, v, ids, POSITIONS, name, seed=0)
    second = _run(q, k, v, ids, POSITIONS, name, seed=5)
    assert_close(second[0], first[0], "exact")
    assert_close(second[1], first[1], "exact")


@each_sparse
def test_sequences_do_not_see_one_another(name):
    q, k, v = _inputs()
    ids = _block_ids()
    before, _ = _run(q, k, v, ids, POSITIONS, name)
    k[1], v[1] = 30, np.nan
    after, _ = _run(q, k, v, ids, POSITIONS, name)
    others = [0, 2, 3]
    assert_close(np.asarray(after)[others], np.asarray(before)[others], "exact")


# ---- unused places, padding, junk


@each_sparse
def test_unused_places_before_the_used_ones_do_not_matter(name):
    """F55: the first tile of a row is masked as a whole."""
    q, k, v = _inputs()
    positions = np.full((B, T), S - 1, np.int32)
    front, alone = (np.broadcast_to(i, (B, T, K, C)) for i in ([-1, -1, 5, 2], [5, 2, -1, -1]))
    first, second = (_run(q, k, v, i, positions, name) for i in (front, alone))
    assert_close(first[0], second[0], "f32")
    assert_close(first[0], attend_blocks(q, k, v, front, positions, Z, SCALE)[0], "f32")


@each_sparse
def test_a_query_without_blocks_gives_zeros_and_minus_infinity(name):
    """F54, F55, F150: not NaN."""
    q, k, v = _inputs()
    ids = _block_ids()
    ids[1, 2] = -1
    out, lse = _run(q, k, v, ids, POSITIONS, name)
    assert (np.asarray(out)[1, 2] == 0).all() and (np.asarray(lse)[1, 2] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[1, :2]).all()


@each_sparse
def test_a_padded_row_is_zero_and_leaves_the_live_rows_as_they_are(name):
    """F54."""
    q, k, v = _inputs()
    padded = POSITIONS.copy()
    padded[3] = -1
    ids = _block_ids()
    live, _ = _run(q, k, v, ids, POSITIONS, name)
    out, lse = _run(q, k, v, ids, padded, name)
    assert (np.asarray(out)[3] == 0).all() and (np.asarray(lse)[3] == -np.inf).all()
    assert_close(out[:3], live[:3], "exact")


@each_sparse
def test_nan_in_slots_that_no_query_of_the_tile_sees_is_harmless(name):
    q, k, v = _inputs()
    ids = _block_ids()
    clean = _run(q, k, v, ids, POSITIONS, name)
    for b in range(B):
        for head in range(K):
            chosen = set(ids[b, :, head].ravel())
            unseen = [j for j in range(S) if j > POSITIONS[b].max() or j // Z not in chosen]
            k[b, unseen, head], v[b, unseen, head] = np.nan, np.nan
    out, lse = _run(q, k, v, ids, POSITIONS, name)
    assert_close(out, clean[0], "f32")
    assert_close(lse, clean[1], "f32")


@each_sparse
def test_a_block_without_a_page_is_not_attended_to(name):
    q, k, v = _inputs()
    ids = _block_ids()
    rows_k, table = scattered(k, Z)
    rows_v, _ = scattered(v, Z)
    table[0, 1] = -1
    out, _ = _sparse(
        q, as_source(rows_k, "f32"), as_source(rows_v, "f32"), ids, table, POSITIONS,
        scale=SCALE, implementation=name,
    )  # fmt: skip
    without = np.where(ids == 1, -1, ids)
    expected, _ = attend_blocks(q, k, v, without, POSITIONS, Z, SCALE)
    assert_close(out[0], expected[0], "f32")


# ---- parts and wholes


@each_sparse
def test_two_halves_merged_by_their_lse_are_the_whole(name):
    """F150: one half may be empty."""
    q, k, v = _inputs()
    ids = _block_ids()
    whole, whole_lse = _run(q, k, v, ids, POSITIONS, name)
    parts = [np.where(ids % 2 == odd, ids, -1) for odd in (0, 1)]
    halves = [_run(q, k, v, part, POSITIONS, name) for part in parts]
    outs, lses = (np.stack([np.asarray(h[i], np.float64) for h in halves]) for i in (0, 1))
    top = lses.max(0)
    weights = np.exp(lses - top)  # one half may be empty, never both
    merged = (outs * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    assert (lses == -np.inf).any()
    assert_close(merged, whole, "f32")
    assert_close(np.log(weights.sum(0)) + top, whole_lse, "f32")


@each_dense
@pytest.mark.parametrize("kind", ["blocks", "f32", "nvfp4"])
def test_dense_attention_sees_every_causal_key(name, kind):
    q, k, v = _inputs()
    (rows_k, table), (rows_v, _) = scattered(k, Z), scattered(v, Z)
    sources = as_source(rows_k, kind), as_source(rows_v, kind)
    out, lse = _dense(q, *sources, table, POSITIONS, scale=SCALE, implementation=name)
    every = np.broadcast_to(np.arange(P), (B, T, K, P))
    expected = attend_blocks(q, stored(k, kind), stored(v, kind), every, POSITIONS, Z, SCALE)
    assert_close(out, expected[0], "f32")
    assert_close(lse, expected[1], "f32")


@each_sparse
@pytest.mark.parametrize("dense_name", [one.name for one in DENSE])
def test_sparse_attention_to_all_blocks_is_dense_attention(name, dense_name):
    """F67."""
    q, k, v = _inputs()
    (rows_k, table), (rows_v, _) = scattered(k, Z), scattered(v, Z)
    sources = as_source(rows_k, "f32"), as_source(rows_v, "f32")
    every = np.broadcast_to(np.arange(P)[::-1], (B, T, K, P))
    sparse = _sparse(q, *sources, every, table, POSITIONS, scale=SCALE, implementation=name)
    dense = _dense(q, *sources, table, POSITIONS, scale=SCALE, implementation=dense_name)
    assert_close(sparse[0], dense[0], "f32")


@each_sparse
def test_beyond_the_chosen_blocks_sparse_attention_is_another_function_than_dense(name):
    """F67."""
    # each head's best blocks hold keys along its query; the rest pulls the other way
    q, k, v = _inputs()
    positions = np.full((B, T), S - 1, np.int32)
    ids = np.full((B, T, K, C), -1, np.int32)
    for where in np.ndindex(B, T, K):
        b, i, head = where
        best = pick_blocks(q[b, i, head * G], k[b, :, head], S - 1, Z, 2)
        ids[where][:2] = sorted(best)
    out, _ = _run(q, k, v, ids, positions, name)
    every = np.broadcast_to(np.arange(P), (B, T, K, P))
    dense, _ = attend_blocks(q, k, v, every, positions, Z, SCALE)
    assert_close(out, attend_blocks(q, k, v, ids, positions, Z, SCALE)[0], "f32")
    assert np.linalg.norm(out - dense) > 0.3 * np.linalg.norm(dense)


@each_sparse
def test_walking_the_queries_in_groups_changes_nothing(name, monkeypatch):
    q, k, v = _inputs()
    ids = _block_ids()
    whole, _ = _run(q, k, v, ids, POSITIONS, name)
    file = next(one.run for one in SPARSE if one.name == name).__globals__
    for limit in ("_MAX_SCORES", "_MAX_GATHERED"):
        if limit in file:
            monkeypatch.setitem(file, limit, 5 * K * C * Z * H)  # 5 of 12 queries, or 1 tile of 4
    (rows_k, table), (rows_v, _) = scattered(k, Z), scattered(v, Z)
    sources = as_source(rows_k, "f32"), as_source(rows_v, "f32")
    parts, _ = jax.jit(
        lambda *a: sparse_attention(*a, scale=SCALE, implementation=name)
    )(q, *sources, ids, table, POSITIONS)  # fmt: skip
    assert_close(parts, whole, "f32")


def test_the_mask_refuses_a_context_of_many_more_blocks_than_are_chosen():
    masked = next(one for one in SPARSE if one.name == "masked")
    q, ids = jnp.zeros((1, 16, N, H)), jnp.zeros((1, 16, K, C), jnp.int32)
    table = jnp.zeros((1, 2048), jnp.int32)
    reason = masked.refuse(q, None, None, ids, table, None, scale=1.0)
    assert "2048 context blocks" in reason and "4 chosen" in reason


def test_the_mask_leaves_a_single_query_to_the_gather_once_there_is_a_choice():
    masked = next(one for one in SPARSE if one.name == "masked")
    q, ids = jnp.zeros((1, 1, N, H)), jnp.zeros((1, 1, K, C), jnp.int32)
    answers = [
        masked.refuse(q, None, None, ids, jnp.zeros((1, blocks), jnp.int32), None, scale=1.0)
        for blocks in (C, C + 1)
    ]
    assert answers[0] is None and "5 context blocks" in answers[1]


# ---- gradients of the packed path


def _loss_weights():
    return _normal(B, T, N, H, seed=6), _normal(B, T, N, seed=7)


@pytest.fixture(scope="module", params=portable(SPARSE))
def gradients(request):
    """(dq, dk, dv) of <out, a> + <lse, b>, one query without blocks; k and v as plain blocks."""
    q, k, v = _inputs()
    ids = _block_ids()
    ids[1, 2] = -1
    weight, lse_weight = _loss_weights()
    (rows_k, table), (rows_v, _) = scattered(k, Z), scattered(v, Z)

    integers = [jnp.asarray(x) for x in (ids, table, POSITIONS)]

    @jax.jit
    def run(q, rows_k, rows_v):
        def loss(q, rows_k, rows_v):
            sources = Blocks(rows_k), Blocks(rows_v)
            options = {"scale": SCALE, "implementation": request.param}
            out, lse = sparse_attention(q, *sources, *integers, **options)
            return jnp.sum(out * weight) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) * lse_weight)

        return jax.grad(loss, argnums=(0, 1, 2))(q, rows_k, rows_v)

    dq, dk, dv = (np.asarray(g) for g in run(q, rows_k, rows_v))
    return dq, dk[table].reshape(k.shape), dv[table].reshape(v.shape), ids


def _numeric(direction, ids, step=1e-4):
    """The same loss's derivative along (q, k, v) directions: central differences in float64."""
    weight, lse_weight = _loss_weights()

    def loss(sign):
        q, k, v = (x + sign * step * d for x, d in zip(_inputs(), direction, strict=True))
        out, lse = attend_blocks(q, k, v, ids, POSITIONS, Z, SCALE)
        return (out * weight).sum() + (np.where(lse > -np.inf, lse, 0) * lse_weight).sum()

    return (loss(1) - loss(-1)) / (2 * step)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_the_gradient_is_the_numeric_one(gradients, which):
    direction = [np.zeros(x.shape) for x in _inputs()]
    direction[which] = np.random.default_rng(8).standard_normal(direction[which].shape)
    expected = _numeric(direction, gradients[3])
    found = (gradients[which] * direction[which]).sum()
    scale = np.linalg.norm(gradients[which])  # what a random direction measures
    assert abs(found - expected) < 1e-4 * scale


def test_keys_that_no_query_sees_have_no_gradient(gradients):
    _, dk, dv, ids = gradients
    for b, j, head in np.ndindex(B, S, K):
        rows = [i for i in range(T) if j // Z in ids[b, i, head] and j <= POSITIONS[b, i]]
        if not rows:
            assert not dk[b, j, head].any() and not dv[b, j, head].any()


def test_a_query_without_blocks_has_no_gradient(gradients):
    dq = gradients[0]
    assert np.isfinite(dq).all() and not dq[1, 2].any() and dq[1, 0].any()
