"""E4M3 bytes against ml_dtypes, on every byte and around every value that a bfloat16 can hold."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layouts import e4m3

ALL_BYTES = np.arange(256, dtype=np.uint8)


def _saturating_cast(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _bfloat16_values_and_neighbours() -> np.ndarray:
    """Every value, tie, infinity, NaN and subnormal, and the float32 on either side of each."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([bits, bits + 1, bits - 1]).view(np.float32)


@pytest.mark.parametrize("round_to", [e4m3.round_to, jax.jit(e4m3.round_to)])
def test_rounding_is_to_nearest_even_and_saturates(round_to):
    x = _bfloat16_values_and_neighbours()
    with np.errstate(invalid="ignore"):
        expected = _saturating_cast(x)
    actual = np.asarray(round_to(jnp.asarray(x))).view(np.uint8)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("to_float", [e4m3.to_float, jax.jit(e4m3.to_float)])
@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e4m3fn])
def test_every_byte_has_its_value(to_float, dtype):
    values = np.asarray(to_float(jnp.asarray(ALL_BYTES.view(dtype))))
    expected = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(values[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_nan_is_exactly_the_two_bytes_7f_and_ff():
    """F84."""
    values = np.asarray(e4m3.to_float(jnp.asarray(ALL_BYTES)))
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    assert np.nanmax(values) == 448.0


def test_a_fused_round_trip_still_rounds():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(4096, dtype=np.float32))
    actual = jax.jit(lambda x: e4m3.to_float(e4m3.round_to(x * 3)))(x)
    expected = _saturating_cast(np.asarray(x) * np.float32(3)).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(actual), expected.astype(np.float32))


def test_a_wrong_type_of_codes_is_refused():
    with pytest.raises(ValueError, match="expected float8_e4m3fn or uint8 codes, got int32"):
        e4m3.to_bits(jnp.zeros(3, jnp.int32))
