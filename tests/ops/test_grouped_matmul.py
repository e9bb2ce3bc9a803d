"""grouped_matmul against a loop over rows in float64; its cost follows the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, reference
from tests.numerics import assert_close
from tests.ops.test_scaled_matmul import FORMATS, stored

M, E, D, F = 37, 5, 64, 24
GROUPS = {
    "one_group": [37, 0, 0, 0, 0],
    "only_the_last": [0, 0, 0, 0, 37],
    "empty_between": [1, 0, 35, 0, 1],
    "uneven": [3, 17, 9, 8, 0],
    "whole_tiles": [8, 8, 8, 8, 5],
}
_matmul = jax.jit(grouped_matmul, static_argnames=("out_dtype", "implementation"))
each = pytest.mark.parametrize("name", ["reference"])  # tests/gpu has the others
each_grouping = pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _expert_of(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


def _expected(x, values, sizes):
    x = np.asarray(x).astype(np.float64)
    return np.stack([row @ values[e].T for row, e in zip(x, _expert_of(sizes), strict=True)])


@each
@each_grouping
def test_each_row_meets_its_own_groups_matrix(name, sizes):
    x, weights = _normal(M, D), _normal(E, F, D, seed=1)
    found = _matmul(x, weights, jnp.array(sizes), implementation=name)
    assert found.dtype == jnp.float32
    assert_close(found, _expected(x, weights.astype(np.float64), sizes), "f32")


@each
@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_may_be_stored_in_any_format(name, fmt):
    weights, values = stored(_normal(E, F, D, seed=1), fmt)
    x, sizes = _normal(M, D), GROUPS["uneven"]
    found = _matmul(x, weights, jnp.array(sizes), implementation=name)
    assert_close(found, _expected(x, values, sizes), "f32")


@each
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_bfloat16_rows_are_summed_in_float32(name, fmt):
    weights, values = stored(_normal(E, F, D, seed=1), fmt)
    x, sizes = jnp.asarray(_normal(M, D), jnp.bfloat16), GROUPS["uneven"]
    found = _matmul(x, weights, jnp.array(sizes), implementation=name)
    assert_close(found, _expected(x, values, sizes), "f32")


@each
def test_an_experts_outer_scale_of_four_makes_its_rows_four_times_as_large(name):
    weights, _ = stored(_normal(E, F, D, seed=1), "nvfp4")
    sizes = GROUPS["uneven"]
    x, expert = _normal(M, D), _expert_of(sizes)
    scaled = type(weights)(weights.codes, weights.scales, weights.outer.at[1].multiply(4))
    before, after = (
        np.asarray(_matmul(x, w, jnp.array(sizes), implementation=name)) for w in (weights, scaled)
    )
    assert_close(after, np.where(expert == 1, 4, 1).astype(np.float32)[:, None] * before, "exact")


@each
@pytest.mark.parametrize(("rows", "groups"), [(1, 5), (3, 64), (300, 2), (129, 1)])
def test_any_number_of_rows_and_groups(name, rows, groups):
    rng = np.random.default_rng(rows)
    sizes = rng.multinomial(rows, np.ones(groups) / groups)
    x, weights = _normal(rows, 16), _normal(groups, 8, 16, seed=1)
    found = _matmul(x, weights, jnp.asarray(sizes), implementation=name)
    assert_close(found, _expected(x, weights.astype(np.float64), sizes), "f32")


@each
def test_rows_past_the_last_group_leave_the_others_as_they_are(name):
    sizes = [3, 0, 9, 8, 5]
    x, weights = _normal(M, D), _normal(E, F, D, seed=1)
    x[25:] = np.nan
    found = np.asarray(_matmul(x, weights, jnp.array(sizes), implementation=name))[:25]
    assert_close(found, _expected(x[:25], weights.astype(np.float64), sizes), "f32")


@each
@each_grouping
def test_gradients_of_rows_and_weights_stay_in_their_group(name, sizes):
    x, weights = _normal(M, D), _normal(E, F, D, seed=1)
    upstream, expert = _normal(M, F, seed=2), _expert_of(sizes)
    dx, dw = _gradients(x, weights, jnp.array(sizes), upstream, name)
    expected_dx = np.stack([u @ weights[e] for u, e in zip(upstream, expert, strict=True)])
    expected_dw = np.zeros(weights.shape)
    for u, row, e in zip(upstream, x, expert, strict=True):
        expected_dw[e] += np.outer(u, row)
    assert_close(dx, expected_dx, "f32")
    assert_close(dw, expected_dw, "f32")


@pytest.mark.parametrize(("fmt", "dtype"), [("nvfp4", jnp.float32), ("mxfp8", jnp.bfloat16)])
def test_the_kernels_gradient_of_rows_is_that_of_the_reference(fmt, dtype):
    """With more tiles than are expanded at a time, and rows past the last group."""
    rows, groups = 300, 40
    weights, values = stored(_normal(groups, F, D, seed=1), fmt)
    upstream, sizes = _normal(rows, F, seed=2), np.full(groups, 7)
    upstream[280:] = np.nan
    run = jax.jit(reference.gradient_of_rows, static_argnums=3)
    found = run(upstream, weights, jnp.array(sizes), dtype)
    expert = _expert_of(sizes)
    expected = [u @ values[e] for u, e in zip(upstream.astype(dtype), expert, strict=False)]
    assert found.dtype == dtype and not np.asarray(found[280:]).any()
    kind = "f32" if dtype == jnp.float32 else "bf16"
    assert_close(np.asarray(found[:280], np.float32), np.stack(expected), kind)


def _loss(x, weights, sizes, upstream, name):
    return jnp.sum(grouped_matmul(x, weights, sizes, implementation=name) * upstream)


_gradients = jax.jit(jax.grad(_loss, argnums=(0, 1)), static_argnums=(4,))


def _flops(rows, groups, width=64):
    shape = jax.ShapeDtypeStruct
    program = jax.jit(lambda x, w, s: grouped_matmul(x, w, s, implementation="reference")).lower(
        shape((rows, width), jnp.float32),
        shape((groups, width, width), jnp.float32),
        shape((groups,), jnp.int32),
    )
    return program.compile().cost_analysis()["flops"] / (2 * width * width)


def test_cost_follows_the_rows_and_not_rows_times_experts():
    few, many = _flops(64, 4), _flops(64, 64)
    assert 64 <= few < 64 * 4  # every row once, and the padding of tiles
    assert many < 5 * few and many < 64 * 64 / 6


def test_many_rows_cost_little_more_than_one_product_each():
    assert _flops(4096, 16) < 1.6 * 4096
