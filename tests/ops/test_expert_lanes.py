"""The code that the lanes of the experts' kernels run, in numpy (`lane_emulator`)."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nvfp4_lanes
from pallas_kernels.grouped_matmul import combined, matching_rows, page_lanes
from pallas_kernels.grouped_matmul.activation import Activation, swiglu
from pallas_kernels.layouts import nvfp4_pages
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from tests.numerics import assert_close
from tests.ops import emulated_lanes
from tests.ops.emulated_lanes import Real, Ref, pair_of
from tests.ops.lane_emulator import launch

HALVES = (ml_dtypes.bfloat16, np.float16)
_THREAD = np.arange(128)
_W, _G, _T = _THREAD // 32, _THREAD % 32 // 4, _THREAD % 4


def _place(column):
    """Where a column of 128 lies: slab and element."""
    t, j, e = column // 32, column % 32 // 2, column % 2
    return j // 8, 8 * (j % 8) + 2 * t + e


@pytest.mark.parametrize("width", [256, 1280])
def test_rows_are_sorted_and_their_columns_permuted(monkeypatch, width):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, width)).astype(ml_dtypes.bfloat16)
    token = np.array([3, -1, 0, 4, 4, 2, -1, 1], np.int32)
    out = np.full((width // 64, 8, 64), 7, ml_dtypes.bfloat16)
    monkeypatch.setattr(matching_rows, "_MOST_PROGRAMS", 3)
    refs = [Ref(one) for one in (x, token, out)]
    launch(monkeypatch, (matching_rows,), 3, matching_rows._program, *refs)
    expected = np.full_like(out, 7)
    for place, row in enumerate(token):
        for column in range(width if row >= 0 else 0):
            slab, element = _place(column % 128)
            expected[column // 128 * 2 + slab, place, element] = x[row, column]
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_rows_in_shared_memory_are_the_same_swizzled(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 512)).astype(np.float16)
    token = np.array([9] * 8 + [3, -1, 0, 4, 4, 2, -1, 1], np.int32)
    rows = Ref(np.zeros((8, 8, 64), np.float16))

    def kernel(x, token, rows):
        load = matching_rows.load_rows(8, 512, 1, None)
        load(x, token, rows, 8, 0)

    launch(monkeypatch, (matching_rows,), 1, kernel, Ref(x), Ref(token), rows)
    straight = rows.matrix().reshape(8, 8, 64)
    for place, row in enumerate(token[8:]):
        for column in range(512):
            slab, element = _place(column % 128)
            assert straight[column // 128 * 2 + slab, place, element] == x[max(row, 0), column]


@pytest.mark.parametrize("shared", [None, 1])
@pytest.mark.parametrize("dtype", HALVES)
def test_outputs_are_weighted_and_added_and_absent_ones_left_out(monkeypatch, dtype, shared):
    rng = np.random.default_rng(2)
    y = rng.standard_normal((6, 136)).astype(dtype)
    y[5] = np.nan
    place = np.array([[3, 0, 6, 1], [6, 6, 6, 6], [2, 2, 4, 0]], np.int32)
    weights = rng.random((3, 4)).astype(np.float32)
    out = np.full((3, 136), 7, dtype)
    for token in range(3):
        axes = lambda name, token=token: {"token": token, "part": 0}[name]  # noqa: E731
        monkeypatch.setattr(combined, "lax", SimpleNamespace(axis_index=axes))
        with monkeypatch.context() as patch:
            patch.setattr(combined, "lanes", emulated_lanes)
            combined._program(4, shared, *(Ref(one) for one in (y, place, weights, out)))
    padded = np.concatenate([y[:5], np.zeros((2, 136), dtype)]).astype(np.float32)
    expected = (padded[place] * weights[..., None]).sum(1)
    if shared is not None:
        expected = expected.astype(dtype).astype(np.float32) + padded[shared : shared + 3]
    assert_close(out.astype(np.float32), expected, "bf16")


@pytest.mark.parametrize("dtype", HALVES)
def test_decoded_pages_are_the_weights(monkeypatch, dtype):
    rng = np.random.default_rng(1)
    scales = rng.permutation(64 * 8 * 127)[: 64 * 8].reshape(64, 8) % 127  # subnormal ones too
    tensor = NVFP4Tensor(
        jnp.asarray(rng.integers(0, 256, (64, 64), dtype=np.uint8)),
        jnp.asarray(scales.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)),
        jnp.float32(1),
    )
    first, second = np.asarray(jax.jit(nvfp4_pages.to_pages)(tensor).pages)[:, 0]
    found = []

    def kernel(first, second):
        found.extend(page_lanes.decoded(0, first, second, dtype))

    launch(monkeypatch, (page_lanes, nvfp4_lanes), 1, kernel, Ref(first), Ref(second))
    values = np.asarray(tensor.dequantize(jnp.float32))
    for slab, operand in enumerate(found):
        for tile, halves in enumerate(operand):
            for half, word in enumerate(halves):
                pairs = pair_of(word, dtype).astype(np.float32) * page_lanes.DECODED
                for e in (0, 1):
                    columns = 32 * _T + 2 * (8 * slab + tile) + e
                    assert np.array_equal(pairs[:, e], values[32 * half + 8 * _W + _G, columns])


def _tiles(sums):
    """The tiles of a (64, N) array in the registers of the 128 threads."""
    return [
        [Real(sums[16 * _W + _G + 8 * half, 8 * n + 2 * _T + e]) for half in (0, 1) for e in (0, 1)]
        for n in range(sums.shape[1] // 8)
    ]


def _bits(x):
    return int(np.float32(x).view(np.int32))


@pytest.mark.parametrize("dtype", HALVES)
def test_activations_are_stored_as_rows_of_the_next_product(monkeypatch, dtype):
    page, first, count, scales, constants = 5, 3, 13, (3.0, 0.5), Activation()
    start = 2  # of the columns that are kept
    sums = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float32) * 4
    out = Ref(np.full((4, 20, 64), 99, dtype))

    def kernel(out):
        store = page_lanes.store_activations(out.shape, dtype, constants, divide=(False, True))
        kept = first - start, start, start + count
        decoded = _tiles(sums / page_lanes.DECODED)
        store(decoded, out, page, *kept, *map(_bits, (scales[0], 1 / scales[1])))

    launch(monkeypatch, (page_lanes, nvfp4_lanes), 1, kernel, out)
    rows = np.arange(32) // 8 * 16 + np.arange(32) % 8  # of gate; those of up are 8 further
    expected = swiglu(
        jnp.asarray(sums[rows] * scales[0]), jnp.asarray(sums[rows + 8] * scales[1]), constants
    )
    assert (out.array[:, :first] == 99).all() and (out.array[:, first + count :] == 99).all()
    found = np.full((32, count), np.nan, np.float32)
    for row in range(32):
        slab, element = _place((32 * page + row) % 128)
        found[row] = out.array[page // 4 * 2 + slab, first : first + count, element]
    assert_close(found, np.asarray(expected)[:, start : start + count], "bf16")


@pytest.mark.parametrize("dtype", [*HALVES, np.float32])
def test_outputs_are_stored_at_their_columns(monkeypatch, dtype):
    page, apart, first, start, count, width = 2, 3, 2, 1, 6, 224
    sums = np.random.default_rng(4).standard_normal((64, 8)).astype(np.float32)
    out = Ref(np.full((9, width), 99, dtype))

    def kernel(out):
        store = page_lanes.store_outputs(out.shape, dtype)
        decoded, kept = _tiles(sums / page_lanes.DECODED), (first - start, start, start + count)
        store(decoded, out, page, *kept, _bits(2.0), apart)

    launch(monkeypatch, (page_lanes, nvfp4_lanes), 1, kernel, out)
    expected = np.full((9, width), 99, np.float32)
    for half, at in enumerate((32 * page, 32 * (page + apart))):
        rows = np.arange(32) // 8 * 16 + np.arange(32) % 8 + 8 * half
        kept = sums[rows, start : start + count]
        expected[first : first + count, at : at + 32] = 2 * kept.T
    kind = "f32" if dtype == np.float32 else "bf16"
    assert_close(out.array.astype(np.float32), expected, kind)
