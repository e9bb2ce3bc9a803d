"""The kernels of training's sparse attention on a CPU: their programs, a thread for each warpgroup
(`team_emulator`), give the reference's values and gradients in bfloat16; and they lower to CUDA.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import half_block
from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.sparse_attention import (
    pairs,
    piece_sums,
    pieces,
    reference,
    training,
    training_backward,
    training_forward,
    training_rows,
)
from tests.numerics import assert_close
from tests.ops.team_emulator import Barrier, Ref, launch

B, T, K, C, G, H, Z = 2, 10, 2, 3, 16, 128, 128
SCALE = H**-0.5
GROUPS = 2  # of a piece: blocks have several


def _empty(*shape, dtype=ml_dtypes.bfloat16):
    return Ref(np.full(shape, -7 if dtype is np.int32 else np.nan, dtype))


def _run(monkeypatch, module, work, scale, results, scratch, inputs, places):
    """All programs of a kernel on emulated memory, from within a jitted function."""
    pieces_of_heads = work.block.shape[1]
    behind = (0, 0), (0, GROUPS * pieces.TOGETHER)
    places = [jnp.pad(x.reshape(K, -1), behind) for x in places]
    kernel = partial(module._program, pair=work.pair, scale=scale)

    def run(*arrays):
        refs = [*(Ref(np.asarray(x)) for x in arrays), *(_empty(*x, dtype=y) for x, y in results)]
        grid = {"head": K, "piece": pieces_of_heads}
        launch(monkeypatch, (module, training_rows, half_block), kernel, grid, 3, refs, scratch)
        return [one.array for one in refs[len(arrays) :]]

    shapes = [jax.ShapeDtypeStruct(*one) for one in results]
    return jax.pure_callback(run, shapes, *inputs, *places, work.block, work.first, work.groups)


def _attend(monkeypatch, q, k, v, work, scale):
    def scratch():
        return (
            *(_empty(2, Z, H), _empty(4, 64, H)),
            *(_empty(4 * GROUPS, dtype=np.int32) for _ in range(2)),
            _empty(2, 64, H, dtype=np.float16),
            *(Barrier(2), Barrier(2), Barrier(4, 4), Barrier(1, 4)),
        )

    slots = q.shape[0], K, C, G
    results = ((*slots, H), np.float16), (slots, np.float32)
    return _run(
        monkeypatch,
        training_forward,
        work,
        scale,
        results,
        scratch,
        (q, k, v),
        [work.place, work.last],
    )


def _differentiate(monkeypatch, q, d_out, k, v, rows, work, scale):
    def scratch():
        return (
            *(_empty(2, 2, 64, H), _empty(3, 2, 64, H), _empty(3, 3, 64, dtype=np.int32)),
            *(_empty(4 * GROUPS, dtype=np.int32), _empty(2, 2, 64, 64), _empty(2, 64, 64)),
            *(Barrier(), Barrier(4), Barrier(9, 3), Barrier(2, 3), Barrier(2)),
        )

    n = work.block.shape[1]
    results = (
        ((q.shape[0], K, C, G, H), ml_dtypes.bfloat16),
        ((K, n, 2, 2, 64, H), np.float32),
    )
    inputs = q, d_out, k, v, rows
    d_q, parts = _run(
        monkeypatch, training_backward, work, scale, results, scratch, inputs, [work.place]
    )
    return d_q, parts.reshape(K, n, 2, Z, H)


def _add(monkeypatch, *inputs):
    blocks = inputs[1].shape[1]
    shape = 2, blocks, Z, K, H
    grid = {"head": K, "block": blocks, "share": piece_sums._SHARES}

    def run(*arrays):
        sums = _empty(*shape, dtype=np.float32)
        refs = [*(Ref(np.asarray(x)) for x in arrays), sums]
        launch(monkeypatch, (piece_sums,), piece_sums._program, grid, 1, refs, tuple)
        return sums.array

    return jax.pure_callback(run, jax.ShapeDtypeStruct(shape, np.float32), *inputs)


@pytest.fixture
def emulated(monkeypatch):
    for module in (pieces, training_forward, training_backward):
        monkeypatch.setattr(module, "GROUPS", GROUPS)
    monkeypatch.setattr(training_forward, "attend", partial(_attend, monkeypatch))
    monkeypatch.setattr(training_backward, "differentiate", partial(_differentiate, monkeypatch))
    monkeypatch.setattr(piece_sums, "add", partial(_add, monkeypatch))
    monkeypatch.setattr(training.slots, "merge", pairs.merge_slots)


def _case():
    """q, k, v and the results' gradients; (ids, table, positions): padding and the first queries
    of a sequence's last block, and a tile of a sequence that shares block 3 with it.
    """
    rng = np.random.default_rng(0)
    positions = np.array([[-1, -1, *range(380, 388)], [*range(250, 260)]], np.int32)
    ids = np.full((B, T, K, C), -1, np.int32)
    for where in np.ndindex(B, T, K):
        own = positions[where[:2]] // Z
        if own >= 0:
            some = np.array([own, *rng.permutation(own)[: C - 1]])
            ids[where][: len(some)] = some
            rng.shuffle(ids[where])
    table = np.array([[4, 0, 3, 2], [3, 1, 5, -1]], np.int32)
    q = B, T, K * G, H
    arrays = [jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in (q, *[(6, Z, K, H)] * 2)]
    cotangents = jnp.asarray(rng.standard_normal(q), jnp.bfloat16), rng.standard_normal(q[:3])
    return arrays, [jnp.asarray(x) for x in (ids, table, positions)], cotangents


def _values_and_gradients(implementation, arrays, rest, cotangents):
    @jax.jit
    def run(q, k, v, d_out, d_lse):
        def attend(q, k, v):
            return implementation(q, Blocks(k), Blocks(v), *rest, scale=SCALE)

        (out, lse), backward = jax.vjp(attend, q, k, v)
        d_lse = jnp.where(lse == -jnp.inf, 0.0, d_lse)
        return out, lse, *backward((d_out.astype(out.dtype), d_lse))

    return run(*arrays, *cotangents)


def test_programs_give_the_references_values_and_gradients(emulated):
    arrays, rest, cotangents = _case()
    found = _values_and_gradients(training.sparse_attention, arrays, rest, cotangents)
    wide = [x.astype(jnp.float32) for x in arrays]
    expected = _values_and_gradients(reference.sparse_attention, wide, rest, cotangents)
    kinds = "bf16", "f32", "bf16", "bf16", "bf16"
    for actual, wanted, kind in zip(found, expected, kinds, strict=True):
        assert_close(actual.astype(jnp.float32), wanted, kind)


@pytest.mark.parametrize(("batch", "queries", "heads", "chosen"), [(1, 4096, 4, 16), (2, 70, 1, 3)])
def test_both_directions_lower(batch, queries, heads, chosen):
    def shape(*axes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(axes, dtype)

    def gradients(q, k, v, *places):
        def attend(q, k, v):
            args = q, Blocks(k), Blocks(v), *places
            return training.sparse_attention(*args, scale=SCALE)[0].astype(jnp.float32).sum()

        return jax.grad(attend, (0, 1, 2))(q, k, v)

    bf16 = jnp.bfloat16
    keys = shape(32, Z, heads, H, dtype=bf16)
    arguments = (
        *(shape(batch, queries, G * heads, H, dtype=bf16), keys, keys),
        *(shape(batch, queries, heads, chosen), shape(batch, 40), shape(batch, queries)),
    )
    lowered = jax.jit(gradients).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("sparse_attention_forward", "sparse_attention_backward", "add_pieces"):
        assert name in lowered
