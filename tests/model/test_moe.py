"""The router and the mixture of experts against loops over tokens in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.parts import MoEConfig
from configs.presets import tiny
from minimax_jax.lora import LowRank
from minimax_jax.moe import MoE, Router
from pallas_kernels.layouts import mxfp8, nvfp4
from tests.numerics import assert_close

D, F, E, X, T = 32, 64, 6, 2, 23
SHAPE = MoEConfig(num_experts=E, experts_per_token=X, expert_dim=F, shared_dim=32)
CONFIG = replace(tiny(), hidden_size=D, moe=SHAPE)
FORMATS = {"f32": jnp.asarray, "mxfp8": jax.jit(mxfp8.quantize), "nvfp4": jax.jit(nvfp4.quantize)}


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _router(experts=E, chosen=X):
    shape = replace(SHAPE, num_experts=experts, experts_per_token=chosen)
    return Router(D, shape, nnx.Rngs(0))


def _with_equal_logits(bias, chosen):
    router = _router(len(bias), chosen)
    router.weight.set_value(jnp.zeros((len(bias), D)))
    router.bias.set_value(jnp.asarray(bias, jnp.float32))
    return router


# ---- router


def test_the_best_biased_scores_are_chosen_and_weighted_without_the_bias():
    router, x = _router(), _normal(T, D)
    bias = 0.3 * _normal(E, seed=1)
    router.bias.set_value(jnp.asarray(bias))
    experts, weights = router(jnp.asarray(x))
    scores = 1 / (1 + np.exp(-x @ np.asarray(router.weight.get_value(), np.float64).T))
    for t in range(T):
        chosen = sorted(range(E), key=lambda e: -(scores[t, e] + bias[e]))[:X]
        assert experts[t].tolist() == chosen
        assert_close(weights[t], 2 * scores[t, chosen] / scores[t, chosen].sum(), "f32")


def test_biases_that_differ_in_float32_only_decide():
    """F93."""
    router = _with_equal_logits([7.000, 7.004, 7.008, 7.012], 2)
    experts, _ = router(jnp.asarray(_normal(T, D), jnp.bfloat16))
    assert (np.asarray(experts) == [3, 2]).all()


def test_weight_and_bias_of_the_router_are_float32():
    router = MoE(CONFIG, nnx.Rngs(0)).router
    assert router.weight.get_value().dtype == router.bias.get_value().dtype == jnp.float32


def test_the_bias_changes_the_choice_and_not_the_weights():
    """F94: its weights are those of the scores alone."""
    router = _with_equal_logits([0, 5, 0, 0], 2)
    experts, weights = router(jnp.asarray(_normal(T, D)))
    assert (np.asarray(experts) == [1, 0]).all()
    assert_close(weights, np.ones((T, 2)), "f32")  # a half each, times the scale of 2


def test_equal_scores_go_to_the_lower_expert():
    experts, _ = _with_equal_logits([0.0] * 8, 4)(jnp.asarray(_normal(T, D)))
    assert (np.asarray(experts) == [0, 1, 2, 3]).all()


def test_bfloat16_rows_are_routed_in_float32():
    router = _router(16, 4)
    x = jnp.asarray(_normal(T, D), jnp.bfloat16)
    experts, weights = router(x)
    expected_experts, expected_weights = router(x.astype(jnp.float32))
    assert weights.dtype == jnp.float32
    assert_close(experts, expected_experts, "exact")
    assert_close(weights, expected_weights, "exact")


def test_scores_that_underflow_still_give_finite_weights():
    router = _router()
    router.weight.set_value(jnp.full((E, D), -10.0))
    _, weights = router(jnp.ones((1, D)))  # sigmoid(-320) is 0 in float32
    assert np.isfinite(np.asarray(weights)).all()


# ---- experts


def _swiglu(gate, up):
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    return g / (1 + np.exp(-1.702 * g)) * (u + 1)


_dequantize = jax.jit(lambda weight: weight.dequantize())


def _values(weight):
    values = weight.get_value()
    return np.asarray(values if isinstance(values, jax.Array) else _dequantize(values), np.float64)


def _expected(moe, x):
    """Token by token, with the router's own choice."""
    experts, weights = (np.asarray(a) for a in moe.router(jnp.asarray(x)))
    w1, w3, w2 = (_values(m.weight) for m in (moe.experts.w1, moe.experts.w3, moe.experts.w2))
    s = moe.shared
    s1, s3, s2 = (_values(m.weight) for m in (s.gate_proj, s.up_proj, s.down_proj))
    out = np.zeros(x.shape)
    for t, z in enumerate(x.astype(np.float64)):
        out[t] = s2 @ _swiglu(s1 @ z, s3 @ z)
        for e, weight in zip(experts[t], weights[t], strict=True):
            out[t] += weight * (w2[e] @ _swiglu(w1[e] @ z, w3[e] @ z))
    return out


def _run(moe, x, adapter=None):
    return jax.jit(lambda x: moe(x, adapter))(x)


