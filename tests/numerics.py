"""The one error metric and the one tolerance table of all tests.

The metric is the relative L2 error |actual - expected| / |expected| in float64 over the whole
array. `exact` compares element by element (a NaN equals a NaN, types must agree); `f32_logits`
bounds the largest absolute difference. Equal infinities (an empty row's log-sum-exp) differ by 0.
"""

import numpy as np

# Relative L2 error per kind of arithmetic between the two sides.
RELATIVE_TOLERANCE = {
    "f32": 1e-5,  # sums of up to some thousand terms in another order, 2^-24 each
    "bf16": 1e-2,  # 8 significant bits, 2^-9 a rounding, a few roundings deep
    "fp8": 5e-2,  # 4 significant bits, 2^-4 a rounding at most
    "nvfp4": 1.5e-1,  # E2M1 with a scale per 16: about 0.09 on Gaussian data
}
# Largest absolute difference, for logits of order one to ten.
ABSOLUTE_TOLERANCE = {"f32_logits": 1e-4}


def relative_error(actual, expected) -> float:
    """Relative L2 error of `actual`; 0 when they are equal, infinite when `expected` is zero."""
    difference = float(np.linalg.norm(_difference(actual, expected).ravel()))
    if difference == 0.0:
        return 0.0
    norm = float(np.linalg.norm(_finite(expected).ravel()))
    return difference / norm if norm else float("inf")


def assert_close(actual, expected, kind: str) -> None:
    """Fails with the error, the bound and the first differing coordinate."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if kind == "exact":
        assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
        both_nan = np.isnan(_as_float64(actual)) & np.isnan(_as_float64(expected))
        differs = (actual != expected) & ~both_nan
        assert not differs.any(), _first_difference(actual, expected, differs)
    elif kind in ABSOLUTE_TOLERANCE:
        bound = ABSOLUTE_TOLERANCE[kind]
        # `not <=` counts a NaN as a difference
        differs = ~(np.abs(_difference(actual, expected)) <= bound)
        message = f"above {bound:g} absolute: "
        assert not differs.any(), message + _first_difference(actual, expected, differs)
    else:
        bound = RELATIVE_TOLERANCE[kind]
        error = relative_error(actual, expected)
        message = f"relative error {error:.3g} is above {bound:g}: "
        assert error <= bound, message + _first_suspect(actual, expected, bound)


def _first_suspect(actual, expected, bound: float) -> str:
    """The first element that is further off than the bound times the typical element."""
    typical = np.sqrt(np.mean(np.square(_finite(expected))))
    differs = ~(np.abs(_difference(actual, expected)) <= bound * typical)
    return _first_difference(actual, expected, differs)


def _first_difference(actual, expected, differs: np.ndarray) -> str:
    coordinate = tuple(int(i) for i in np.argwhere(differs)[0])
    return (
        f"{int(differs.sum())} of {differs.size} elements differ, the first at {coordinate}: "
        f"{actual[coordinate]}, expected {expected[coordinate]}"
    )


def _difference(actual, expected) -> np.ndarray:
    actual, expected = _as_float64(actual), _as_float64(expected)
    with np.errstate(invalid="ignore"):
        return np.where(actual == expected, 0.0, actual - expected)


def _finite(array) -> np.ndarray:
    array = _as_float64(array)
    return np.where(np.isfinite(array), array, 0.0)


def _as_float64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
