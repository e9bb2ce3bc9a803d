"""Linear, Gemma norm, SwiGLU-OAI and the dense MLP against float64 and numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.presets import tiny
from minimax_jax.attention import Attention
from minimax_jax.layers import MLP, GemmaNorm, Linear, activation
from minimax_jax.lora import LowRank
from pallas_kernels.grouped_matmul import swiglu
from pallas_kernels.layouts import mxfp8, nvfp4
from tests.numerics import assert_close
from tests.ops.oracles import gemma_norm

CONFIG = tiny().mlp
WEIGHT_FORMATS = {
    "f32": jnp.asarray,
    "mxfp8": jax.jit(mxfp8.quantize),
    "nvfp4": jax.jit(nvfp4.quantize),
}


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _swiglu(gate, up):
    gate, up = np.float64(gate), np.float64(up)
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    return g / (1 + np.exp(-1.702 * g)) * (u + 1)


# ---- norms


@pytest.mark.parametrize(("weight", "factor"), [(0.0, 1.0), (1.0, 2.0), (-1.0, 0.0)])
def test_a_norm_multiplies_by_one_plus_its_weight(weight, factor):
    """F182."""
    norm, x = GemmaNorm(48, 1e-6), _normal(5, 48)
    norm.weight.set_value(jnp.full(48, weight))
    expected = factor * x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5)


def test_a_norm_of_bfloat16_is_computed_in_float32_and_rounded_once():
    """F182."""
    norm, x = GemmaNorm(48, 1e-6), jnp.asarray(_normal(5, 48), jnp.bfloat16)
    norm.weight.set_value(jnp.asarray(_normal(48, seed=1)))
    found = norm(x)
    exact = gemma_norm(np.asarray(x).astype(np.float64), norm.weight.get_value(), 1e-6)
    assert_close(found, exact.astype(np.float32).astype(jnp.bfloat16), "exact")


def test_every_norm_of_attention_starts_centred_on_zero():
    """F182: q, k and index norms are of the same kind."""
    layer = Attention(tiny(), sparse=True, rngs=nnx.Rngs(0))
    norms = [layer.q_norm, layer.k_norm, layer.indexer.q_norm, layer.indexer.k_norm]
    assert all(not np.asarray(norm.weight.get_value()).any() for norm in norms)


def test_a_row_of_zeros_stays_zero():
    assert not np.asarray(GemmaNorm(8, 1e-6)(jnp.zeros((1, 8)))).any()


# ---- linear


def _linear(out_dim, in_dim):
    return Linear(out_dim, in_dim, ("mlp", "embed"), nnx.Rngs(0))


def test_a_linear_is_x_times_the_transposed_weight():
    linear, x = _linear(24, 32), _normal(2, 5, 32)
    weight = np.asarray(linear.weight.get_value(), np.float64)
    assert_close(linear(jnp.asarray(x)), x.astype(np.float64) @ weight.T, "f32")


def test_weights_start_with_a_variance_of_one_over_their_inputs():
    weight = np.asarray(_linear(512, 256).weight.get_value(), np.float64)
    assert abs(weight.var() * 256 - 1) < 0.02


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_an_adapter_adds_its_scaled_low_rank_product_in_the_type_of_x(dtype, tolerance):
    linear, x = _linear(24, 32), jnp.asarray(_normal(5, 32), dtype)
    a, b = _normal(4, 32, seed=1), _normal(24, 4, seed=2)
    adapter = LowRank(a=jnp.asarray(a), b=jnp.asarray(b), scale=0.5)
    x64, weight = np.asarray(x).astype(np.float64), linear.weight.get_value().astype(dtype)
    expected = x64 @ np.asarray(weight).astype(np.float64).T + 0.5 * x64 @ a.T @ b.T
    assert_close(linear.float32(x, adapter), expected, tolerance)
    assert_close(linear(x, adapter), linear.float32(x, adapter).astype(dtype), "exact")


# ---- SwiGLU-OAI

# (gate, up, y): gate clamped from above only, up on both sides; alpha 1.702, beta 1, limit 7
HAND_NUMBERS = [(10, -10, -41.9997), (-10, 10, -3.2464e-6), (10, 10, 55.99962), (0, 3, 0.0)]


@pytest.mark.parametrize(("gate", "up", "expected"), HAND_NUMBERS)
def test_swiglu_of_numbers_worked_by_hand(gate, up, expected):
    """F96, F98."""
    found = swiglu(jnp.float32([gate]), jnp.float32([up]), activation(CONFIG))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


def test_swiglu_follows_float64_and_keeps_the_dtype():
    gate, up = (jnp.asarray(5 * _normal(40, seed=s), jnp.bfloat16) for s in (0, 1))
    found = swiglu(gate, up, activation(CONFIG))
    expected = _swiglu(np.asarray(gate), np.asarray(up))
    assert_close(found, expected.astype(np.float32).astype(jnp.bfloat16), "exact")


def test_a_clamped_gate_has_no_gradient():
    slope = jax.grad(lambda g: swiglu(g[None], jnp.float32([1.0]), activation(CONFIG))[0])
    assert slope(jnp.float32(8)) == 0 and slope(jnp.float32(6)) > 0


# ---- MLP


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_the_clamp_acts_for_every_stored_format(fmt):
    """F96."""
    # every gate is 10 and every up -10: 64 outputs of -41.9997 are summed by a row of ones
    mlp = MLP(64, 64, CONFIG, nnx.Rngs(0))
    for linear, value in ((mlp.gate_proj, 0.5), (mlp.up_proj, -0.5), (mlp.down_proj, 1.0)):
        linear.weight.set_value(WEIGHT_FORMATS[fmt](jnp.full((64, 64), value)))
    x = jnp.full((1, 64), 20 / 64)
    np.testing.assert_allclose(
        jax.jit(lambda x: mlp(x))(x), np.full((1, 64), 64 * -41.9997), rtol=1e-4
    )


def test_gate_and_up_are_not_exchanged():
    """F98."""
    mlp = MLP(32, 32, CONFIG, nnx.Rngs(0))
    for linear, value in ((mlp.gate_proj, -10.0), (mlp.up_proj, 10.0), (mlp.down_proj, 1.0)):
        linear.weight.set_value(value * jnp.eye(32))
    np.testing.assert_allclose(mlp(jnp.ones((1, 32))), np.full((1, 32), -3.2464e-6), rtol=1e-3)


def test_the_mlp_follows_float64():
    mlp, x = MLP(48, 64, CONFIG, nnx.Rngs(1)), 6 * _normal(5, 48)
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    gate, up, down = (np.asarray(m.weight.get_value(), np.float64) for m in linears)
    expected = _swiglu(x @ gate.T, x @ up.T) @ down.T
    assert_close(mlp(jnp.asarray(x)), expected, "f32")
