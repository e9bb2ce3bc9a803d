"""route on the GPU: the experts and weights of float64, up to ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.route import route
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu

E, D, COUNT = 128, 6144, 4
_route = jax.jit(route, static_argnames=("count", "scale", "implementation"))


def _inputs(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, D)), jnp.bfloat16)
    gate = rng.standard_normal((E, D)).astype(np.float32) * np.float32(D**-0.5)
    return x, jnp.asarray(gate), jnp.asarray(rng.standard_normal(E).astype(np.float32) * 0.1)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 33, 127, 128, 129, 1000])
def test_experts_and_weights_are_those_of_float64(rows):
    x, gate, bias = _inputs(rows, rows)
    experts, weights = _route(x, gate, bias, count=COUNT, scale=2.0, implementation="mosaic")
    logits = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    scores = 1 / (1 + np.exp(-logits))
    biased = scores + np.asarray(bias, np.float64)
    order = np.argsort(-biased, axis=1, kind="stable")
    gaps = -np.diff(np.take_along_axis(biased, order, 1)[:, : COUNT + 1], axis=1)
    decided = gaps.min(1) > 1e-6  # what float32 cannot tell apart may come in either order
    assert decided.mean() > 0.9
    assert (np.asarray(experts)[decided] == order[decided, :COUNT]).all()
    chosen = np.take_along_axis(scores, np.asarray(experts), 1)
    expected = 2 * chosen / chosen.sum(1, keepdims=True)
    assert_close(np.asarray(weights, np.float64), expected, "f32")


def test_equal_scores_give_the_lower_ids():
    x, gate, _ = _inputs(5)
    experts, weights = _route(
        jnp.zeros_like(x), gate, jnp.zeros(E), count=COUNT, scale=2.0, implementation="mosaic"
    )
    assert experts.tolist() == [[0, 1, 2, 3]] * 5
    assert_close(weights, np.full((5, COUNT), 0.5, np.float32), "f32")


def test_a_row_has_the_same_bits_in_every_batch():
    x, gate, bias = _inputs(128)
    options = {"count": COUNT, "scale": 2.0, "implementation": "mosaic"}
    alone = _route(x[:1], gate, bias, **options)
    for rows in (2, 9, 33, 128):
        for one, among in zip(alone, _route(x[:rows], gate, bias, **options), strict=True):
            assert_close(among[:1], one, "exact")
