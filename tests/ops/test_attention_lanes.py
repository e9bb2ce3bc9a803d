"""The code that the attention kernels' lanes run, in numpy (`emulated_lanes`): pages decoded where
they lie, products by fragments, partial results merged.
"""

from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import half_block, nvfp4_lanes, online_softmax
from pallas_kernels.layouts.pool import decode
from pallas_kernels.nvfp4_lanes import DECODED
from pallas_kernels.sparse_attention import merge, nvfp4_block, nvfp4_page, slots
from pallas_kernels.sparse_attention.pairs import merge_slots
from pallas_kernels.window_attention import page_block
from tests.numerics import assert_close
from tests.ops import emulated_lanes
from tests.ops.emulated_lanes import Real, Ref, Word
from tests.ops.lane_emulator import Sums, launch, wgmma

Z, H, G, WARPS = 128, 128, 16, 4
MODULES = (half_block, merge, nvfp4_block, nvfp4_lanes, nvfp4_page, online_softmax, page_block)
MODULES += (slots,)
_lane = np.arange(128) % 32
_g, _t, _w = _lane // 4, _lane % 4, np.arange(128) // 32


def _swizzled(lines):
    """What the copy engine makes of 128-byte lines: 16-byte piece p of line l at p ^ (l % 8)."""
    pieces = lines.reshape(len(lines), 8, 16)
    out = np.empty_like(pieces)
    for line, piece in np.ndindex(len(lines), 8):
        out[line, piece ^ (line % 8)] = pieces[line, piece]
    return out.reshape(lines.shape)


