"""Pages of NVFP4 weights: the inverse is exact, and every byte is where its docstring says."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layouts import nvfp4, nvfp4_pages
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor

_to_pages, _to_tensor = jax.jit(nvfp4_pages.to_pages), jax.jit(nvfp4_pages.to_tensor)


def _tensor(stack, rows, columns, divides=False):
    rng = np.random.default_rng(rows)
    scales = rng.integers(0, 0x7F, (*stack, rows, columns // 16), dtype=np.uint8)
    return NVFP4Tensor(
        jnp.asarray(rng.integers(0, 256, (*stack, rows, columns // 2), dtype=np.uint8)),
        jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)),
        jnp.asarray(rng.random(stack), jnp.float32),
        divides,
    )


@pytest.mark.parametrize(("stack", "rows", "columns"), [((3,), 128, 256), ((), 64, 128)])
@pytest.mark.parametrize("divides", [True, False])
def test_the_inverse_of_pages_is_exact(stack, rows, columns, divides):
    tensor = _tensor(stack, rows, columns, divides)
    pages = _to_pages(tensor)
    assert (pages.shape, pages.nbytes) == (tensor.shape, tensor.nbytes)
    back = _to_tensor(pages)
    assert back.divides is divides
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(tensor), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert np.array_equal(pages.dequantize(), tensor.dequantize())


def test_one_lane_has_32_columns_of_its_row_and_their_two_scales():
    tensor = _tensor((2,), 64, 256)
    e, row, chunk, t = 1, 45, 1, 2
    page = np.asarray(_to_pages(tensor).pages)[e, row // 32, chunk].reshape(-1)
    block, g = row % 32 // 8, row % 8
    halves = page[:2048].reshape(4, 8, 4, 16)[block, g, t].view(np.uint16).reshape(4, 2)
    scales = page[2048:].reshape(4, 8, 4, 2)[block, g, t].view(ml_dtypes.float8_e4m3fn)
    codes = [
        (halves[word, half] >> sign & 1) << 3 | (halves[word, half] >> rest & 7)
        for word in range(4)
        for sign, rest in nvfp4_pages.PLACES
        for half in (0, 1)
    ]
    packed = np.array(codes[::2]) | np.array(codes[1::2]) << 4
    found = nvfp4.decode(jnp.asarray(packed, jnp.uint8), jnp.asarray(scales))
    columns = slice(128 * chunk + 32 * t, 128 * chunk + 32 * t + 32)
    values = nvfp4.decode(tensor.codes, tensor.scales)
    assert np.array_equal(found, values[e, row, columns])


def test_matrices_that_are_no_whole_pages_are_refused():
    tensor = _tensor((2,), 96, 128)
    assert not nvfp4_pages.fits(tensor)
    with pytest.raises(ValueError, match=r"\[96, 128\] are no whole pages of 64 x 128"):
        nvfp4_pages.to_pages(tensor)
