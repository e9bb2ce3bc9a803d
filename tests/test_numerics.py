"""The error metric itself: what it accepts, what it refuses and what it says."""

import ml_dtypes
import numpy as np
import pytest

from tests.numerics import assert_close, relative_error


def test_relative_error_of_a_hand_computed_pair():
    assert relative_error([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)


def test_equal_infinities_are_equal():
    expected = np.array([-np.inf, 1.0])
    assert relative_error(expected, expected) == 0.0
    assert_close(expected, expected, "f32")


@pytest.mark.parametrize("kind", ["exact", "f32", "f32_logits", "bf16", "fp8", "nvfp4"])
def test_every_kind_accepts_equality_and_refuses_twice_the_value(kind):
    expected = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    assert_close(expected, expected, kind)
    with pytest.raises(AssertionError, match=r"first at \(0, 0\): 2.0, expected 1.0"):
        assert_close(2 * expected, expected, kind)


@pytest.mark.parametrize("kind", ["exact", "f32", "f32_logits"])
def test_a_nan_is_a_difference(kind):
    with pytest.raises(AssertionError, match=r"first at \(1,\)"):
        assert_close(np.array([1.0, np.nan]), np.array([1.0, 2.0]), kind)


def test_exact_compares_types_and_small_floats():
    codes = np.array([0.5, np.nan], ml_dtypes.float8_e4m3fn)
    assert_close(codes, codes, "exact")
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(codes, codes.astype(np.float32), "exact")


def test_a_shape_is_never_broadcast():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.ones((1, 2)), np.ones(2), "f32")
