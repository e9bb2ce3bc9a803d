"""Training's sparse attention on the GPU: values and gradients are the float32 reference's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import choose
from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.sparse_attention import SPARSE, reference, sparse_attention, training
from tests.numerics import assert_close, relative_error

pytestmark = pytest.mark.gpu

Z, H, G = 128, 128, 16
SCALE = H**-0.5
JUNK = 3  # blocks that no table names, full of NaN


def _case(lengths, queries, heads, chosen=16, seed=0):
    """(q, k, v) in bfloat16 and (ids, table, positions): the last `queries` tokens of sequences of
    these lengths, a tile each, whose blocks lie in any order; before a sequence's first token the
    position is -1. Every query chooses at random, in random order, -1 between.
    """
    rng = np.random.default_rng(seed)
    counts = [max(1, -(-length // Z)) for length in lengths]
    order = rng.permutation(sum(counts) + JUNK)
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]
    positions = np.asarray(lengths)[:, None] - queries + np.arange(queries)
    positions = np.maximum(positions, -1).astype(np.int32)
    ids = np.full((*positions.shape, heads, chosen), -1, np.int32)
    for where in np.ndindex(*positions.shape, heads):
        own = positions[where[:2]] // Z
        if own >= 0:
            some = np.array([own, *rng.permutation(own)[: chosen - 1]])
            ids[where][: len(some)] = some
            rng.shuffle(ids[where])
    ids[0, queries // 2] = -1  # a query with a position and no keys
    blocks = sum(counts) + JUNK
    shapes = (len(lengths), queries, G * heads, H), *[(blocks, Z, heads, H)] * 2
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    k[order], v[order] = np.nan, np.nan
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    return arrays, [jnp.asarray(x) for x in (ids, table, positions)]


@partial(jax.jit, static_argnames="implementation")
def _values_and_gradients(implementation, arrays, rest, cotangents):
    def attend(q, k, v):
        return implementation(q, Blocks(k), Blocks(v), *rest, scale=SCALE)

    (out, lse), backward = jax.vjp(attend, *arrays)
    d_out, d_lse = cotangents
    d_lse = jnp.where(lse == -jnp.inf, 0.0, d_lse)
    return out, lse, *backward((d_out.astype(out.dtype), d_lse))


def _assert_same(arrays, rest, seed=1):
    rng = np.random.default_rng(seed)
    cotangents = [jnp.asarray(rng.standard_normal(arrays[0].shape[:n]), "f4") for n in (4, 3)]
    cotangents[0] = cotangents[0].astype(jnp.bfloat16)
    found = _values_and_gradients(training.sparse_attention, arrays, rest, cotangents)
    wide = [jnp.nan_to_num(x.astype(jnp.float32)) for x in arrays]
    expected = _values_and_gradients(reference.sparse_attention, wide, rest, cotangents)
    kinds = "bf16", "f32", "bf16", "bf16", "bf16"
    for name, actual, wanted, kind in zip(
        ("out", "lse", "dq", "dk", "dv"), found, expected, kinds, strict=True
    ):
        actual, wanted = np.asarray(actual.astype(jnp.float32)), np.asarray(wanted)
        print(name, relative_error(actual, wanted))
        assert_close(actual, wanted, kind)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_gradients_are_the_references_over_ragged_sequences(heads):
    _assert_same(*_case([300, 129, 2049, 40, 5000], 200, heads))


@pytest.mark.parametrize("chosen", [5, 32])
def test_any_number_of_chosen_blocks(chosen):
    _assert_same(*_case([128, 7000], 128, 2, chosen))


def test_tiles_of_one_sequence_add_up_in_its_blocks():
    arrays, (ids, table, positions) = _case([2048], 2048, 2)
    whole = arrays[0].shape
    tiles = 8, 256
    q = arrays[0].reshape(*tiles, *whole[2:])
    rest = ids.reshape(*tiles, *ids.shape[2:]), jnp.repeat(table, 8, axis=0)
    _assert_same([q, *arrays[1:]], [*rest, positions.reshape(tiles)])


def test_a_block_of_many_pieces_and_few_queries():
    """One block chosen by all, and blocks that hardly a query chooses."""
    _assert_same(*_case([300], 100, 1, 1))
    arrays, (ids, table, positions) = _case([1500], 1500, 4)
    _assert_same(arrays, [jnp.where(ids == 3, ids, -1), table, positions])


def test_chunks_of_queries_are_one_function(monkeypatch):
    monkeypatch.setattr(training, "_MAX_PARTIAL", 140 << 17)  # 140 queries of 2 KV heads, of 900
    jax.clear_caches()
    _assert_same(*_case([450, 3000], 450, 2))


def test_results_are_the_same_bits_from_run_to_run():
    arrays, rest = _case([4096], 4096, 4)
    cotangents = arrays[0] * 0.5, jnp.ones(arrays[0].shape[:3], jnp.float32)
    first, second = (
        _values_and_gradients(training.sparse_attention, arrays, rest, cotangents) for _ in "ab"
    )
    for one, other in zip(first, second, strict=True):
        assert_close(one.astype(jnp.float32), other.astype(jnp.float32), "exact")


def test_it_is_what_the_op_runs_on_this_device():
    (q, k, v), rest = _case([300], 200, 2)
    assert choose(SPARSE, None, q, Blocks(k), Blocks(v), *rest, scale=SCALE).name == "training"
    with pytest.raises(ValueError, match="training: .* are float32, not bfloat16"):
        wide = q.astype(jnp.float32), Blocks(k), Blocks(v), *rest
        sparse_attention(*wide, scale=SCALE, implementation="training")
