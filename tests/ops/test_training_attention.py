"""Training's sparse attention on Hopper, its kernels' contracts in jnp on a CPU: pairs, groups,
pieces and chunks give the reference's values and gradients.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.sparse_attention import pairs, pieces, reference, training
from tests.numerics import assert_close

Z, H, G, K, C = 16, 8, 16, 2, 3  # G alone is what the kernels have
SCALE = H**-0.5


def _inputs(queries=70, seed=0):
    """(q, k, v) in float32 and (ids, table, positions): a tile inside a sequence and one that
    begins with padding; their tables name blocks in any order.
    """
    rng = np.random.default_rng(seed)
    starts = np.array([[75 - queries], [19 - queries]])
    positions = np.maximum(starts + np.arange(queries), -1).astype(np.int32)
    ids = np.full((2, queries, K, C), -1, np.int32)
    for where in np.ndindex(2, queries, K):
        own = positions[where[:2]] // Z
        if own >= 0:
            some = np.array([own, *rng.permutation(own)[: C - 1]])
            ids[where][: len(some)] = some
            rng.shuffle(ids[where])
    table = np.array([[3, 0, 6, 1, 5], [2, 7, -1, -1, -1]], np.int32)
    shapes = (2, queries, K * G, H), (9, Z, K, H), (9, Z, K, H)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    return arrays, [jnp.asarray(x) for x in (ids, table, positions)]


def _of_pieces(x, work):
    """What groups have, by pieces [K, n, GROUPS, ..], and which of them exist."""
    number = work.first[..., None] + jnp.arange(pieces.GROUPS)
    there = jnp.arange(pieces.GROUPS) < work.groups[..., None]
    number = jnp.minimum(number, x.shape[1] - 1)
    return jax.vmap(lambda x, at: x[at])(x, number), there


def _operands(x, work):
    """A group's rows of queries' heads [K, n, GROUPS, R, G, H]."""
    x = x.reshape(x.shape[0], K, G, -1).swapaxes(0, 1)
    places, _ = _of_pieces(work.place, work)
    queries = jnp.maximum(places, ~places) >> work.pair.slot_bits
    return jax.vmap(lambda x, at: x[at])(x, queries)


def _spread(part, work, queries):
    """Every pair's part at its slot [T, K, C, ..], NaN elsewhere."""
    place, there = _of_pieces(work.place, work)
    query, slot = work.pair.query_and_slot(place)
    query = jnp.where(there[..., None] & (place >= 0), query, queries)
    head = jnp.arange(part.shape[0])[:, None, None, None]
    empty = jnp.full((queries, part.shape[0], work.slots, *part.shape[4:]), jnp.nan)
    return empty.at[query, head, slot].set(part, mode="drop")


def _keys(x, work):
    return jax.vmap(lambda x, at: x[at], (2, 0))(x, work.block)


def _seen(last, work):
    last, there = _of_pieces(last.reshape(*last.shape[:2], -1, G), work)
    return (jnp.arange(Z) <= last[..., None]) & there[..., None, None, None]


_product = partial(jnp.einsum, precision="highest")


def _attend(q, k, v, work, scale):
    s = _product("kngrhd,knzd->kngrhz", _operands(q, work), _keys(k, work)) * scale
    s = jnp.where(_seen(jnp.repeat(work.last, G, axis=-1), work), s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(p, axis=-1)
    out = _product("kngrhz,knzd->kngrhd", p, _keys(v, work)) / jnp.maximum(total, 1e-30)[..., None]
    results = out, jnp.log(total) + top[..., 0]
    return tuple(_spread(x, work, q.shape[0]) for x in results)


def _differentiate(q, d_out, k, v, rows, work, scale):
    queries = q.shape[0]
    lse, delta, last = (rows[:, :, i] for i in range(3))
    lse, delta = (
        _of_pieces(x.view(jnp.float32).reshape(*x.shape[:2], -1, G), work)[0][..., None]
        for x in (lse, delta)
    )
    q, d_out = (_operands(x, work) for x in (q, d_out))
    k, v = (_keys(x, work) for x in (k, v))
    s = _product("kngrhd,knzd->kngrhz", q, k) * scale
    p = jnp.where(_seen(last, work), jnp.exp(s + lse / np.log2(np.e)), 0.0)
    d_s = p * (_product("kngrhd,knzd->kngrhz", d_out, v) - delta)
    d_k, d_v = (_product("kngrhz,kngrhd->knzd", *x) for x in ((d_s, q), (p, d_out)))
    exists = work.groups[..., None, None, None] > 0
    parts = jnp.where(exists, jnp.stack([d_k, d_v], axis=2), jnp.nan)
    d_q = _product("kngrhz,knzd->kngrhd", d_s, k)
    return _spread(d_q, work, queries), parts


def _add(parts, starts, counts):
    number = jnp.arange(parts.shape[1])
    own = (number >= starts[..., None]) & (number < (starts + counts)[..., None])  # [K, P, n]
    found = jnp.where(own[..., None, None, None], parts[:, None], 0.0)
    return jnp.sum(found, axis=2).transpose(2, 1, 3, 0, 4)


@pytest.fixture
def kernels_in_jnp(monkeypatch):
    monkeypatch.setattr(training.training_forward, "attend", _attend)
    monkeypatch.setattr(training.training_backward, "differentiate", _differentiate)
    monkeypatch.setattr(training.piece_sums, "add", _add)
    monkeypatch.setattr(training.slots, "merge", pairs.merge_slots)


def _values_and_gradients(implementation, arrays, rest):
    """(out, lse) and the gradients of a sum of both that weighs every element differently."""
    rng = np.random.default_rng(9)
    shape = arrays[0].shape
    weights = rng.standard_normal(shape), rng.standard_normal(shape[:-1])

    def loss(q, k, v):
        out, lse = implementation(q, Blocks(k), Blocks(v), *rest, scale=SCALE)
        seen = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(out * weights[0]) + jnp.sum(seen * weights[1]), (out, lse)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, results), gradients = run(*arrays)
    return *results, *gradients


def test_values_and_gradients_are_the_references(monkeypatch, kernels_in_jnp):
    """In chunks of 28 queries of 140, and pieces of 5 groups."""
    monkeypatch.setattr(training, "_MAX_PARTIAL", 33 * K * C * G * 128 * 2)
    monkeypatch.setattr(pieces, "GROUPS", 5)
    arrays, rest = _inputs()
    actual = _values_and_gradients(training.sparse_attention, arrays, rest)
    expected = _values_and_gradients(reference.sparse_attention, arrays, rest)
    for one, wanted in zip(actual, expected, strict=True):
        assert_close(one, wanted, "f32")
