"""The proof of `tests.model.ties` can fail: hand numbers for its parts, and planted faults."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.cache import pool_layout
from pallas_kernels.block_select import block_select
from pallas_kernels.kv_insert import norm_rope, with_queries
from pallas_kernels.layouts.pages import Blocks, read
from pallas_kernels.layouts.pool import CacheFormats, through_cache
from pallas_kernels.sparse_attention import sparse_attention
from tests.model.models import random_model, small, tokens
from tests.model.oracles import is_best, is_rounding, nearest
from tests.model.ties import agreement, prove
from tests.model.ways import NUM_BLOCKS, walk_packed, walk_pages

NVFP4 = CacheFormats(kv="nvfp4", index="nvfp4")
MANY = tokens(40)  # beyond the two blocks of 16 that a query chooses

_through_cache = jax.jit(through_cache, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("fmt", "low", "high"), [("bf16", 1.0, 1.0078125), ("fp8", 1.0, 1.125), ("fp8", -18.0, -20.0)]
)
def test_both_sides_of_a_halfway_point_are_roundings_near_it_and_one_is_elsewhere(fmt, low, high):
    half = (low + high) / 2
    seen = np.array([low, high, half], np.float32)
    upward = np.copysign(2e-6, high - low)
    near, far = half + 0.5 * upward, half + 5 * upward
    assert is_rounding(seen, np.full(3, near), 2e-6, fmt).tolist() == [True, True, False]
    assert is_rounding(seen, np.full(3, far), 2e-6, fmt).tolist() == [False, True, False]


def test_a_scale_that_is_a_tie_explains_a_whole_group_and_no_mixture():
    """6.375 / 6 is halfway between the scales 1 and 1.125; the others are 1.6 and no tie."""
    x = np.full(16, 1.6, np.float32)
    x[0] = 6.375
    by_one = np.array([6.0] + [1.5] * 15, np.float32)
    by_next = np.array([6.75] + [1.6875] * 15, np.float32)
    mixed = np.where(np.arange(16) < 8, by_one, by_next)
    for seen, proven in ((by_one, True), (by_next, True), (mixed, False)):
        assert is_rounding(seen, x, 1e-5, "nvfp4").tolist() == [proven] * 16
    x[0] = 6.4
    assert not is_rounding(by_one, x, 1e-5, "nvfp4").any()


@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("compute", ["exact", "e4m3"])
def test_the_oracle_rounds_as_the_cache_does(fmt, compute):
    x = np.random.default_rng(0).standard_normal((40, 32), dtype=np.float32)
    x[:8] = np.round(x[:8] * 8) / 8  # halfway points among them
    stored = np.asarray(_through_cache(x, fmt, compute))
    np.testing.assert_array_equal(nearest(x, fmt, compute), stored)
    assert is_rounding(stored, x, 1e-6, fmt, compute).all()


def test_a_choice_is_best_up_to_the_gap():
    scores = np.array([np.inf, 2.0, 2.5, 2.4, -np.inf])
    choices = np.array([[0, 2], [3, 0], [0, 1], [2, 3], [0, 0], [0, -1], [0, 4]])
    assert is_best(scores, choices, 0.2).tolist() == [True, True] + [False] * 5
    few = np.array([np.inf, -np.inf])
    assert is_best(few, np.array([[0, -1], [0, 1], [-1, -1]]), 0.2).tolist() == [True, False, False]


def skip_rounding():
    return {"through_cache": lambda x, fmt, compute="exact": x}


def store_one_token_wrong():
    def insert(pool, layout, line, rows, slots, *others):
        wrong = jnp.where((slots.places == 5)[:, None, None], 1.5 * rows.v, rows.v)
        return with_queries(pool, layout, line, replace(rows, v=wrong), slots, *others)

    return {"with_queries": insert}


def leave_queries_unrotated():
    def insert(*operands):
        *_, t, queries = operands
        straight = jnp.ones_like(t.cos), jnp.zeros_like(t.sin), t.eps
        return with_queries(*operands)[0], [norm_rope(*query, *straight) for query in queries]

    return {"with_queries": insert}


def choose_the_block_before():
    def select(*operands, **options):
        return jnp.maximum(block_select(*operands, **options) - 1, -1)

    return {"block_select": select}


def read_own_key_unrounded():
    new = {}

    def insert(*operands):
        *_, rows, slots, t, _ = operands
        new.update(k=norm_rope(rows.k, t.k_norm, t.cos, t.sin, t.eps), slots=slots)
        return with_queries(*operands)

    def attend(q, k, *rest, scale):
        everywhere = jnp.broadcast_to(jnp.arange(NUM_BLOCKS), (k.num_heads, NUM_BLOCKS))
        blocks = jnp.moveaxis(read(k, everywhere), 0, 2)  # [P, Z, K, H]
        blocks = blocks.at[new["slots"].block_ids, new["slots"].places].set(new["k"])
        return sparse_attention(q, Blocks(blocks), *rest, scale=scale)

    return {"with_queries": insert, "sparse_attention": attend}


def decoded(fault=None):
    """The proof of a layer that decodes with a fault planted in it."""
    model = random_model(small(1))
    walk = walk_pages(model, MANY, pool_layout(model.config, NVFP4), [1] * len(MANY), fault)
    return prove(model, walk, NVFP4)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (store_one_token_wrong, "v are no nvfp4 roundings of the values"),
        (leave_queries_unrotated, " q are no f32 roundings"),
        (choose_the_block_before, "choices of blocks are not the best"),
        (read_own_key_unrounded, "outputs of attention are not those of what was read"),
    ],
)
def test_a_fault_in_decoding_is_no_tie(fault, complaint):
    with pytest.raises(AssertionError, match=complaint):
        decoded(fault)


def test_a_way_that_skips_rounding_is_rejected():
    model = random_model(small(1))
    walk = walk_packed(model, MANY, pool_layout(model.config, NVFP4), skip_rounding)
    with pytest.raises(AssertionError, match="k are no nvfp4 roundings"):
        prove(model, walk, NVFP4)


def test_two_ways_that_part_without_a_tie_are_rejected():
    """Each is right in its own format; a way with other roundings is another function."""
    model, fp8 = random_model(small(1)), CacheFormats(kv="fp8", index="fp8")
    packed = prove(model, walk_packed(model, MANY, pool_layout(model.config, fp8)), fp8)
    with pytest.raises(AssertionError, match="k are no fp8 roundings"):
        agreement(packed, decoded(), fp8, 16)
    assert agreement(packed, packed, fp8, 16).share == 1.0
    packed_walk = replace(packed.walk, logits=packed.walk.logits + np.float32(1e-3))
    with pytest.raises(AssertionError, match="logits of two ways differ"):
        agreement(packed, replace(packed, walk=packed_walk), fp8, 16)
