"""MXFP8 bytes against an encoder of a few numpy lines, and every exponent byte by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layouts import mxfp8

# Compiled once a shape; the tests that take `transform` run each operation by itself too.
encode, decode = jax.jit(mxfp8.encode), jax.jit(mxfp8.decode)
quantize = jax.jit(mxfp8.quantize)

both_ways = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def _reference(x):
    """(codes, exponent bytes) of non-zero groups, the floor rule in float64 numpy."""
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    _, exponent = np.frexp(np.abs(groups).max(-1))  # amax = m * 2^exponent, m in [0.5, 1)
    exponents = np.clip(exponent - 1 - 8 + 127, 0, 254)
    scaled = np.clip(np.ldexp(groups, 127 - exponents[..., None]), -448, 448)
    codes = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(x.shape), exponents.astype(np.uint8)


def _assert_same_bytes(x, transform):
    codes, exponents = transform(mxfp8.encode)(jnp.asarray(x))
    expected_codes, expected_exponents = _reference(x)
    np.testing.assert_array_equal(np.asarray(exponents), expected_exponents)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), expected_codes.view(np.uint8))


def _many_magnitudes(shape, low=-100, high=120):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, dtype=np.float32)
    x[::3] = np.round(x[::3] * 8) / 8
    magnitude = 2.0 ** rng.integers(low, high, (*shape[:-1], shape[-1] // 32, 1))
    return (x.reshape(*shape[:-1], -1, 32) * magnitude).reshape(shape).astype(np.float32)


def _ones(exponents):
    """One group of ones for each exponent byte."""
    return jnp.full(32 * len(exponents), 1.0).astype(jnp.float8_e4m3fn), jnp.array(
        exponents, jnp.uint8
    )


@both_ways
def test_bytes_equal_the_plain_encoder_over_many_magnitudes(transform):
    _assert_same_bytes(_many_magnitudes((256, 256)), transform)


def test_the_exponent_changes_exactly_at_powers_of_two():
    powers = np.exp2(np.arange(-110, 127, dtype=np.float32))
    amax = np.stack([np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.inf)])
    _assert_same_bytes(np.repeat(amax.astype(np.float32)[..., None], 32, axis=-1), jax.jit)


def test_elements_between_448_and_512_of_their_binade_saturate():
    x = np.zeros(32, np.float32)
    x[:4] = [511, -511, 460, 448]
    codes, exponents = encode(jnp.asarray(x))
    assert np.asarray(exponents).tolist() == [127]
    assert np.asarray(codes).astype(np.float32)[:4].tolist() == [448, -448, 448, 448]


def test_the_largest_and_smallest_floats_have_exponents_246_and_0():
    x = np.repeat(np.array([np.finfo(np.float32).max, 1e-30, 2.0**-126], np.float32), 32)
    _, exponents = encode(jnp.asarray(x))
    assert np.asarray(exponents).tolist() == [246, 127 - 8 - 100, 0]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_group_has_exponent_0_and_decodes_to_zeros(zero):
    codes, exponents = encode(jnp.full((2, 32), zero))
    assert not np.asarray(exponents).any()
    assert not np.asarray(decode(codes, exponents)).any()


def test_tiny_and_huge_groups_keep_their_relative_precision():
    x = np.repeat(np.array([1e-8, 1e30, 1.0], np.float32), 32)
    values = np.asarray(decode(*encode(jnp.asarray(x))))
    np.testing.assert_allclose(values, x, rtol=1 / 8)


def test_a_nan_stays_nan_and_an_infinity_stays_infinite():
    x = jnp.ones(64).at[3].set(jnp.nan).at[40].set(-jnp.inf)
    values = np.asarray(decode(*encode(x)))
    assert np.flatnonzero(np.isnan(values)).tolist() == [3]
    assert values[40] == -np.inf


@both_ways
def test_exponent_bytes_are_powers_of_two_and_255_is_nan(transform):
    """F82."""
    exponents = np.array([0, 1, 126, 127, 128, 134, 254, 255], np.uint8)
    expected = np.array([2.0**-127, 2.0**-126, 0.5, 1, 2, 128, 2.0**127, np.nan], np.float32).view(
        np.uint32
    )
    actual = np.asarray(transform(mxfp8.scale_to_float)(jnp.asarray(exponents))).view(np.uint32)
    np.testing.assert_array_equal(actual, expected)


@both_ways
def test_decoding_multiplies_by_every_power_of_two(transform):
    values = transform(mxfp8.decode)(*_ones(range(1, 255)))
    expected = np.repeat(np.exp2(np.arange(1, 255) - 127.0).astype(np.float32), 32)
    np.testing.assert_array_equal(np.asarray(values), expected)


def test_exponent_255_decodes_to_nan():
    values = np.asarray(decode(*_ones([255, 127])))
    assert np.isnan(values[:32]).all() and (values[32:] == 1).all()


def test_every_code_is_exact_under_the_extreme_exponents_of_the_normal_range():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    for byte in (10, 127, 246):
        exponents = jnp.full(8, byte, jnp.uint8)
        values = np.asarray(decode(jnp.asarray(codes), exponents))
        expected = codes.astype(np.float32) * np.float32(2.0 ** (byte - 127))
        np.testing.assert_array_equal(values, expected)


def test_the_smallest_exponent_is_not_lost_to_a_subnormal_scale():
    codes = jnp.full(32, 448.0).astype(jnp.float8_e4m3fn)
    values = decode(codes, jnp.zeros(1, jnp.uint8))
    assert (np.asarray(values) == np.float32(448 * 2.0**-127)).all()


def test_an_axis_that_is_no_multiple_of_32_is_refused():
    with pytest.raises(ValueError, match="last axis 48 is not a multiple of 32"):
        mxfp8.encode(jnp.zeros((2, 48)))


def test_codes_and_exponents_that_do_not_match_are_refused():
    tensor = mxfp8.MXFP8Tensor(jnp.zeros((4, 64), jnp.float8_e4m3fn), jnp.zeros((4, 3), jnp.uint8))
    with pytest.raises(ValueError, match="64 elements need 2 exponents, got 3"):
        tensor.dequantize()


def test_a_tensor_tells_the_shape_and_bytes_of_its_values():
    tensor = quantize(jnp.ones((3, 8, 64)))
    assert tensor.shape == (3, 8, 64)
    assert tensor.nbytes == 3 * 8 * (64 + 2)


def test_dequantized_values_are_exact_in_bfloat16():
    tensor = quantize(jnp.asarray(_many_magnitudes((64, 64), -60, 60)))
    exact = np.asarray(tensor.dequantize())
    np.testing.assert_array_equal(np.asarray(tensor.dequantize(jnp.bfloat16), np.float32), exact)


def test_a_nan_exponent_of_a_file_is_refused_with_its_position():
    exponents = np.full((4, 6), 120, np.uint8)
    exponents[1, 5] = 255
    with pytest.raises(ValueError, match=r"q_proj\[1, 5\] is NaN \(byte 255\)"):
        mxfp8.refuse_nan_scales(exponents, "q_proj")


def test_good_exponents_of_a_file_pass():
    mxfp8.refuse_nan_scales(np.arange(255, dtype=np.uint8))
