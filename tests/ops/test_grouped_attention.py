"""Training's sparse attention, blocks outside and queries inside: values and gradients are those of
the reference; memory does not grow with the context.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.sparse_attention import grouped, reference, sparse_attention
from pallas_kernels.sparse_attention.pairs import Pair, group
from tests.numerics import assert_close

Z, C, K, G, H = 8, 4, 2, 3, 16
B, T, P, BLOCKS = 2, 48, 12, 30
SCALE = H**-0.5


def _inputs(dtype=jnp.float32, seed=0):
    """(q, k, v) and (ids, table, positions): a tile inside a sequence, one that begins with padding
    and whose table ends early.
    """
    rng = np.random.default_rng(seed)
    positions = np.maximum(np.stack([np.arange(40, 88), np.arange(-4, 44)]), -1).astype(np.int32)
    ids = np.full((B, T, K, C), -1, np.int32)
    for where in np.ndindex(B, T, K):
        own = positions[where[:2]] // Z
        if own >= 0:
            some = np.array([own, *rng.permutation(own)[: C - 1]])
            ids[where][: len(some)] = some
            rng.shuffle(ids[where])
    table = np.stack([rng.permutation(BLOCKS)[:P] for _ in range(B)]).astype(np.int32)
    table[1, 6:] = -1
    shapes = (B, T, K * G, H), (BLOCKS, Z, K, H), (BLOCKS, Z, K, H)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return arrays, [jnp.asarray(x) for x in (ids, table, positions)]


def _values_and_gradients(implementation, arrays, rest):
    """(out, lse) and the gradients of a sum of both that weighs every element differently."""
    rng = np.random.default_rng(9)
    weights = rng.standard_normal((B, T, K * G, H)), rng.standard_normal((B, T, K * G))

    def loss(q, k, v):
        out, lse = implementation(q, Blocks(k), Blocks(v), *rest, scale=SCALE)
        seen = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(out * weights[0]) + jnp.sum(seen * weights[1]), (out, lse)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, results), gradients = run(*arrays)
    return results, gradients


def test_values_and_gradients_are_the_references():
    arrays, rest = _inputs()
    results, gradients = _values_and_gradients(grouped.sparse_attention, arrays, rest)
    expected = _values_and_gradients(reference.sparse_attention, arrays, rest)
    for actual, wanted in zip((*results, *gradients), (*expected[0], *expected[1]), strict=True):
        assert_close(actual, wanted, "f32")


def test_in_bfloat16_gradients_stay_within_its_rounding():
    arrays, rest = _inputs(jnp.bfloat16)
    _, gradients = _values_and_gradients(grouped.sparse_attention, arrays, rest)
    wide = [x.astype(jnp.float32) for x in arrays]
    _, expected = _values_and_gradients(reference.sparse_attention, wide, rest)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert_close(actual.astype(jnp.float32), wanted, "bf16")


def test_tiles_of_a_sequence_are_one_function(monkeypatch):
    arrays, rest = _inputs()
    whole = _values_and_gradients(grouped.sparse_attention, arrays, rest)
    monkeypatch.setattr(grouped, "_QUERIES", 16)
    cut = _values_and_gradients(grouped.sparse_attention, arrays, rest)
    for actual, wanted in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        assert_close(actual, wanted, "f32")


@pytest.mark.parametrize("size", [1, 4, 8])
def test_groups_hold_every_pair_once_and_one_block_each(size):
    ids = _inputs()[1][0][0, :, 0]
    pair = Pair.of(T, C)
    groups = jax.jit(lambda ids: group(pair.sort(ids, ids >= 0), pair, P, size))(ids)
    used = np.asarray(groups.used)
    block = np.broadcast_to(np.asarray(groups.block)[:, None], used.shape)
    query, slot = np.asarray(groups.query), np.asarray(groups.slot)
    found = zip(query[used], slot[used], block[used], strict=True)
    ids = np.asarray(ids)
    wanted = [(t, c, ids[t, c]) for t, c in np.ndindex(T, C) if ids[t, c] >= 0]
    assert sorted(tuple(map(int, x)) for x in found) == sorted(tuple(map(int, x)) for x in wanted)


def test_the_backward_pass_keeps_no_scores():
    """A context of four times the tiles needs no more beside its operands and results."""
    sizes = []
    for tiles in (2, 8):
        queries = 64 * tiles

        def loss(q, k, v, ids, table, positions):
            out, _ = grouped.sparse_attention(
                q, Blocks(k), Blocks(v), ids, table, positions, scale=SCALE
            )
            return jnp.sum(out)

        q = jax.ShapeDtypeStruct((tiles, 64, K * G, H), jnp.float32)
        k = jax.ShapeDtypeStruct((queries // Z, Z, K, H), jnp.float32)
        integers = [(tiles, 64, K, C), (tiles, 8), (tiles, 64)]
        rest = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, *rest).compile()
        operands = 4 * (np.prod(q.shape) + 2 * np.prod(k.shape))
        sizes.append(compiled.memory_analysis().temp_size_in_bytes - 4 * operands)
    scores_of_a_tile = 64 * C * G * Z * 4
    assert sizes[1] - sizes[0] < 6 * scores_of_a_tile


def test_it_refuses_pages_and_tiles_without_a_divisor():
    arrays, rest = _inputs()
    q, k, v = arrays
    odd = jnp.repeat(q[:, :1], 37, axis=1)
    reason = grouped.refuse(odd[:, :31], Blocks(k), Blocks(v), *rest, scale=SCALE)
    assert reason == "31 queries have no divisor from 32 to 512"
    with pytest.raises(ValueError, match="grouped: needs a GPU, and JAX runs on cpu"):
        sparse_attention(q, Blocks(k), Blocks(v), *rest, scale=SCALE, implementation="grouped")
