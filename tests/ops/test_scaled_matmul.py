"""scaled_matmul against float64 products of the values that the stored bytes stand for."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layouts import mxfp8, nvfp4
from pallas_kernels.scaled_matmul import TABLE, expanded, scaled_matmul
from tests.numerics import assert_close

T, D, F = 5, 64, 48
_matmul = jax.jit(scaled_matmul, static_argnames=("out_dtype", "implementation"))
_quantize_mxfp8, _quantize_nvfp4 = jax.jit(mxfp8.quantize), jax.jit(nvfp4.quantize)
# What runs on every platform; the others are in `test_few_rows` and `tests/gpu`.
each = pytest.mark.parametrize("name", [TABLE[-1].name])
FORMATS = ["f32", "bf16", "mxfp8", "nvfp4"]


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def stored(values, fmt):
    """A weight in a format, and its values in float64 by ml_dtypes' tables."""
    values = jnp.asarray(values)
    if fmt == "mxfp8":
        weight = _quantize_mxfp8(values)
        elements = np.asarray(weight.codes).astype(np.float64)
        powers = 2.0 ** (np.asarray(weight.exponents).astype(np.float64) - 127)
        return weight, elements * np.repeat(powers, 32, axis=-1)
    if fmt == "nvfp4":
        weight = _quantize_nvfp4(values)
        packed = np.asarray(weight.codes)
        nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(values.shape)
        elements = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        scales = np.asarray(weight.scales).astype(np.float64)
        outer = np.asarray(weight.outer, np.float64)[..., None, None]
        return weight, elements * np.repeat(scales, 16, axis=-1) * outer
    weight = values.astype({"f32": jnp.float32, "bf16": jnp.bfloat16}[fmt])
    return weight, np.asarray(weight).astype(np.float64)


@each
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_multiplied_by_the_stored_values(name, fmt):
    weight, values = stored(_normal(F, D, seed=1), fmt)
    x = _normal(2, T, D)
    found = _matmul(x, weight, implementation=name)
    assert found.dtype == jnp.float32
    assert_close(found, x.astype(np.float64) @ values.T, "f32")


@each
@pytest.mark.parametrize("fmt", ["f32", "bf16", "mxfp8"])
def test_bfloat16_rows_are_summed_in_float32(name, fmt):
    weight, values = stored(_normal(F, D, seed=1), fmt)
    x = jnp.asarray(_normal(T, D), jnp.bfloat16)
    found = _matmul(x, weight, implementation=name)
    values = values.astype(ml_dtypes.bfloat16).astype(np.float64)  # exact but for a float32 weight
    assert_close(found, np.asarray(x).astype(np.float64) @ values.T, "f32")


@each
def test_the_sum_is_rounded_once_to_the_asked_dtype(name):
    weight, _ = stored(_normal(F, D, seed=1), "mxfp8")
    x = jnp.asarray(_normal(T, D), jnp.bfloat16)
    exact = _matmul(x, weight, implementation=name)
    found = _matmul(x, weight, out_dtype=jnp.bfloat16, implementation=name)
    assert_close(found, exact.astype(jnp.bfloat16), "exact")


@each
def test_an_outer_scale_of_four_is_exactly_four_times_the_product(name):
    weight, _ = stored(_normal(F, D, seed=1), "nvfp4")
    x = _normal(T, D)
    one, four = (nvfp4.from_decode_scale(weight.codes, weight.scales, s) for s in (1.0, 4.0))
    assert_close(_matmul(x, four, implementation=name), 4 * _matmul(x, one), "exact")


@each
def test_both_conventions_of_the_outer_scale_give_one_product(name):
    weight, _ = stored(_normal(F, D, seed=1), "nvfp4")
    x = _normal(T, D)
    multiplies = nvfp4.from_decode_scale(weight.codes, weight.scales, 1 / 512)
    divides = nvfp4.from_encode_scale(weight.codes, weight.scales, 512.0)
    first, second = (_matmul(x, w, implementation=name) for w in (multiplies, divides))
    assert_close(first, second, "exact")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_the_expanded_product_is_the_references(fmt, out_dtype):
    weight, _ = stored(_normal(F, D, seed=1), fmt)
    x = jnp.asarray(_normal(T, D), jnp.bfloat16)
    options = {"out_dtype": jnp.dtype(out_dtype), "one_device": True}
    found = expanded.scaled_matmuls(x, [weight, weight], **options)[1]
    assert_close(found, _matmul(x, weight, out_dtype=out_dtype), "exact")


@each
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gradient_of_the_rows_is_the_product_with_the_weight(name, fmt):
    weight, values = stored(_normal(F, D, seed=1), fmt)
    x, upstream = jnp.asarray(_normal(T, D)), _normal(T, F, seed=2)

    def loss(x, weight):
        return jnp.sum(scaled_matmul(x, weight, implementation=name) * upstream)

    gradient = jax.jit(jax.grad(loss))(x, weight)
    assert_close(gradient, upstream.astype(np.float64) @ values, "f32")


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_the_expanded_product_passes_back_stays_in_16_bits(fmt):
    """Within its rounding it is the reference's; a plain weight has a gradient as well."""
    weight, values = stored(_normal(F, D, seed=1), fmt)
    x, upstream = jnp.asarray(_normal(T, D), jnp.bfloat16), _normal(T, F, seed=2)

    def loss(x, weight):
        options = {"out_dtype": jnp.dtype(jnp.float32), "one_device": True}
        return jnp.sum(expanded.scaled_matmuls(x, [weight], **options)[0] * upstream)

    text = jax.jit(jax.grad(loss)).lower(x, weight).as_text()
    products = re.findall(r"dot_general .* : \((.*)\) ->", text)
    assert products and all(one.count("xbf16>") == 2 for one in products)
    assert_close(jax.grad(loss)(x, weight), upstream.astype(np.float64) @ values, "bf16")
    if isinstance(weight, jax.Array):
        of_weight = jax.grad(loss, argnums=1)(x, weight)
        assert of_weight.dtype == weight.dtype
        assert_close(of_weight, upstream.astype(np.float64).T @ np.asarray(x, np.float64), "bf16")
