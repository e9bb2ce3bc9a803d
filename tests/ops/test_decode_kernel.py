"""The whole decode kernel in numpy: places, ring, merges and results of a unit, in the order of its
program. (Who waits for whom is not emulated.)
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nvfp4_lanes, online_softmax
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import LINE, Component
from pallas_kernels.sparse_attention import decode, merge, nvfp4_page, reference
from pallas_kernels.sparse_attention.plan import Plan
from tests.numerics import assert_close
from tests.ops import emulated_lanes as lanes
from tests.ops.emulated_lanes import Real
from tests.ops.emulated_refs import Ref
from tests.ops.lane_emulator import launch

K, H, Z, G = 2, 128, 128, 16
MODULES = (decode, merge, nvfp4_page, nvfp4_lanes, online_softmax)
COMPONENT = Component(format="nvfp4", heads=K, tokens=Z, width=H)
FIRST_LINE, SCALE, JUNK = 8, H**-0.5, 0xFF


class _Codes(Ref):
    """Codes in shared memory: the copy engine puts 16-byte piece p of line l at p ^ (l % 8)."""

    def take(self, values):
        pieces = values.reshape(64, 8, 16)
        line, piece = np.ogrid[:64, :8]
        self.array.reshape(64, 8, 16)[line, piece ^ (line % 8)] = pieces


def _registers(array, _layout):
    """Of an array of equal values."""
    one = Real(np.full(128, float(np.asarray(array).flat[0]), np.float32))
    return [one] * 2 if array.ndim == 1 else [[one] * 4 for _ in range(array.shape[1] // 8)]


def _add(sums, weights, codes, scales, limit):
    page = lanes.address(codes), lanes.address(scales)
    return nvfp4_page.add_values(sums, weights, *page, lanes.scalar(limit))


def _pool(rng, blocks, length):
    """Pages of random rows, junk from token `length` of the sequence on."""
    pool = np.full((blocks, FIRST_LINE + 2 * COMPONENT.lines + 8, LINE), JUNK, np.uint8)
    behind = (np.arange(blocks * Z) >= length).reshape(blocks, 1, Z, 1)
    for part in (0, 1):
        first = FIRST_LINE + part * COMPONENT.lines
        middle, end = first + COMPONENT.code_lines, first + COMPONENT.lines
        for lines, width, top in ((slice(first, middle), 64, 256), (slice(middle, end), 8, 0x40)):
            rows = rng.integers(0, top, (blocks, K, Z, width), dtype=np.uint8)
            pool[:, lines] = np.where(behind, JUNK, rows).reshape(blocks, -1, LINE)
    return pool


def _shared(plan):
    """The kernel's memory, full of junk."""
    *arrays, there = decode._scratch(plan)
    memory = [np.full(x.shape, JUNK, np.uint8).astype(x.dtype) for x in arrays]
    return [_Codes(memory[0]), *map(Ref, memory[1:]), Ref(np.zeros(there.num_barriers))]


@pytest.mark.parametrize(
    ("plan", "unit"),
    [(Plan(together=2, teams=1, ctas=1), 1), (Plan(together=1, teams=2, ctas=1), 0)],
)
def test_a_unit_of_the_whole_kernel_is_the_references(monkeypatch, plan, unit):
    """Seven of nine blocks in any order, one of them unused, the newest with 37 tokens."""
    rng, length = np.random.default_rng(1), 8 * Z + 37
    pool = _pool(rng, 9, length)
    ids = np.stack([rng.permutation(9)[:7] for _ in range(K)]).reshape(1, 1, K, 7).astype(np.int32)
    ids[0, 0, :, 2], ids[0, 0, :, 4] = -1, 8
    ids[0, 0, 1, 6:] = -1
    table = np.arange(9, dtype=np.int32)[None]  # pages lie in the order of their sequence
    positions = np.array([[length - 1]], np.int32)
    q = rng.standard_normal((1, 1, G * K, H)).astype(ml_dtypes.bfloat16)
    lines = FIRST_LINE, FIRST_LINE + COMPONENT.lines
    out = np.zeros(q.shape, ml_dtypes.bfloat16)
    lse = np.zeros(q.shape[:3], np.float32)
    inputs = [Ref(x) for x in (q, ids, table, positions, *(np.array([x]) for x in lines), pool)]

    def kernel(*refs):
        decode.plgpu.layout_cast = _registers
        decode.plgpu.warp_map = lambda function: function(0)
        index = {"unit": unit, "team": decode.lax.axis_index("team"), "rank": 0}
        decode.lax.axis_index = index.get
        decode._attend(*refs, plan=plan, scale=SCALE)

    monkeypatch.setattr(decode, "_add", _add)
    refs = [*inputs, Ref(out), Ref(lse), *_shared(plan)]
    for _ in range(plan.teams):  # one team after the other: the last results have all parts
        launch(monkeypatch, MODULES, 1, kernel, *refs, teams=plan.teams)
    pages = (Pages(pool=jnp.asarray(pool), line=jnp.int32(x), component=COMPONENT) for x in lines)
    expected, expected_lse = reference.sparse_attention(
        jnp.asarray(q, jnp.float32), *pages, *map(jnp.asarray, (ids, table, positions)), scale=SCALE
    )
    heads = np.s_[0, 0, unit * G : (unit + 1) * G]
    assert_close(out[heads].astype(np.float32), expected[heads], "bf16")
    assert_close(lse[heads], expected_lse[heads], "f32")
    assert not np.delete(out, np.r_[heads[2]], axis=2).any(), "another unit's results"