def _nvfp4_page(rng, limit=Z):
    """(swizzled codes, scales, float32 rows [Z, H]); junk from token `limit` on."""
    codes = rng.integers(0, 256, (Z, H // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x50, (Z, H // 16), dtype=np.uint8)
    values = np.asarray(decode(jnp.asarray(codes), jnp.asarray(scales), "nvfp4"))
    codes[limit:], scales[limit:] = 0xFF, 0xFF
    return _swizzled(codes.reshape(64, 128)), scales, values


def _tiles(array):
    """Registers of a (64, n) array: per 8 columns two of row g, two of row g + 8 of each warp."""
    return [
        [
            Real(array[16 * _w + _g + 8 * half, 8 * n + 2 * _t + e])
            for half in (0, 1)
            for e in (0, 1)
        ]
        for n in range(array.shape[1] // 8)
    ]


def _halves(array):
    """Registers of a float16 (64, n) array."""
    tiles = _tiles(array.astype(np.float32))
    return [[emulated_lanes.half2_of_reals(*x[i : i + 2]) for i in (0, 2)] for x in tiles]


def _array(tiles):
    """The inverse of `_tiles`."""
    out = np.full((64, 8 * len(tiles)), np.nan, np.float32)
    for n, values in enumerate(tiles):
        for i, one in enumerate(values):
            out[16 * _w + _g + 8 * (i // 2), 8 * n + 2 * _t + i % 2] = one.value
    return out


def _rows(values):
    """Registers of a (64,) array: rows g and g + 8 of each warp."""
    return [Real(values[16 * _w + _g + 8 * half]) for half in (0, 1)]


def _run(monkeypatch, kernel, *refs):
    launch(monkeypatch, MODULES, 1, kernel, *refs)


def _token_of_column():
    """Of the page, by warp and column of `nvfp4_page`."""
    column = np.arange(32)
    step, pair, c = column // 16, column // 8 % 2, column % 8
    token = 16 * step + 4 * (c // 2) + c % 2 + 2 * pair
    return token + 32 * np.arange(WARPS)[:, None]


@pytest.mark.parametrize("limit", [Z, 1, 77, 0])
def test_a_page_is_scored_and_its_values_weighed(monkeypatch, limit):
    rng = np.random.default_rng(limit)
    k_codes, k_scales, keys = _nvfp4_page(rng, limit)
    v_codes, v_scales, values = _nvfp4_page(rng, limit)
    q = rng.standard_normal((G, H)).astype(ml_dtypes.bfloat16)
    weights = rng.uniform(0, 1, (64, 32)).astype(np.float16)
    before = rng.standard_normal((64, H)).astype(np.float32)
    token = _token_of_column()
    for warp in range(WARPS):
        weights[16 * warp : 16 * warp + 16, token[warp] >= limit] = 0
    result = {}

    def kernel(q, queries, *page):
        q, queries, *page = (emulated_lanes.address(x) for x in (q, queries, *page))
        nvfp4_page.query_fragments(q, 2 * H, queries)
        result["scores"] = nvfp4_page.scores(queries, *page[:2], Word(limit))
        sums = nvfp4_page.add_values(_tiles(before), _halves(weights), *page[2:], Word(limit))
        result["sums"] = sums

    memory = np.zeros(2048, np.float16)
    _run(monkeypatch, kernel, *map(Ref, (q, memory, k_codes, k_scales, v_codes, v_scales)))
    scores, sums = _array(result["scores"]), _array(result["sums"])
    exact = q.astype(np.float32) @ keys.T / DECODED
    columns = np.arange(H)
    dimension = 16 * (columns % 8) + columns // 8
    for warp in range(WARPS):
        rows = slice(16 * warp, 16 * warp + 16)
        wanted = np.where(token[warp] < limit, exact[:, token[warp]], -np.inf)
        assert_close(scores[rows], wanted.astype(np.float32), "f32")
        product = weights[rows].astype(np.float32) @ values[token[warp]] / DECODED
        assert_close(sums[rows], before[rows] + product[:, dimension], "f32")


def test_scores_become_weights_and_only_a_maximum_that_grew_is_followed(monkeypatch):
    rng, unit = np.random.default_rng(0), 0.5
    scores = (6 * rng.standard_normal((64, 32))).astype(np.float32)
    scores[7], scores[9], scores[20, :16] = -np.inf, -np.inf, -np.inf  # hidden
    before = rng.standard_normal((64, H)).astype(np.float32)
    tops = rng.choice([-np.inf, -20.0, 0.0, 4.0, 30.0], 64).astype(np.float32)
    tops[7], tops[9], tops[48:] = -np.inf, 3, 50  # a row that saw nothing, a warp that stays
    before[np.isneginf(tops)] = 0
    result = []

    def kernel():
        state = _tiles(before), _rows(tops), _rows(np.zeros(64, np.float32))
        result.extend(online_softmax.soften(_tiles(scores), unit, *state))

    _run(monkeypatch, kernel)
    weights, sums, new, totals = result
    found = scores.max(1) * unit
    expected = np.where(found > tops + 8, found, tops)
    factor = np.where(
        expected == tops, 1.0, np.exp2(tops - np.where(expected == tops, 0, expected))
    )
    exact = np.exp2(scores * unit - np.where(np.isneginf(expected), 0, expected)[:, None])
    halves = [
        [Real(x) for one in tile for x in emulated_lanes.pair_of(one, np.float16).T]
        for tile in weights
    ]
    assert_close(_array(halves), exact.astype(np.float32), "bf16")
    assert_close(_array(sums), before * factor[:, None], "f32")
    columns = np.zeros((64, 4))  # each of four lanes has the totals of its own columns
    for half in (0, 1):
        row = 16 * _w + _g + 8 * half
        assert_close(new[half].value, expected[row], "f32")
        columns[row, _t] = totals[half].value
    assert_close(columns.sum(1), exact.sum(1), "f32")


@pytest.mark.parametrize(("seen", "tiles"), [(4, 8), (4, 16), (4, 4), (4, 2), (1, 8), (0, 8)])
def test_parts_are_merged_by_their_maxima(monkeypatch, seen, tiles):
    """F54, F150: `seen` of four parts hold anything."""
    rng = np.random.default_rng(seen)
    sums = rng.standard_normal((4, 64, H)).astype(np.float32)
    tops = (8 * rng.standard_normal((4, 64))).astype(np.float32)
    totals = rng.uniform(1, 9, (4, 64)).astype(np.float32)
    sums[seen:], tops[seen:], totals[seen:] = 0, -np.inf, 0
    tops[:1, 5], totals[:1, 5], sums[:1, 5] = -np.inf, 0, 0  # a warp that saw nothing
    out, lse = np.zeros((G, H), ml_dtypes.bfloat16), np.zeros(G, np.float32)

    def kernel(spare, rows, parts, out, lse):
        pieces = [emulated_lanes.address(spare, merge.ROUND_BYTES * w) for w in range(WARPS)]
        own = emulated_lanes.address(spare, emulated_lanes.warp() * merge.ROUND_BYTES)
        places = [emulated_lanes.address(parts, merge.PART_BYTES * i) for i in range(4)]
        for i, place in enumerate(places):
            state = _tiles(sums[i]), _rows(tops[i]), _rows(totals[i] / 4)  # of each of four lanes
            merge.merge_warps(*state, pieces, own, emulated_lanes.address(rows), place)
        to = emulated_lanes.address(out), emulated_lanes.address(lse)
        for rank in range(16 // tiles):  # as so many warpgroups would
            finish = partial(merge.merge_parts, places, Word(tiles * rank), tiles, 2.0, *to)
            emulated_lanes.when(emulated_lanes.warp().below(merge.warps(tiles)), finish)

    sizes = WARPS * merge.ROUND_BYTES, merge.ROWS_BYTES, 4 * merge.PART_BYTES
    _run(monkeypatch, kernel, *(Ref(np.zeros(n, np.uint8)) for n in sizes), Ref(out), Ref(lse))
    weight = np.exp2(tops - np.where(seen, tops.max(), 0)).reshape(4 * WARPS, G)
    total = (weight * totals.reshape(4 * WARPS, G)).sum(0)
    merged = np.einsum("pg,pgc->gc", weight, sums.reshape(4 * WARPS, G, H))
    columns = np.arange(H)
    wanted = np.zeros((G, H))
    wanted[:, 16 * (columns % 8) + columns // 8] = 2 * merged / np.where(total, total, 1)[:, None]
    assert_close(out.astype(np.float32), wanted, "bf16")
    with np.errstate(divide="ignore"):
        expected = (np.log2(total) + np.where(seen, tops.max(), 0)) * np.log(2)
    assert_close(lse, expected, "f32")


def test_slots_are_merged_as_the_plain_code_merges_them(monkeypatch):
    """Unused slots hold junk; the last query and head has none at all."""
    rng = np.random.default_rng(0)
    out = rng.standard_normal((1, 3, 2, 5, G, H)).astype(np.float16)
    lse = (3 * rng.standard_normal((1, 3, 2, 5, G))).astype(np.float32)
    unused = np.repeat(rng.random((1, 3, 2, 5, 1)) < 0.3, G, axis=-1)
    unused[0, 2, 1] = True
    out[unused], lse[unused] = np.nan, -np.inf
    merged = np.zeros((1, 3, 2, G, H), ml_dtypes.bfloat16)
    merged_lse = np.zeros((1, 3, 2, G), np.float32)
    refs = (Ref(x) for x in (out, lse, merged, merged_lse))
    launch(monkeypatch, MODULES, 6, slots._program, *refs)
    expected, expected_lse = merge_slots(jnp.asarray(out), jnp.asarray(lse))
    assert_close(merged.astype(np.float32), expected, "bf16")
    assert_close(merged_lse, expected_lse, "f32")


def _products(monkeypatch, fill, q, order):
    """(q k^T, p v) with p the identity's first 64 rows, by `fill(keys, values)` of a page."""
    k_half, v_half = Ref(np.zeros((2, Z, 64), np.float16)), Ref(np.zeros((Z, H), np.float16))
    result = {}

    def kernel(q, k_half, v_half):
        fill(emulated_lanes.address(k_half), emulated_lanes.address(v_half))
        row = emulated_lanes.address(q, emulated_lanes.warp() * (G * 2 * H))
        loaded = half_block.load_queries(row)
        sums = Sums(Z)
        for half, part in enumerate(loaded):
            operand = Ref(k_half.array[half]).matrix().T
            wgmma(sums, half_block.queries(part, order), operand)
        result["scores"] = _array(sums[...])

    _run(monkeypatch, kernel, Ref(q), k_half, v_half)
    tiles = v_half.array.reshape(Z // 8, 2, 8, 64).swapaxes(0, 1)
    values = np.concatenate([Ref(np.ascontiguousarray(x)).matrix() for x in tiles], 1)
    return result["scores"], values


def _columns(order):
    """The dimension in each column of `half_block`."""
    column = np.arange(H)
    chunk, t, e = column // 8, column % 8 // 2, column % 2
    pair = np.array(order)[chunk % 4, e]
    return 32 * (chunk // 4) + 8 * t + pair


def test_an_nvfp4_page_becomes_operands(monkeypatch):
    rng, limit = np.random.default_rng(1), 90
    k_codes, k_scales, keys = _nvfp4_page(rng)
    v_codes, v_scales, values = _nvfp4_page(rng, limit)
    q = rng.standard_normal((64, H)).astype(ml_dtypes.bfloat16)

    def fill(k_half, v_half):
        page = [emulated_lanes.address(Ref(x)) for x in (k_codes, k_scales, v_codes, v_scales)]
        nvfp4_block.decode_keys(*page[:2], k_half)
        nvfp4_block.decode_values(*page[2:], v_half, Word(limit))

    scores, stored = _products(monkeypatch, fill, q, nvfp4_block.ORDER)
    assert_close(scores, q.astype(np.float32) @ keys.T / DECODED, "f32")
    values = np.where(np.arange(Z)[:, None] < limit, values, 0)
    wanted = values[:, _columns(nvfp4_block.ORDER)] / DECODED
    assert_close(stored.astype(np.float32), wanted, "exact")


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_a_drafters_page_becomes_operands(monkeypatch, fmt):
    rng, limit = np.random.default_rng(2), 101
    pages = []
    for _ in range(2):
        if fmt == "fp8":
            codes = rng.integers(0, 256, (Z, H), dtype=np.uint8) & 0xBF
        else:
            codes = rng.standard_normal((Z, H)).astype(ml_dtypes.bfloat16).view(np.uint8)
        rows = np.asarray(decode(jnp.asarray(codes), None, fmt))
        codes[limit:] = 0xFF
        pages.append(
            (_swizzled(codes.reshape(-1, 128)), np.where(np.arange(Z)[:, None] < limit, rows, 0))
        )
    q = rng.standard_normal((64, H)).astype(ml_dtypes.bfloat16)

    def fill(k_half, v_half):
        places = half_block.place_key, half_block.place_value
        for (codes, _), to, place in zip(pages, (k_half, v_half), places, strict=True):
            row = page_block.page_row(emulated_lanes.address(Ref(codes)), fmt)
            page_block.write_row(row, to, place, Word(limit))

    scores, stored = _products(monkeypatch, fill, q, page_block.ORDER)
    assert_close(scores, q.astype(np.float32) @ pages[0][1].T, "bf16" if fmt == "bf16" else "f32")
    wanted = pages[1][1][:, _columns(page_block.ORDER)].astype(np.float16)
    assert_close(stored, wanted, "exact")


def test_a_blocks_own_rows_become_operands(monkeypatch):
    rng, T, K, head = np.random.default_rng(3), 5, 2, 1
    own = rng.standard_normal((T, K, H)).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((64, H)).astype(ml_dtypes.bfloat16)

    def fill(k_half, v_half):
        row = page_block.own_row(Ref(own), Word(head * 2 * H), K * 2 * H, T)
        page_block.write_row(row, k_half, half_block.place_key, Word(T))
        page_block.write_row(row, v_half, half_block.place_value, Word(T))

    scores, stored = _products(monkeypatch, fill, q, page_block.ORDER)
    rows = np.zeros((Z, H), np.float32)
    rows[:T] = own[:, head]
    assert_close(scores, q.astype(np.float32) @ rows.T, "bf16")
    assert_close(stored, rows[:, _columns(page_block.ORDER)].astype(np.float16), "exact")


@pytest.mark.parametrize("order", [nvfp4_block.ORDER, page_block.ORDER])
def test_results_leave_in_the_order_of_their_dimensions(monkeypatch, order):
    rng = np.random.default_rng(4)
    values = rng.standard_normal((64, H)).astype(np.float32)
    factors = rng.uniform(1, 2, 64).astype(np.float32)
    out = Ref(np.zeros((64, H), np.float16))

    def kernel(out):
        row = emulated_lanes.address(out, emulated_lanes.warp() * (G * 2 * H))
        tiles = _tiles(values[:, _columns(order)])
        pack = emulated_lanes.half2_of_reals
        half_block.store_rows(tiles, _rows(factors), row, order, pack)

    _run(monkeypatch, kernel, out)
    assert_close(out.array, (values * factors[:, None]).astype(np.float16), "exact")


def test_what_lies_outside_a_part_of_a_block_is_hidden(monkeypatch):
    values, result = np.zeros((64, Z), np.float32), []

    def kernel():
        first, end = emulated_lanes.warp() + 3, Word(100)
        result.append(half_block.hide(_tiles(values), first, end))
        result.append(half_block.hide(_tiles(values), 0, end))

    _run(monkeypatch, kernel)
    column, first = np.arange(Z), 3 + np.arange(64)[:, None] // 16
    wanted = [(column >= first) & (column < 100), np.broadcast_to(column < 100, (64, Z))]
    for tiles, seen in zip(result, wanted, strict=True):
        assert_close(_array(tiles) == 0, seen, "exact")