def _quantized(fmt):
    moe = MoE(CONFIG, nnx.Rngs(0))
    for linear in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
        linear.weight.set_value(FORMATS[fmt](linear.weight.get_value()))
    return moe


@pytest.mark.parametrize("fmt", FORMATS)
def test_routed_and_shared_experts_follow_float64(fmt):
    moe, x = _quantized(fmt), 3 * _normal(T, D)
    assert_close(_run(moe, x), _expected(moe, x), "f32")


def test_tiles_of_rows_give_the_rows_results():
    moe, x = MoE(CONFIG, nnx.Rngs(0)), jnp.asarray(_normal(T, D))
    tiles = _run(moe, x[: T - 1].reshape(2, (T - 1) // 2, D))
    assert_close(tiles.reshape(T - 1, D), _run(moe, x)[: T - 1], "f32")


def test_the_routed_scale_does_not_touch_the_shared_expert():
    moe, x = MoE(CONFIG, nnx.Rngs(0)), jnp.asarray(_normal(T, D))
    shared = moe.shared(x)
    moe.router.config = replace(SHAPE, routed_scale=4.0)
    doubled = _run(moe, x)
    moe.router.config = SHAPE
    assert_close(doubled - shared, 2 * (_run(moe, x) - shared), "f32")


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_clamp_acts_on_the_values_of_every_stored_format(fmt):
    """F96."""
    # gate 10 and up -10 in every expert: 64 times -41.9997, weights that sum to 2, no shared part
    moe = MoE(CONFIG, nnx.Rngs(0))
    parts = ((moe.experts.w1, 0.5), (moe.experts.w3, -0.5), (moe.experts.w2, 1.0))
    for linear, value in parts:
        linear.weight.set_value(FORMATS[fmt](jnp.full(linear.weight.get_value().shape, value)))
    moe.shared.down_proj.weight.set_value(jnp.zeros((D, 32)))
    found = _run(moe, jnp.full((1, D), 20 / D))
    np.testing.assert_allclose(found, np.full((1, D), 2 * 64 * -41.9997), rtol=1e-4)


def test_w1_is_the_gate_and_w3_the_up_projection():
    """F98."""
    moe = MoE(CONFIG, nnx.Rngs(0))
    moe.experts.w1.weight.set_value(jnp.full((E, F, D), -10 / D))
    moe.experts.w3.weight.set_value(jnp.full((E, F, D), 10 / D))
    moe.experts.w2.weight.set_value(jnp.ones((E, D, F)))
    moe.shared.down_proj.weight.set_value(jnp.zeros((D, 32)))
    found = _run(moe, jnp.ones((1, D)))
    np.testing.assert_allclose(found, np.full((1, D), 2 * 64 * -3.2464e-6), rtol=1e-3)


def test_an_experts_adapter_acts_on_its_own_tokens_only():
    moe, x = MoE(CONFIG, nnx.Rngs(0)), jnp.asarray(_normal(T, D))
    a = jnp.asarray(_normal(E, 4, F, seed=1))
    b = jnp.zeros((E, D, 4)).at[1].set(jnp.asarray(_normal(D, 4, seed=2)))
    adapter = {"experts": {"w2": LowRank(a=a, b=b, scale=1.0)}}
    changed = np.asarray(_run(moe, x, adapter) != _run(moe, x)).any(-1)
    routed = (np.asarray(moe.router(x)[0]) == 1).any(-1)
    assert routed.any() and not routed.all()
    assert (changed == routed).all()


def test_a_matrix_that_experts_share_is_as_good_as_one_for_each():
    moe, x = MoE(CONFIG, nnx.Rngs(0)), jnp.asarray(_normal(T, D))
    shared, own = jnp.asarray(_normal(1, 4, D, seed=1)), jnp.asarray(_normal(E, F, 4, seed=2))

    def loss(shared, repeats):
        pair = LowRank(a=jnp.repeat(shared, repeats, axis=0), b=own, scale=0.5)
        other = LowRank(
            a=own.swapaxes(1, 2), b=jnp.repeat(shared, repeats, axis=0).swapaxes(1, 2), scale=0.5
        )
        return jnp.sum(_run(moe, x, {"experts": {"w1": pair, "w2": other}}) ** 2)

    found, expected = (jax.value_and_grad(loss)(shared, n) for n in (1, E))
    assert_close(found[0], expected[0], "f32")
    assert_close(found[1], expected[1], "f32")


def test_the_gradient_reaches_router_experts_and_shared_expert():
    moe, x = MoE(CONFIG, nnx.Rngs(0)), jnp.asarray(_normal(T, D))
    graph, state = nnx.split(moe)
    gradients = jax.jit(jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(x) ** 2)))(state)
    norms = {
        "/".join(str(k) for k in path): float(jnp.linalg.norm(leaf.get_value()))
        for path, leaf in nnx.to_flat_state(gradients)
    }
    assert norms.pop("router/bias") == 0  # the bias takes part in the choice only
    assert len(norms) == 7 and all(norm > 0 for norm in norms.values())
