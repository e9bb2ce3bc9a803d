"""route: the reference's law, and its kernels' lanes in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.route import choice, gate, mosaic, reference, route
from tests.numerics import assert_close
from tests.ops.emulated_lanes import Ref
from tests.ops.lane_emulator import launch

BF16, E = ml_dtypes.bfloat16, 128


def _inputs(rng, rows, columns):
    x = rng.standard_normal((rows, columns)).astype(BF16)
    weight = rng.standard_normal((E, columns)).astype(np.float32) / np.float32(columns**0.5)
    return x, weight, rng.standard_normal(E).astype(np.float32) * np.float32(0.1)


def test_a_gate_is_exactly_its_three_parts():
    weight = _inputs(np.random.default_rng(0), 1, 256)[1]
    parts = [np.asarray(one, np.float64) for one in jax.jit(gate.splits)(weight)]
    assert_close(np.sum(parts, 0), weight.astype(np.float64), "exact")


@pytest.mark.parametrize("rows", [1, 9])
def test_lanes_multiply_in_float32(monkeypatch, rows):
    x, weight, _ = _inputs(np.random.default_rng(rows), rows, 192)
    logits = np.full((3, rows, E), np.nan, np.float32)
    for team in (0, 1):  # each writes its own 64 experts, from rows that the test has laid out
        operand = np.full((-(-rows // 8) * 8, 64), np.nan, BF16)
        half = weight[64 * team : 64 * team + 64]
        out = np.full((3, rows, 64), np.nan, np.float32)
        kernel = partial(gate._program, len(operand))
        launch(monkeypatch, (gate,), 3, kernel, Ref(x), Ref(half), Ref(out), Ref(operand))
        logits[..., 64 * team : 64 * team + 64] = out
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert_close(logits.sum(0), expected, "f32")


@pytest.mark.parametrize("kind", ["normal", "equal", "few values"])
def test_lanes_choose_as_the_reference(monkeypatch, kind):
    rng, rows, count = np.random.default_rng(1), 6, 4
    logits = {
        "normal": rng.standard_normal((2, rows, E)),
        "equal": np.zeros((2, rows, E)),
        "few values": rng.integers(-1, 2, (2, rows, E)),
    }[kind].astype(np.float32)
    bias = np.where(rng.random(E) < 0.5, 0, 0.25).astype(np.float32)
    experts = np.full((rows, count), -1, np.int32)
    weights = np.full((rows, count), np.nan, np.float32)
    refs = [Ref(one) for one in (logits, bias, experts, weights)]
    launch(monkeypatch, (choice,), 2, partial(choice._program, count, 2.0), *refs)
    scores = jax.nn.sigmoid(jnp.asarray(logits.sum(0)))
    _, expected = jax.lax.top_k(scores + bias, count)
    assert experts.tolist() == expected.tolist()
    assert_close(weights, np.asarray(reference.mixing(scores, expected, 2.0)), "f32")


@pytest.mark.parametrize("rows", [1, 128, 129])
def test_it_lowers(rows):
    def both(x, weight, bias):
        options = {"count": 4, "scale": 2.0, "one_device": True}
        return mosaic.route(x, weight, bias, **options)

    shapes = ((rows, 6144), jnp.bfloat16), ((E, 6144), jnp.float32), ((E,), jnp.float32)
    traced = jax.jit(both).trace(*[jax.ShapeDtypeStruct(*one) for one in shapes])
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_gradient_reaches_x_through_the_weights():
    """The kernel's own backward pass is the reference's, which is differentiated here."""
    rng = np.random.default_rng(2)
    x, weight, bias = (jnp.asarray(one, jnp.float32) for one in _inputs(rng, 3, 64))
    upstream = rng.standard_normal((3, 4)).astype(np.float32)

    def loss(x):
        return jnp.sum(route(x, weight, bias, count=4, scale=2.0)[1] * upstream)

    experts, _ = route(x, weight, bias, count=4, scale=2.0)
    gradients = (np.zeros(experts.shape, jax.dtypes.float0), jnp.asarray(upstream))
    found = mosaic._backward(4, 2.0, (x, weight, experts), gradients)[0]
    assert_close(found, jax.grad(loss)(x), "f32")
