"""block_select's kernels on the GPU against the reference, over pages with junk wherever no key is.

Queries and keys of few bits make every sum exact, so that selections agree to the last tie; on
other inputs they may differ between blocks whose scores differ by rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_select import (
    best_blocks,
    block_scores,
    block_select,
    mosaic,
    reference,
    schedule,
    score,
)
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import LINE, Component
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu

Z, I, C = 128, 128, 16
FIRST_LINE, LINES = 5, 80
NAN_SCALE, ZERO_SCALE = 0x7F, 0
COMPONENT = Component(format="nvfp4", heads=1, tokens=Z, width=I)
EXACT_SCALES, ALL_SCALES = (0x30, 0x40), (0, 0x7F)  # 0.5 .. 1.875, and every finite one
LENGTHS = [1, 127, 128, 129, 2047, 2048, 2049, 100_000, 0]
_select = jax.jit(
    block_select, static_argnames=("top_k", "init_blocks", "local_blocks", "implementation")
)


def _inputs(lengths, queries, heads, *, scales=EXACT_SCALES, dtype=jnp.bfloat16, seed=0):
    """q [B, T, K, I], pages, table [B, P], positions [B, T] of the last queries of each length."""
    rng = np.random.default_rng(seed)
    B, P = len(lengths), max(2, -(-max(lengths) // Z) + 3)
    table = np.full((B, P), -1, np.int32)
    used = [-(-length // Z) for length in lengths]
    ids = rng.permutation(sum(used) + 2)
    pool = np.full((len(ids), LINES, LINE), 0xFF, np.uint8)  # NaN in every scale
    for b, (count, length) in enumerate(zip(used, lengths, strict=True)):
        mine, ids = ids[:count], ids[count:]
        table[b, :count] = mine
        codes = rng.integers(0, 256, (count * Z, I // 2), dtype=np.uint8)
        steps = rng.integers(*scales, (count * Z, I // 16), dtype=np.uint8)
        codes[length:], steps[length:] = 0xFF, 0xFF
        end = FIRST_LINE + COMPONENT.code_lines
        pool[mine, FIRST_LINE:end] = codes.reshape(count, COMPONENT.code_lines, LINE)
        pool[mine, end : end + 8] = steps.reshape(count, 8, LINE)
    positions = np.asarray(lengths)[:, None] - queries + np.arange(queries)
    positions = np.maximum(positions, -1).astype(np.int32)
    q = rng.integers(-8, 9, (B, queries, heads, I))
    if scales != EXACT_SCALES:
        q = rng.standard_normal(q.shape)
    pages = Pages(pool=jnp.asarray(pool), line=jnp.int32(FIRST_LINE), component=COMPONENT)
    return jnp.asarray(q, dtype), pages, jnp.asarray(table), jnp.asarray(positions)


def _both(inputs, **options):
    options = {"top_k": C, **options}
    fast = _select(*inputs, implementation="mosaic", **options)
    return np.sort(fast, -1), np.sort(_select(*inputs, implementation="reference", **options), -1)


def _assert_same(inputs, **options):
    assert_close(*_both(inputs, **options), "exact")


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_ragged_batches_select_what_the_reference_selects(queries, heads):
    _assert_same(_inputs(LENGTHS, queries, heads))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_long_context_selects_what_the_reference_selects(dtype):
    _assert_same(_inputs([1_000_001], 1, 4, dtype=dtype, seed=1))


@pytest.mark.parametrize("seed", range(4))
def test_fresh_seeds_select_what_the_reference_selects(seed):
    lengths = np.random.default_rng(seed).integers(1, 20_000, 24).tolist()
    _assert_same(_inputs(lengths, 4, 4, seed=seed))


@pytest.mark.parametrize("queries", [16, 40, 128, 200])
def test_tiles_of_a_prompt_select_what_the_reference_selects(queries):
    _assert_same(_inputs([4_000, 131, 77], queries, 4, seed=2))


def test_scores_that_exist_in_parts_select_the_same(monkeypatch):
    monkeypatch.setattr(mosaic, "MAX_SCORE_BYTES", 2**17)
    inputs = _inputs([6_000, 900, 3], 100, 4, seed=3)
    fast = jax.jit(lambda *x: block_select(*x, top_k=C, implementation="mosaic"))(*inputs)
    assert_close(np.sort(fast, -1), _both(inputs)[1], "exact")


@pytest.mark.parametrize("options", [{"init_blocks": 2}, {"local_blocks": 3}, {"top_k": 1}])
def test_forced_blocks_count_inside_the_chosen(options):
    _assert_same(_inputs(LENGTHS, 8, 2, seed=4), **options)


@pytest.mark.parametrize("top_k", [4, 15, 32])
def test_other_numbers_of_blocks(top_k):
    _assert_same(_inputs([30_000, 5_000], 2, 4, seed=5), top_k=top_k)


@pytest.mark.parametrize("scale", [ZERO_SCALE, NAN_SCALE])
def test_of_equal_scores_the_lower_ids_are_chosen(scale):
    inputs = _inputs([100_000, 2_500], 1, 4, scales=(scale, scale + 1))
    fast, expected = _both(inputs)
    assert_close(fast, expected, "exact")
    assert fast[0, 0, 0].tolist() == [*range(C - 1), 100_000 // Z]


def test_keys_with_a_nan_scale_lose_to_all_others():
    q, pages, table, positions = _inputs([9_000], 8, 4, seed=6)
    scale_lines = FIRST_LINE + COMPONENT.code_lines + np.arange(8)
    spoiled = np.random.default_rng(6).random((pages.pool.shape[0], 8, LINE)) < 0.01
    pool = np.array(pages.pool)
    pool[:, scale_lines] = np.where(spoiled, NAN_SCALE, pool[:, scale_lines])
    pages = Pages(pool=jnp.asarray(pool), line=pages.line, component=COMPONENT)
    _assert_same((q, pages, table, positions))


def test_with_every_scale_selections_differ_by_rounding_at_most():
    inputs = _inputs([50_000, 3_000], 2, 4, scales=ALL_SCALES, seed=7)
    fast, expected = _both(inputs)
    scores = np.asarray(reference.block_scores(*inputs))
    for where in np.ndindex(fast.shape[:-1]):
        only = set(fast[where]) ^ set(expected[where])
        values = [scores[where][i] for i in only]
        spread = max(values) - min(values) if values else 0.0
        assert spread <= 1e-5 * np.abs(scores[where]).max(), (where, only)


@pytest.mark.parametrize(("queries", "heads"), [(1, 1), (1, 4), (8, 4), (3, 8)])
def test_scores_and_choice_apart_are_the_op(queries, heads):
    q, pages, table, positions = _inputs([20_000, 5_000, 100], queries, heads, seed=9)
    scores = block_scores(q, pages, table, positions, implementation="mosaic")
    where = {"block_size": Z, "top_k": C, "implementation": "mosaic"}
    found = best_blocks(scores, positions, **where)
    whole = block_select(q, pages, table, positions, top_k=C, implementation="mosaic")
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("queries", [1, 2, 4, 8, 20, 64])
def test_scores_are_the_references_times_a_power_of_two(queries):
    q, pages, table, positions = _inputs([20_000, 5_000], queries, 4, scales=ALL_SCALES, seed=8)
    B, T, K, _ = q.shape
    rows, blocks = q.reshape(B, T * K, I), table.shape[1]
    programs = score.programs(B, T * K, blocks)
    plan = schedule.make(positions, table, heads=K, block_size=Z, programs=programs)
    items = score.block_scores(rows, pages.pool, pages.line, plan, blocks)
    fast = np.asarray(items).reshape(B, -1, items.shape[-1])[:, : T * K, : table.shape[1]]
    largest = np.abs(np.asarray(q, np.float32)).max(-1).reshape(B, T * K, 1)
    factor = 2.0 ** (14 - np.floor(np.log2(largest))) / 128
    expected = np.asarray(reference.block_scores(q, pages, table, positions)).reshape(B, T * K, -1)
    for b, row in np.ndindex(B, T * K):
        seen = int(positions[b, row // K]) // Z
        assert_close(fast[b, row, :seen] / factor[b, row], expected[b, row, :seen], "f32")
