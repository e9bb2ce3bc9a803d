"""The kernels of block scores in the emulator of lanes, against the reference.

Copies of pieces are under way there until the warps wait for them: before that, a piece's place
holds bytes that spoil every score.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nvfp4_lanes
from pallas_kernels.block_select import (
    few_pieces,
    many_pieces,
    page_tiles,
    pieces,
    query_rows,
    reference,
    schedule,
    score,
    whole_pages,
)
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import LINE, Component
from tests.numerics import assert_close
from tests.ops import emulated_lanes
from tests.ops.emulated_lanes import Ref
from tests.ops.lane_emulator import launch

Z, I, FIRST, HEADS = 128, 128, 3, 4
PROGRAMS = 4
INDEX = Component(format="nvfp4", heads=1, tokens=Z, width=I)
MODULES = (few_pieces, many_pieces, whole_pages, pieces, page_tiles, query_rows, nvfp4_lanes)
_block_scores = jax.jit(reference.block_scores)


class Copies:
    """`lanes.copies` of warps in step: a group of copies lands when a wait leaves it no time."""

    def __init__(self):
        self.started, self.groups = [], []

    def copy_async(self, to, source, size):
        wanted = emulated_lanes.word(size).value
        for i in np.flatnonzero(emulated_lanes._active):
            assert to[1][i] % 16 == 0 and source[1][i] % 16 == 0, "16 bytes are aligned"
            found = source[0][source[1][i] : source[1][i] + 16]
            landing = to[0][to[1][i] : to[1][i] + 16]
            landing[:] = 0xFF
            self.started.append((landing, found if wanted[i] else np.zeros(16, np.uint8)))

    def commit_copies(self):
        self.groups.append(self.started)
        self.started = []

    def wait_for_copies(self, under_way):
        for group in self.groups[: len(self.groups) - under_way]:
            for landing, found in group:
                landing[:] = found
        self.groups = self.groups[len(self.groups) - under_way :]


def _index_pages(rng, blocks):
    """Blocks of random codes and scales, with every byte around them 0xFF."""
    pool = np.full((blocks, FIRST + INDEX.lines + 2, LINE), 0xFF, np.uint8)
    codes = slice(FIRST, FIRST + INDEX.code_lines)
    pool[:, codes] = rng.integers(0, 256, (blocks, INDEX.code_lines, LINE), dtype=np.uint8)
    scales = slice(FIRST + INDEX.code_lines, FIRST + INDEX.lines)
    pool[:, scales] = rng.integers(0, 0x7F, (blocks, 8, LINE), dtype=np.uint8)
    return pool


def _whole_memory(rows):
    """Shared memory of a program that reads whole pages."""
    queries = (rows // 8, 4, 32, 8) if rows <= 16 else (2, rows, 64)
    stages = whole_pages.STAGES
    pages = np.zeros((stages, schedule.STEP, whole_pages.PAGE_LINES, LINE), np.uint8)
    return pages, np.zeros(queries, np.float16), np.zeros(stages)


def _pieces_memory(rows):
    """Shared memory of the programs of a CTA that fetch pieces."""
    teams = pieces.TEAMS
    queries = (teams * rows // 8, 4, 32, 8) if rows == 8 else (teams * 2, rows, 64)
    rings = np.full((teams, schedule.STEP * page_tiles.PAGE_BYTES), 0xFF, np.uint8)
    return np.zeros(queries, np.float16), rings


def _emulated(monkeypatch, kernel, q, pool, table, positions):
    """Scores [items, N, P4] by `PROGRAMS` programs of a kernel."""
    batch, rows, _ = q.shape
    size, items = schedule.rows_of_item(rows), batch * schedule.items_of_sequence(rows)
    where = jnp.asarray(positions), jnp.asarray(table)
    heads = rows // positions.shape[1]
    plan = schedule.make(*where, heads=heads, block_size=Z, programs=PROGRAMS)
    scores = np.full((items, size, -(-table.shape[1] // 4) * 4), np.nan, np.float32)
    inputs = q, pool, np.array([FIRST]), np.asarray(plan.counts), np.asarray(plan.entries)
    memory = _whole_memory if kernel is whole_pages else _pieces_memory
    refs = [Ref(x) for x in (*inputs, scores, *memory(size))]
    copies, teams = Copies(), kernel.TEAMS
    monkeypatch.setattr(pieces, "copies", copies)
    program, ctas = partial(kernel.program, size), PROGRAMS // teams
    launch(monkeypatch, MODULES, ctas, program, *refs, teams=teams)
    assert not copies.started and not copies.groups, "a program ended before its copies"
    return scores


@pytest.mark.parametrize(
    ("kernel", "queries", "newest"),
    [
        (whole_pages, 1, 700),
        (whole_pages, 4, 700),
        (whole_pages, 16, 700),
        (whole_pages, 33, 700),
        (few_pieces, 1, 5000),
        (few_pieces, 2, 700),
        (many_pieces, 8, 5000),
    ],
)
def test_scores_are_the_references_times_a_power_of_two(monkeypatch, kernel, queries, newest):
    rng, B, P = np.random.default_rng(queries), 2, newest // Z + 1
    pool = _index_pages(rng, B * P)
    table = rng.permutation(B * P).reshape(B, P).astype(np.int32)
    positions = np.array([[newest], [180]], np.int32) + np.arange(queries, dtype=np.int32)
    q = rng.standard_normal((B, queries * HEADS, I)).astype(ml_dtypes.bfloat16)
    fast = _emulated(monkeypatch, kernel, q, pool, table, positions)
    pages = Pages(pool=jnp.asarray(pool), line=jnp.int32(FIRST), component=INDEX)
    q_BTKI = jnp.asarray(q, jnp.float32).reshape(B, queries, HEADS, I)
    where = jnp.asarray(table), jnp.asarray(positions)
    expected = np.asarray(_block_scores(q_BTKI, pages, *where))
    exponents = np.floor(np.log2(np.abs(q.astype(np.float32)).max(-1)))
    for b, row in np.ndindex(B, queries * HEADS):
        seen = positions[b, row // HEADS] // Z
        got = fast.reshape(B, -1, fast.shape[-1])[b, row, :seen] * 2.0 ** (exponents[b, row] - 7)
        assert_close(got, expected[b, row // HEADS, row % HEADS, :seen], "f32")


@pytest.mark.parametrize("kernel", [whole_pages, few_pieces])
def test_a_nan_scale_spoils_its_token_only(monkeypatch, kernel):
    rng, P = np.random.default_rng(1), 3
    pool = _index_pages(rng, P)
    scales = pool[:, FIRST + INDEX.code_lines : FIRST + INDEX.lines].reshape(P, Z, 8)
    scales[0, 5, 3], scales[1, :, 0] = 0x7F, 0x7F
    q = np.ones((1, 1, I), ml_dtypes.bfloat16)
    table, positions = np.arange(P, dtype=np.int32)[None], np.array([[2 * Z]], np.int32)
    fast = _emulated(monkeypatch, kernel, q, pool, table, positions)
    pages = Pages(pool=jnp.asarray(pool), line=jnp.int32(FIRST), component=INDEX)
    where = jnp.asarray(table), jnp.asarray(positions)
    expected = _block_scores(jnp.ones((1, 1, 1, I)), pages, *where)
    assert_close(fast[0, 0, :1] * 2.0**-7, np.asarray(expected)[0, 0, 0, :1], "f32")
    assert np.isnan(fast[0, 0, 1])  # every token of block 1


def test_whole_pages_stay_where_they_are_as_fast_or_pieces_were_not_run():
    names = {
        (1, 4, 4096): "block_scores_few",
        (1, 8, 8192): "block_scores_few",
        (64, 4, 1024): "block_scores",
        (1, 16, 4096): "block_scores",
        (16, 32, 1024): "block_scores_many",
        (1, 32, 4096): "block_scores_many",
        (1, 64, 4096): "block_scores",
        (128, 512, 128): "block_scores",
    }
    assert {case: score._kernel(*case).name for case in names} == names
