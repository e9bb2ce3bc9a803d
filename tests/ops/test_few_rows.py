"""The kernel for few rows of scaled_matmul: its lanes in numpy, its lowering, what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import mxfp8_lanes
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.scaled_matmul import few_rows, mosaic, some_rows, weight_tiles
from pallas_kernels.scaled_matmul import plan as plans
from pallas_kernels.scaled_matmul.plan import Plan
from tests.numerics import assert_close
from tests.ops.emulated_lanes import Ref
from tests.ops.lane_emulator import launch

MODULES = (few_rows, weight_tiles, mxfp8_lanes)
BF16 = ml_dtypes.bfloat16


class _Codes(Ref):
    """Steps of codes [64, 256] in tiles of 8 x 128 bytes with the 128-byte swizzle."""

    def take(self, values):
        some = np.zeros((64, 256), np.uint8)  # rows past the end of the weight are zeros
        some[: len(values)] = values
        pieces = some.reshape(8, 8, 2, 8, 16).transpose(0, 2, 1, 3, 4)  # tile, chunk, row, piece
        to = self.array.reshape(8, 2, 8, 8, 16)
        for row, piece in np.ndindex(8, 8):
            to[:, :, row, piece ^ row] = pieces[:, :, row, piece]


class _Table(Ref):
    def take(self, values):
        self.array[: len(values)] = values


def _weight(rng, features, columns, low=107, high=117):
    """Every code but NaN, exponents of a range."""
    codes = rng.integers(0, 256, (features, columns), dtype=np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes)
    return codes, rng.integers(low, high, (features, columns // 32), dtype=np.uint8)


def _values(codes, exponents):
    powers = 2.0 ** (exponents.astype(np.float64) - 127)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(powers, 32, -1)


def _emulated(monkeypatch, x, weights):
    """The kernel's product, by its programs."""
    monkeypatch.setattr(few_rows, "TEAMS", 1)
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 3)
    features = sum(len(codes) for codes, _ in weights)
    plan = Plan(rows=len(x), tiles=-(-features // 64), columns=x.shape[1])
    out = np.full((plan.parts, plan.rows, features), np.nan, np.float32)
    rows = np.full((plan.width // 64, plan.operand_rows, 64), np.nan, BF16)
    leaves = [Ref(leaf) for one in weights for leaf in one]
    refs = [
        Ref(x),
        *leaves,
        Ref(out),
        _Codes(np.zeros((plan.ring, 64, 256), np.uint8)),
        _Table(np.zeros((plan.tables, 64, plan.width // 32), np.uint8)),
        Ref(rows),
        Ref(np.zeros(plan.ring)),
        Ref(np.zeros(plan.tables)),
    ]
    launch(monkeypatch, MODULES, plan.ctas, partial(few_rows._program, plan), *refs)
    return out.sum(0)


@pytest.mark.parametrize(
    ("rows", "columns", "sizes"), [(1, 1024, (72,)), (9, 512, (64, 128, 40)), (32, 1536, (64,))]
)
def test_lanes_multiply_rows_by_the_stored_values(monkeypatch, rows, columns, sizes):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, columns)).astype(BF16)
    weights = [_weight(rng, size, columns) for size in sizes]
    found = _emulated(monkeypatch, x, weights)
    expected = x.astype(np.float64) @ np.concatenate([_values(*one) for one in weights]).T
    assert_close(found, expected, "f32")


class _Columns(Ref):
    """Steps of codes [64, 128], swizzled."""

    def take(self, values):
        some = np.zeros((64, 128), np.uint8)
        some[: len(values)] = values
        pieces, to = some.reshape(8, 8, 8, 16), self.array.reshape(8, 8, 8, 16)
        for row, piece in np.ndindex(8, 8):
            to[:, row, piece ^ row] = pieces[:, row, piece]


class _Rows(Ref):
    """Slabs [N, 64] in tiles of 8 rows with the 128-byte swizzle."""

    def take(self, values):
        pieces = values.reshape(2, -1, 8, 8, 8)  # slab, tile, row, 16 bytes
        to = self.array.reshape(pieces.shape)
        for row, piece in np.ndindex(8, 8):
            to[:, :, row, piece ^ row] = pieces[:, :, row, piece]


@pytest.mark.parametrize(("rows", "columns", "sizes"), [(21, 1024, (64, 72)), (9, 512, (40,))])
def test_lanes_multiply_groups_of_rows_that_stream(monkeypatch, rows, columns, sizes):
    """A unit for each program, so that all of its steps are there before any team multiplies."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, columns)).astype(BF16)
    weights = [_weight(rng, size, columns) for size in sizes]
    monkeypatch.setattr(some_rows, "TEAMS", 1)
    monkeypatch.setattr(some_rows, "GROUP_ROWS", 16)
    tiles = sum(-(-size // 64) for size in sizes)
    units = some_rows.Units(Plan(rows=rows, tiles=tiles, columns=columns))
    monkeypatch.setattr(some_rows, "MULTIPROCESSORS", units.count)
    assert units.ring == units.steps and units.groups == -(-rows // 16)
    padded = np.asarray(some_rows._permuted(jnp.asarray(x), units.groups * units.rows))
    out = np.full((units.plan.parts, rows, sum(sizes)), np.nan, np.float32)
    refs = [Ref(padded), *(Ref(leaf) for one in weights for leaf in one), Ref(out)]
    refs += [
        _Columns(np.zeros((units.ring, 1, 64, 128), np.uint8)),
        _Table(np.zeros((2, 1, 64, units.plan.width // 32), np.uint8)),
        _Rows(np.full((units.ring, 2, units.rows, 64), np.nan, BF16)),
        *(Ref(np.zeros(count)) for count in (units.ring, units.ring, 2)),
    ]
    program = partial(some_rows._program, units)
    modules = (some_rows, weight_tiles, mxfp8_lanes)
    launch(monkeypatch, modules, units.count, program, *refs, teams=2)
    expected = x.astype(np.float64) @ np.concatenate([_values(*one) for one in weights]).T
    assert_close(out.sum(0), expected, "f32")


@pytest.mark.parametrize("exponents", [(19, 60), (130, 151)])
def test_every_code_is_exact_at_the_ends_of_the_exponents(monkeypatch, exponents):
    """One element a row of x, so that every product is one value."""
    rng = np.random.default_rng(1)
    codes, powers = _weight(rng, 64, 512, *exponents)
    x = np.zeros((8, 512), BF16)
    x[np.arange(8), np.arange(8) * 61] = 1.0
    found = _emulated(monkeypatch, x, [(codes, powers)])
    expected = x.astype(np.float64) @ _values(codes, powers).T
    assert_close(found, expected.astype(np.float32), "exact")


def test_rows_are_permuted_as_a_lane_has_its_columns():
    x = jnp.arange(3.0 * 256).reshape(3, 256)
    found = some_rows._permuted(x, 8)
    assert found.shape == (4, 8, 64) and not found[:, 3:].any()
    for column in range(256):
        t, j, e = column % 128 // 32, column % 32 // 2, column % 2
        slab, place = column // 128 * 2 + j // 8, 8 * (j % 8) + 2 * t + e
        assert (found[slab, :3, place] == x[:, column]).all()


@pytest.mark.parametrize("rows", [33, 128, 129, 256])
def test_groups_of_rows_fit_in_memory_and_hold_them_all(rows):
    units = some_rows.Units(Plan(rows=rows, tiles=154, columns=6144))
    assert units.groups * units.rows >= rows and units.rows <= some_rows.GROUP_ROWS
    assert units.ring >= 2 and units.plan.width == 1536


def test_no_split_depends_on_the_number_of_rows():
    plans = [Plan(rows=rows, tiles=154, columns=6144) for rows in (1, 8, 17, 32)]
    assert {(plan.width, plan.parts) for plan in plans} == {(1536, 4)}


@pytest.mark.parametrize("rows", [1, 17, 256])
@pytest.mark.parametrize("sizes", [(9856,), (8192, 512, 128), (1000,)])
def test_it_lowers(rows, sizes):
    def shape(*axes, dtype):
        return jax.ShapeDtypeStruct(axes, dtype)

    weights = [
        (shape(F, 6144, dtype=jnp.float8_e4m3fn), shape(F, 192, dtype=jnp.uint8)) for F in sizes
    ]
    traced = jax.jit(mosaic._products).trace(shape(rows, 6144, dtype=jnp.bfloat16), weights)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_it_does_not_take_is_said(monkeypatch):
    monkeypatch.setattr(mosaic, "refuse_device", lambda: None)
    good = MXFP8Tensor(*(jnp.zeros((64, 512 // n), jnp.uint8) for n in (1, 32)))
    x = jnp.zeros((4, 512), jnp.bfloat16)

    def reason(x=x, weights=(good,), one_device=True):
        said = mosaic.refuse(x, weights, out_dtype=jnp.float32, one_device=one_device)
        return str(said)

    assert reason() == "None"
    assert "float32, not bfloat16" in reason(x=x.astype(jnp.float32))
    assert "0 rows, not 1 to 256" in reason(x=x[:0])
    assert "257 rows" in reason(x=jnp.zeros((257, 512), jnp.bfloat16))
    assert "not MXFP8" in reason(weights=(jnp.zeros((64, 512)),))
    assert "256 columns" in reason(x=x[:, :256])
    assert "partition" in reason(one_device=False)
