"""window_attention against loops in float64: which keys each draft query sees, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pool import Component
from pallas_kernels.window_attention import TABLE, window_attention
from tests.numerics import assert_close
from tests.ops.oracles import as_source, attend, portable, scattered, stored, temporary_share

Z, K, G, H, T = 16, 2, 2, 32, 5
N, P = K * G, 8
S = P * Z
WINDOW, SCALE = 40, H**-0.5
# No context, around block edges, around the window, with the block at the table's end.
LENGTHS = np.array([0, 1, 15, 16, 17, 36, 39, 40, 41, 47, 48, 49, 100, S - T, S], np.int32)
B = len(LENGTHS)

_attend = jax.jit(window_attention, static_argnames=("window", "scale", "implementation"))
each = pytest.mark.parametrize("name", portable(TABLE))


def _normal(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _inputs():
    """q [B, T, N, H]; context k, v [B, S, K, H]; the block's own k, v [B, T, K, H]."""
    context = [_normal(B, S, K, H, seed=seed) for seed in (1, 2)]
    return [_normal(B, T, N, H, seed=0), *context, *(_normal(B, T, K, H, seed=s) for s in (3, 4))]


def _run(inputs, name, lengths=LENGTHS, kind="f32", window=WINDOW):
    q, k, v, block_k, block_v = inputs
    (rows_k, table), (rows_v, _) = scattered(k, Z), scattered(v, Z)
    return _attend(
        q,
        as_source(rows_k, kind),
        as_source(rows_v, kind),
        block_k,
        block_v,
        table,
        lengths,
        window=window,
        scale=SCALE,
        implementation=name,
    )


def _expected(inputs, lengths=LENGTHS, window=WINDOW):
    q, k, v, block_k, block_v = inputs
    out = np.zeros(q.shape)
    for b, i, n in np.ndindex(B, T, N):
        head, length = n // G, lengths[b]
        seen = [j for j in range(S) if length + i - window < j < length]
        keys = np.concatenate([k[b, seen, head], block_k[b, :, head]])
        values = np.concatenate([v[b, seen, head], block_v[b, :, head]])
        out[b, i, n], _ = attend(q[b, i, n], keys, values, SCALE)
    return out


@each
@pytest.mark.parametrize("kind", ["blocks", "f32", "bf16", "fp8", "nvfp4"])
def test_a_query_sees_its_window_and_its_whole_block(name, kind):
    q, k, v, *own = _inputs()
    expected = _expected([q, stored(k, kind), stored(v, kind), *own])
    assert_close(_run([q, k, v, *own], name, kind=kind), expected, "f32")


@each
@pytest.mark.parametrize("window", [1, 3, Z, Z + 1, 2 * Z, S, 4 * S])
def test_the_window_may_have_any_width(name, window):
    inputs = _inputs()
    assert_close(_run(inputs, name, window=window), _expected(inputs, window=window), "f32")


@each
def test_the_left_edge_moves_with_each_query(name):
    inputs = _inputs()
    before = np.asarray(_run(inputs, name))
    b, length = 12, 100
    for i in range(T):
        moved = [x.copy() for x in inputs]
        moved[1][b, length + i - WINDOW + 1] += 5  # the oldest key that query i sees
        changed = (np.asarray(_run(moved, name)) != before).any(axis=(2, 3))
        assert changed[b].tolist() == [j <= i for j in range(T)]
        assert not np.delete(changed, b, axis=0).any()


@each
def test_the_first_query_sees_the_last_key_of_its_block(name):
    inputs = _inputs()
    before = np.asarray(_run(inputs, name))
    inputs[3][:, -1] += 1
    assert (np.asarray(_run(inputs, name))[:, 0] != before[:, 0]).any(axis=(1, 2)).all()


@each
def test_pages_from_the_length_on_are_never_read(name):
    inputs = _inputs()
    before = _run(inputs, name)
    for b, length in enumerate(LENGTHS):
        inputs[1][b, length:], inputs[2][b, length:] = np.nan, np.nan
    assert_close(_run(inputs, name), before, "exact")


@each
def test_pages_left_of_the_window_are_never_read(name):
    inputs = _inputs()
    before = _run(inputs, name)
    for b, length in enumerate(LENGTHS):
        left = max(length - WINDOW + 1, 0)
        inputs[1][b, :left], inputs[2][b, :left] = np.nan, np.nan
    assert_close(_run(inputs, name), before, "exact")


@each
def test_one_everywhere_in_the_values_gives_one(name):
    inputs = _inputs()
    inputs[2], inputs[4] = np.ones_like(inputs[2]), np.ones_like(inputs[4])
    assert_close(_run(inputs, name), np.ones((B, T, N, H)), "f32")


@each
def test_a_padding_tile_sees_its_own_block_only(name):
    inputs = _inputs()
    lengths = np.where(np.arange(B) % 2, -1, LENGTHS).astype(np.int32)
    assert_close(_run(inputs, name, lengths), _expected(inputs, lengths), "f32")


@each
def test_another_sequence_changes_nothing(name):
    inputs = _inputs()
    before = _run(inputs, name)
    for x in inputs[1:]:
        x[7] = np.nan
    others = np.arange(B) != 7
    assert_close(np.asarray(_run(inputs, name))[others], np.asarray(before)[others], "exact")


@each
def test_the_output_has_the_dtype_of_the_queries(name):
    inputs = _inputs()
    inputs[0] = jnp.asarray(inputs[0], jnp.bfloat16)
    out = _run(inputs, name)
    inputs[0] = np.asarray(inputs[0], np.float32)
    assert out.dtype == jnp.bfloat16
    assert_close(out, _expected(inputs), "bf16")


@each
def test_reading_the_window_does_not_copy_the_pool(name):
    q, own = jnp.ones((1, T, N, H)), jnp.ones((1, T, K, H))
    table, length = jnp.arange(P)[None], jnp.array([100])
    options = {"window": WINDOW, "scale": SCALE, "implementation": name}
    share = temporary_share(
        lambda pages: window_attention(q, pages, pages, own, own, table, length, **options),
        Component(format="fp8", heads=K, tokens=Z, width=H),
    )
    assert share < 0.05
