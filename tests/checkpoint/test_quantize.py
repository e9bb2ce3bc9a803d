"""The policy of formats, and a model seen through one while it is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.checkpoint import parameters_of, save_model
from minimax_jax.quantize import (
    FORMATS,
    dequantize_model,
    fake_quantize_model,
    form_of,
    quantize_model,
)
from tests.checkpoint import files
from tests.checkpoint.files import assert_same, load, values_of
from tests.model.models import random_model

CONFIG = files.two_layers()


def wanted_form(path: str, name: str) -> str:
    """The table of the specification, once more."""
    if ".experts." in path:
        return {"m3.1": "nvfp4", "mxfp8": "mxfp8", "bf16": "plain"}[name]
    last = path.split(".")[-2] if "." in path else path
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return "mxfp8" if last in projections and name != "bf16" else "plain"


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_gets_the_form_of_its_kind(name):
    model = quantize_model(random_model(CONFIG), name)
    for path, parameter in parameters_of(model).items():
        weight = parameter.get_value()
        assert form_of(weight) == wanted_form(path, name), path
        if form_of(weight) == "plain":
            is_bf16 = name == "bf16" and ".router." not in path
            assert weight.dtype == (jnp.bfloat16 if is_bf16 else jnp.float32), path


def test_experts_have_an_outer_scale_for_each_matrix():
    model = quantize_model(random_model(CONFIG), "m3.1")
    for w in ("w1", "w2", "w3"):
        weight = parameters_of(model)[f"layers.1.mlp.experts.{w}.weight"].get_value()
        assert weight.outer.shape == (CONFIG.moe.num_experts,)
        assert len(set(np.asarray(weight.outer).tolist())) == CONFIG.moe.num_experts


@pytest.mark.parametrize("name", FORMATS[:2])
def test_training_sees_exactly_what_is_stored(name, tmp_path):
    model = random_model(CONFIG)
    seen = values_of(fake_quantize_model(model, name))
    assert_same(quantize_model(model, name), seen)
    save_model(quantize_model(model, name), tmp_path / "new")
    assert_same(load(tmp_path / "new"), seen)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_pass_straight_through(name):
    def loss(model):
        return sum(jnp.sum(w * i) for i, w in enumerate(jax.tree.leaves(model), start=1))

    model = random_model(CONFIG)
    through = jax.jit(jax.grad(lambda m: loss(fake_quantize_model(m, name))))(model)
    for i, gradient in enumerate(jax.tree.leaves(through), start=1):
        np.testing.assert_array_equal(gradient, np.full(gradient.shape, i, np.float32))


def test_a_quantised_model_becomes_plain_and_keeps_its_router():
    model = dequantize_model(quantize_model(random_model(CONFIG), "m3.1"), jnp.bfloat16)
    for path, parameter in parameters_of(model).items():
        is_router = ".router." in path
        assert parameter.get_value().dtype == (jnp.float32 if is_router else jnp.bfloat16)


def test_quantising_twice_changes_nothing():
    once = quantize_model(random_model(CONFIG), "m3.1")
    files.assert_identical(quantize_model(once, "m3.1"), once)
    files.assert_identical(fake_quantize_model(once, "m3.1"), once)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="format 'fp4' is not one of m3.1, mxfp8, bf16"):
        quantize_model(random_model(CONFIG), "fp4")
