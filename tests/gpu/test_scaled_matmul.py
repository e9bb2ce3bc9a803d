"""scaled_matmul on the GPU against float64 products of the stored values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.scaled_matmul import mosaic, scaled_matmul, scaled_matmuls
from tests.numerics import assert_close
from tests.ops.test_scaled_matmul import FORMATS, stored

pytestmark = pytest.mark.gpu

_matmuls = jax.jit(scaled_matmuls, static_argnames=("out_dtype", "implementation"))


def _random(rng, features, columns, low=107, high=118):
    """Every code but NaN, exponents of a range; and the values in float64."""
    codes = rng.integers(0, 256, (features, columns), dtype=np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).view(ml_dtypes.float8_e4m3fn)
    powers = rng.integers(low, high, (features, columns // 32), dtype=np.uint8)
    values = codes.astype(np.float64) * np.repeat(2.0 ** (powers.astype(np.float64) - 127), 32, -1)
    return MXFP8Tensor(jnp.asarray(codes), jnp.asarray(powers)), values


def _rows(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize("rows", [*range(1, 34), 64, 65, 127, 128, 129, 200, 256])
def test_any_number_of_rows_of_a_full_width_weight(rows):
    rng = np.random.default_rng(rows)
    weight, values = _random(rng, 1024 + 64 * (rows % 3), 6144)
    x = _rows(rng, rows, 6144)
    (found,) = _matmuls(x, [weight], implementation="mosaic")
    assert_close(found, np.asarray(x, np.float64) @ values.T, "f32")


@pytest.mark.parametrize("columns", [512, 1024, 1536, 2048, 2560, 3072, 8192, 12_288])
@pytest.mark.parametrize("features", [8, 72, 1000])
def test_few_rows_of_odd_shapes(features, columns):
    rng = np.random.default_rng(features + columns)
    weight, values = _random(rng, features, columns)
    x = _rows(rng, 3, 3, columns)
    (found,) = _matmuls(x, [weight], implementation="mosaic")
    assert_close(found, np.asarray(x, np.float64) @ values.T, "f32")


@pytest.mark.parametrize("exponents", [(19, 25), (120, 151)])
def test_largest_and_smallest_exponents_are_exact(exponents):
    rng = np.random.default_rng(3)
    weight, values = _random(rng, 256, 1536, *exponents)
    x = np.zeros((8, 1536), np.float32)
    x[np.arange(8), np.arange(8) * 191] = 1.0
    (found,) = _matmuls(jnp.asarray(x, jnp.bfloat16), [weight], implementation="mosaic")
    expected = (x.astype(np.float64) @ values.T).astype(np.float32)
    assert_close(found, expected, "exact")


def test_several_weights_are_one_launch_with_the_same_bits_as_alone():
    """Where each alone is cut alike."""
    rng = np.random.default_rng(4)
    sizes = (8192, 512, 512, 512, 128)
    pairs = [_random(rng, size, 6144) for size in sizes]
    x = _rows(rng, 5, 6144)
    found = _matmuls(x, [weight for weight, _ in pairs], implementation="mosaic")
    for y, (_, values) in zip(found, pairs, strict=True):
        assert_close(y, np.asarray(x, np.float64) @ values.T, "f32")


def test_a_row_has_the_same_bits_in_every_batch():
    rng = np.random.default_rng(5)
    weight, _ = _random(rng, 9856, 6144)
    x = _rows(rng, 256, 6144)
    (alone,) = _matmuls(x[:1], [weight], implementation="mosaic")
    for rows in (2, 8, 9, 17, 32, 33, 128, 256):
        (among,) = _matmuls(x[:rows], [weight], implementation="mosaic")
        assert_close(among[:1], alone, "exact")


def test_the_gradient_of_the_rows():
    rng = np.random.default_rng(6)
    weight, values = _random(rng, 512, 1024)
    x, upstream = _rows(rng, 4, 1024), rng.standard_normal((4, 512)).astype(np.float32)

    def loss(x):
        return jnp.sum(scaled_matmul(x, weight, implementation="mosaic") * upstream)

    assert_close(jax.jit(jax.grad(loss))(x), upstream.astype(np.float64) @ values, "bf16")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_every_format_and_dtype_is_taken(fmt, rows, dtype):
    """Whatever dispatch chooses; a weight is met in the dtype of the rows."""
    rng = np.random.default_rng(7)
    weight, values = stored(rng.standard_normal((256, 1024)).astype(np.float32) / 32, fmt)
    x = jnp.asarray(rng.standard_normal((rows, 1024)), dtype)
    (found,) = _matmuls(x, [weight], out_dtype=dtype)
    assert found.dtype == dtype
    kind = "f32" if dtype == jnp.float32 else "bf16"
    assert_close(found, np.asarray(x, np.float64) @ values.T, kind)


def test_the_kernel_is_what_a_decode_step_runs():
    rng = np.random.default_rng(8)
    weight, _ = _random(rng, 64, 512)
    options = {"out_dtype": jnp.dtype(jnp.bfloat16), "one_device": True}
    assert mosaic.refuse(_rows(rng, 32, 512), [weight], **options) is None
