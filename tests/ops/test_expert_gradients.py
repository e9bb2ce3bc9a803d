"""What the lanes of the gradient's kernel do, in numpy (`lane_emulator`), and that it lowers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import nvfp4_lanes
from pallas_kernels.grouped_matmul import Activation, Matrices, mosaic, page_lanes, transposed
from pallas_kernels.layouts import nvfp4_pages
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import LINE, LINES, NVFP4Pages
from tests.numerics import assert_close
from tests.ops.emulated_lanes import Real
from tests.ops.emulated_refs import Ref
from tests.ops.lane_emulator import launch

_THREAD = np.arange(128)
_W, _G, _T = _THREAD // 32, _THREAD % 32 // 4, _THREAD % 4


def test_a_step_of_pages_becomes_the_tiles_that_wgmma_reads(monkeypatch):
    rng = np.random.default_rng(0)
    tensor = NVFP4Tensor(
        jnp.asarray(rng.integers(0, 256, (64, 128), dtype=np.uint8)),
        jnp.asarray(rng.integers(0, 127, (64, 16), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
        jnp.float32(1),
    )
    pages = Ref(np.asarray(jax.jit(nvfp4_pages.to_pages)(tensor).pages))
    matrix = Ref(np.full((64, 256), np.nan, ml_dtypes.bfloat16))

    def kernel(pages, matrix):
        transposed.expand(jnp.bfloat16)(pages, matrix)

    launch(monkeypatch, (transposed, page_lanes, nvfp4_lanes), 1, kernel, pages, matrix)
    tiles = matrix.matrix().reshape(8, 4, 8, 64)  # by 8 rows, by 64 columns, row, column
    found = tiles.transpose(0, 2, 1, 3).reshape(64, 256).astype(np.float32) * transposed.DECODED
    assert np.array_equal(found, np.asarray(tensor.dequantize(jnp.float32)))


def test_sums_are_scaled_and_stored_where_there_are_rows(monkeypatch):
    place, block, count, scale = 5, 1, 37, 0.25
    sums = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    out = Ref(np.full((80, 768), 9, ml_dtypes.bfloat16))
    tiles = [
        [Real(sums[16 * _W + _G + 8 * half, 8 * n + 2 * _T + e]) for half in (0, 1) for e in (0, 1)]
        for n in range(32)
    ]

    def kernel(out):
        bits = int(np.float32(scale / transposed.DECODED).view(np.int32))
        transposed.store(768)(tiles, out, place, block, count, bits)

    launch(monkeypatch, (transposed,), 1, kernel, out)
    expected = np.full((80, 768), 9, np.float32)
    expected[place : place + count, 256:512] = sums[:count] * scale
    assert_close(out.array.astype(np.float32), expected, "bf16")
    outside = np.ones((80, 768), bool)
    outside[place : place + count, 256:512] = False
    assert (out.array[outside] == 9).all()


def test_the_gradient_of_routed_experts_lowers_and_expands_no_matrix(hopper):
    """Of 40 tokens: one kernel more a matrix, and no product by XLA but the weighted sums'."""
    E, D, F, X, T = 8, 512, 768, 4, 40
    shape = jax.ShapeDtypeStruct

    def pages(rows, columns):
        one = shape((E, rows // 32, columns // 128, LINES, LINE), jnp.uint8)
        return NVFP4Pages(one, shape((E,), jnp.float32))

    def loss(x, weights, matrices, experts):
        y = mosaic.mixture(x, matrices, experts, weights, Activation(), None)
        return jnp.sum(y.astype(jnp.float32))

    matrices = Matrices(pages(F, D), pages(F, D), pages(D, F))
    rows = shape((T, D), jnp.bfloat16), shape((T, X), jnp.float32)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*rows, matrices, shape((T, X), int))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{F}x{D}xbf16>" not in text and f"tensor<{D}x{F}xbf16>" not in text
    assert text.count("call @mosaic_gpu") + text.count("mosaic_gpu_v2") >= 6
