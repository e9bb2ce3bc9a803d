"""sparse_attention's kernels on the GPU against the reference, over pages with junk wherever no key
is.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import LINE, Component
from pallas_kernels.sparse_attention import decode, prefill, reference, sparse_attention
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu

Z, H, G = 128, 128, 16
SCALE = H**-0.5
FIRST_LINE, JUNK = 8, 0xFF  # NaN in every scale
LENGTHS = [1, 127, 128, 129, 2047, 2048, 2049, 100_000]


@dataclass(frozen=True)
class Case:
    """Arguments of the op, and the component that k and v have."""

    arrays: tuple
    component: Component

    def run(self, implementation, dtype=jnp.bfloat16):
        """(out, lse) in float32."""

        def attend(q, pool, ids, table, positions):
            lines = FIRST_LINE, FIRST_LINE + self.component.lines
            k, v = (
                Pages(pool=pool, line=jnp.int32(line), component=self.component) for line in lines
            )
            return implementation(q.astype(dtype), k, v, ids, table, positions, scale=SCALE)

        out, lse = jax.jit(attend)(*self.arrays)
        return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


def _case(lengths, queries, heads, chosen=16, *, scales=(30, 62), empty=0.02, seed=0) -> Case:
    """The last queries of each length, its blocks at random places of a pool, each query's chosen
    at random, in random order, -1 between them; a share of scales is zero.
    """
    rng = np.random.default_rng(seed)
    component = Component(format="nvfp4", heads=heads, tokens=Z, width=H)
    counts = [max(1, -(-length // Z)) for length in lengths]
    order = rng.permutation(sum(counts) + 3)
    pool = np.full((len(order), FIRST_LINE + 2 * component.lines + 8, LINE), JUNK, np.uint8)
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        mine, order = order[:count], order[count:]
        table[b, :count] = mine
        for part in (0, 1):
            first = FIRST_LINE + part * component.lines
            middle, end = first + component.code_lines, first + component.lines
            pool[mine, first:middle] = _rows(rng, (0, 256), 64, count, heads, length)
            steps = _rows(rng, scales, 8, count, heads, length)
            steps[(rng.random(steps.shape) < empty) & (steps != JUNK)] = 0
            pool[mine, middle:end] = steps
    positions = np.asarray(lengths)[:, None] - queries + np.arange(queries)
    positions = np.maximum(positions, -1).astype(np.int32)
    ids = _ids(rng, positions, heads, chosen)
    q = rng.standard_normal((len(lengths), queries, G * heads, H))
    arrays = (
        jnp.asarray(q, jnp.bfloat16),
        *(jnp.asarray(x) for x in (pool, ids, table, positions)),
    )
    return Case(arrays, component)


def _rows(rng, values, width, count, heads, length):
    """Lines of `count` blocks of rows of random bytes, junk from token `length` on."""
    rows = rng.integers(*values, (count, heads, Z, width), dtype=np.uint8)
    token = (np.arange(count * Z) >= length).reshape(count, 1, Z, 1)
    return np.where(token, JUNK, rows).astype(np.uint8).reshape(count, -1, LINE)


def _ids(rng, positions, heads, chosen):
    ids = np.full((*positions.shape, heads, chosen), -1, np.int32)
    for where in np.ndindex(*positions.shape, heads):
        own = positions[where[:2]] // Z
        if own >= 0:
            some = np.array([own, *rng.permutation(own)[: chosen - 1]])
            ids[where][: len(some)] = some
            rng.shuffle(ids[where])
    return ids


def _assert_same(case, implementation):
    out, lse = case.run(implementation)
    expected, expected_lse = case.run(reference.sparse_attention, jnp.float32)
    assert_close(out, expected, "bf16")
    assert_close(lse, expected_lse, "f32")


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_decode_agrees_with_the_reference_over_ragged_batches(queries, heads):
    _assert_same(_case([*LENGTHS, 0], queries, heads), decode.sparse_attention)


@pytest.mark.parametrize("chosen", [1, 4, 5, 8, 16, 32])
def test_decode_takes_any_number_of_chosen_blocks(chosen):
    _assert_same(_case([2049, 8, 5000], 2, 2, chosen), decode.sparse_attention)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_prefill_agrees_with_the_reference_over_ragged_batches(heads):
    _assert_same(_case([128, 129, 2049, 5000, 40], 128, heads), prefill.sparse_attention)


def test_prefill_takes_tiles_of_odd_sizes():
    _assert_same(_case([300, 7000], 100, 2, 5), prefill.sparse_attention)


@pytest.mark.parametrize("implementation", [decode.sparse_attention, prefill.sparse_attention])
def test_every_finite_scale_is_read(implementation):
    _assert_same(_case([3000, 200], 32, 2, scales=(0, 0x50)), implementation)


def test_a_batch_and_a_sequence_alone_give_the_same_bits():
    """However many units there are, and however their parts are spread."""
    big = _case([3000] * 160, 1, 4)
    out, lse = big.run(decode.sparse_attention)
    for few in (1, 20, 40):
        q, pool, ids, table, positions = big.arrays
        arrays = q[:few], pool, ids[:few], table[:few], positions[:few]
        part, part_lse = Case(arrays, big.component).run(decode.sparse_attention)
        assert_close(part, out[:few], "exact")
        assert_close(part_lse, lse[:few], "exact")


def test_prefill_and_decode_agree():
    case = _case([4000, 600], 64, 2)
    out, lse = case.run(prefill.sparse_attention)
    expected, expected_lse = case.run(decode.sparse_attention)
    assert_close(out, expected, "bf16")
    assert_close(lse, expected_lse, "f32")


@pytest.mark.parametrize("queries", [1, 64])
def test_a_kernel_is_what_the_op_runs_on_this_device(queries):
    case = _case([3000], queries, 1)
    fast = prefill if queries == 64 else decode
    assert_close(case.run(sparse_attention)[0], case.run(fast.sparse_attention)[0], "exact")


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_kernel_refuses_with_a_sentence_what_it_cannot_do(name):
    with pytest.raises(ValueError, match=f"{name}: queries are float32, not bfloat16"):
        _case([3000], 64, 1).run(partial(sparse_attention, implementation=name), jnp.float32)
