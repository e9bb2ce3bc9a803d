"""Scoring split by context chooses what one device chooses: bit for bit, forced blocks and ties
included. Queries and keys are small whole numbers, so that sums are exact and many scores equal.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.presets import tiny
from minimax_jax.batch import Batch
from minimax_jax.context_blocks import chosen_blocks, own_blocks, own_positions
from pallas_kernels.layouts.pages import Blocks
from sharding import SERVE, local, make_mesh

pytestmark = pytest.mark.devices(8)
SIZE, HEADS, WIDTH, TOKENS = 4, 4, 8, 2
# The newest of a query's tokens: within, at and past edges of blocks and of shards; none at all.
NEWEST = (0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 47, 63, 90, 99, -1)


def problem(init_blocks: int):
    """Queries, keys and the places of 16 sequences of up to 25 blocks, of which 5 are chosen."""
    blocks, B = 25, len(NEWEST)
    of_q, of_k = jax.random.split(jax.random.key(init_blocks))
    index_q = jax.random.randint(of_q, (B, TOKENS, HEADS, WIDTH), -2, 3).astype(jnp.float32)
    keys = jax.random.randint(of_k, (B * blocks, SIZE, 1, WIDTH), -2, 3).astype(jnp.float32)
    order = jax.random.permutation(of_k, B * blocks).reshape(B, blocks).astype(jnp.int32)
    newest = jnp.array(NEWEST)[:, None]
    positions = jnp.where(newest < 0, -1, jnp.maximum(newest + jnp.arange(TOKENS) - 1, -1))
    positions = positions.astype(jnp.int32)
    batch = Batch(tokens=positions, positions=positions, block_table=order)
    choice = replace(tiny().indexer, top_k=5, init_blocks=init_blocks)
    return index_q, Blocks(keys), batch, choice


@pytest.mark.parametrize(("ranks", "init_blocks"), [(4, 0), (2, 3)])
def test_split_contexts_give_the_choice_of_one_device(ranks, init_blocks):
    index_q, keys, batch, choice = problem(init_blocks)
    heads = ("batch", None, "index_heads", None)
    split = local(
        lambda q, k, b: chosen_blocks(q, k, b, choice, ranks),
        in_axes=[heads, (None,), ("batch",)],
        out_axes=heads,
        rules=replace(SERVE, index_ranks=ranks),
    )
    expected = chosen_blocks(index_q, keys, batch, choice)
    with jax.set_mesh(make_mesh(ParallelConfig(dp=2, tp=4, dcp=ranks))):
        found = jax.jit(split)(index_q, keys, batch)
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_place_in_every_nth_block_sees_the_same_keys_of_it(n):
    """F148, F150: of a short context some see none."""
    positions = np.array([[-1, *range(40)]])
    for r in range(n):
        found = np.asarray(own_positions(jnp.asarray(positions), r, n, SIZE))[0]
        seen = [sum(key // SIZE % n == r for key in range(p + 1)) for p in positions[0]]
        np.testing.assert_array_equal(found + 1, seen)


def test_tokens_of_two_ranks_by_hand():
    """F148."""
    newest = jnp.array([[127, 128, 129, 256, 257]]) - 1
    seen = [(own_positions(newest, r, 2, 128)[0] + 1).tolist() for r in (0, 1)]
    assert seen == [[127, 128, 128, 128, 129], [0, 0, 1, 128, 128]]


def test_own_blocks_are_every_nth_and_padding():
    table = jnp.arange(10, 17)[None]
    assert own_blocks(table, 1, 3).tolist() == [[11, 14, -1]]
    assert own_blocks(table, 0, 3).tolist() == [[10, 13, 16]]
