"""Packed, whole prefill, chunked prefill, decode and verify are one function, in every cache
format.

Where caches round, deep models agree up to ties, each of which is proven (`tests.model.ties`).
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.batch import Batch, pack
from minimax_jax.cache import Cache, pool_layout
from minimax_jax.model import Model
from minimax_jax.steps import score
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from tests.model.models import random_model, small, tokens
from tests.model.ties import Agreement, agreement, prove
from tests.model.ways import NUM_BLOCKS, chunk_batches, packed_batch, walk_packed, walk_pages
from tests.numerics import assert_close

FORMATS = ("f32", "bf16", "fp8", "nvfp4")
# Around block edges, and far beyond the two blocks of 16 that a query chooses.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 49, 320)


def packed_logits(model: Model, ids: list[int], layout: PoolLayout) -> np.ndarray:
    out = score(model, None, packed_batch(ids, layout.block_size), layout)
    return np.asarray(out).reshape(-1, out.shape[-1])[: len(ids)]


@jax.jit
def run_chunk(model: Model, cache: Cache, batch: Batch):
    hidden, cache_out, _ = model.hidden(batch, cache.layout, cache)
    return model.logits(hidden), cache_out


def paged_logits(model: Model, ids: list[int], layout: PoolLayout, chunks: list[int]) -> np.ndarray:
    """Logits of a sequence run through scattered pages, chunk by chunk."""
    cache, out = Cache.empty(layout, NUM_BLOCKS), []
    for batch, count in zip(chunk_batches(ids, chunks), chunks, strict=True):
        logits, cache = run_chunk(model, cache, batch)
        out.append(np.asarray(logits[0, :count]))
    return np.concatenate(out)


@cache
def deep_model() -> Model:
    """For tests that do not change it."""
    return random_model(small())


def grid_model(seed: int = 0) -> Model:
    """One layer whose keys and values are exact in float32 in any order of summation.

    Embeddings are +-1 and the norm's epsilon 0, so normed inputs are +-1; weights are multiples of
    1/8. So no path rounds a key differently, no stored code can differ, and every format must agree
    to the rounding of attention itself.
    """
    model = random_model(small(1, norm_eps=0.0), seed)
    model.embedding.set_value(jnp.sign(model.embedding.get_value()))
    attention = model.layers[0].attention
    model.layers[0].input_norm.weight.set_value(jnp.zeros_like(model.norm.weight.get_value()))
    assert attention.indexer is not None
    for linear in (attention.k_proj, attention.v_proj, attention.indexer.k_proj):
        linear.weight.set_value(jnp.round(linear.weight.get_value() * 16) / 8)
    return model


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_gives_the_same_logits_packed_chunked_and_decoded(fmt):
    model, ids = grid_model(), tokens(100)
    layout = pool_layout(model.config, CacheFormats(kv=fmt, index=fmt))
    packed = packed_logits(model, ids, layout)
    for chunks in ([100], [33, 47, 20], [96, 1, 1, 1, 1], [92, 8]):
        paged = paged_logits(model, ids, layout, chunks)
        assert np.abs(paged - packed).max() <= 1e-4, (chunks, np.abs(paged - packed).max(-1))


@pytest.mark.parametrize("length", LENGTHS)
def test_deep_models_agree_around_block_edges_and_far_beyond_the_chosen_blocks(length):
    model, ids = deep_model(), tokens(length)
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    packed = packed_logits(model, ids, layout)
    decoded = min(length, 3)
    prompt = [length - decoded] if length > decoded else []
    for chunks in ([length], prompt + [1] * decoded):
        paged = paged_logits(model, ids, layout, chunks)
        assert np.abs(paged - packed).max() <= 1e-4, (chunks, np.abs(paged - packed).max(-1))


def chunkings(length: int) -> list[list[int]]:
    """Whole, decoded token by token after a prompt, and, if long, in parts around block edges."""
    if length < 50:
        decoded = min(length - 1, 3)
        return [[length], [length - decoded] + [1] * decoded]
    edges = [15, 1, 1, 14, 1, 1, 15, 1]  # up to 15, 16, 17, 31, 32, 33, 48, 49
    return [[length], [length - 20] + [1] * 20, [*edges, 1, length - 1 - sum(edges)]]


def prove_all_ways(model: Model, formats: CacheFormats, length: int) -> list[Agreement]:
    """Proves each way and its agreement with the packed one; prints the ties."""
    ids, layout = tokens(length), pool_layout(model.config, formats)
    packed = prove(model, walk_packed(model, ids, layout), formats)
    print(f"\npacked: {packed.ties} of {packed.codes} codes are ties")
    agreements = []
    for chunks in chunkings(length):
        paged = prove(model, walk_pages(model, ids, layout, chunks), formats)
        agreements.append(agreement(packed, paged, formats, layout.block_size))
        print(f"{chunks}: {paged.ties} on the same inputs; end to end {agreements[-1]}")
    return agreements


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_ways_of_deep_models_differ_only_by_proven_ties(fmt, length):
    agreements = prove_all_ways(deep_model(), CacheFormats(kv=fmt, index=fmt), length)
    if fmt == "f32":  # nothing is rounded; choices alone can be ties
        assert min(one.share for one in agreements) >= 0.9


def test_e4m3_queries_and_keys_differ_only_by_proven_ties():
    formats = CacheFormats(kv="nvfp4", index="nvfp4", compute="e4m3")
    prove_all_ways(random_model(small(1)), formats, 100)


def test_the_walk_is_the_model():
    model, ids = deep_model(), tokens(49)
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    chunks = [46, 1, 1, 1]
    packed, paged = walk_packed(model, ids, layout), walk_pages(model, ids, layout, chunks)
    assert_close(packed.logits, packed_logits(model, ids, layout), "f32_logits")
    assert_close(paged.logits, paged_logits(model, ids, layout, chunks), "f32_logits")


def test_the_cache_format_changes_the_logits():
    model, ids = random_model(small()), tokens(100)
    exact, coarse = (
        packed_logits(model, ids, pool_layout(model.config, CacheFormats(kv=fmt, index="f32")))
        for fmt in ("f32", "nvfp4")
    )
    assert np.abs(exact - coarse).max() > 1e-2


def test_segments_of_a_pack_do_not_see_each_other():
    model = random_model(small())
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    first, second = tokens(50, seed=1), tokens(70, seed=2)
    batch, places = pack(np.array(first + second), np.repeat([4, 9], [50, 70]), 16)
    out = score(model, None, batch, layout)
    together = np.asarray(out).reshape(-1, out.shape[-1])[places]
    apart = [packed_logits(model, ids, layout) for ids in (first, second)]
    np.testing.assert_allclose(together, np.concatenate(apart), atol=1e-4)


def test_physical_places_of_blocks_do_not_matter():
    """F58: a block's place is not its tokens' positions."""
    model, ids = random_model(small()), tokens(48)
    layout = pool_layout(model.config, CacheFormats(kv="nvfp4", index="nvfp4"))
    results = []
    for table in ([7, 2, 9], [0, 1, 2]):
        batch = Batch(
            tokens=jnp.asarray([ids], jnp.int32),
            positions=jnp.arange(48, dtype=jnp.int32)[None],
            block_table=jnp.asarray([table], jnp.int32),
        )
        results.append(np.asarray(run_chunk(model, Cache.empty(layout, 12), batch)[0]))
    np.testing.assert_array_equal(*results)


def test_rows_of_padding_change_nothing_and_stay_finite():
    """F54."""
    model, ids = random_model(small()), tokens(40)
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    alone = paged_logits(model, ids, layout, [40])
    batch = Batch(
        tokens=jnp.zeros((4, 64), jnp.int32).at[2, :40].set(jnp.asarray(ids)),
        positions=jnp.full((4, 64), -1, jnp.int32).at[2, :40].set(jnp.arange(40)),
        block_table=jnp.full((4, 4), -1, jnp.int32).at[2].set(jnp.array([3, 1, 2, 0])),
    )
    logits, _ = run_chunk(model, Cache.empty(layout, 4), batch)
    assert bool(jnp.isfinite(logits[..., : model.config.num_tokens]).all())
    np.testing.assert_allclose(logits[2, :40], alone, atol=1e-4)


def test_layers_of_one_kind_are_traced_once():
    model = random_model(small(4))
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    batch, _ = pack(np.array(tokens(16)), np.zeros(16, int), 16)
    jaxpr = jax.make_jaxpr(lambda m, b: m.hidden(b, layout)[0])(model, batch)
    calls = [e for e in jaxpr.eqns if e.params.get("name") == "_run_layer"]
    assert len(calls) == 4
    assert len({id(call.params["jaxpr"]) for call in calls}) == 2, "one dense kind, one sparse kind"


def test_future_tokens_change_nothing():
    model, ids = random_model(small()), tokens(100)
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    changed = ids[:70] + tokens(30, seed=9)
    before, after = (packed_logits(model, one, layout)[:70] for one in (ids, changed))
    np.testing.assert_array_equal(before, after)


def test_sparsity_is_real_beyond_the_chosen_blocks():
    """F67."""
    config = small()
    wide = replace(config, indexer=replace(config.indexer, top_k=20))
    ids = tokens(100)
    formats = CacheFormats(kv="f32", index="f32")
    model = random_model(config)
    narrow = packed_logits(model, ids, pool_layout(config, formats))
    model.config = wide
    for layer in list(model.layers)[1:]:
        assert layer.attention.indexer is not None
        layer.attention.indexer.config = wide.indexer
    full = packed_logits(model, ids, pool_layout(wide, formats))
    np.testing.assert_allclose(narrow[:32], full[:32], atol=1e-4)
    assert np.abs(narrow[40:] - full[40:]).max() > 0.05


def test_tiles_of_several_blocks_are_the_same_pack():
    model, ids = random_model(small()), tokens(96)
    layout = pool_layout(model.config, CacheFormats(kv="nvfp4", index="nvfp4"))
    batch, _ = pack(np.array(ids), np.zeros(96, int), layout.block_size)
    wide = Batch(
        tokens=batch.tokens.reshape(2, 48),
        positions=batch.positions.reshape(2, 48),
        block_table=batch.block_table[:2],
    )
    narrow, joined = (score(model, None, one, layout).reshape(96, -1) for one in (batch, wide))
    np.testing.assert_allclose(narrow, joined, atol=1e-4)


def test_bfloat16_activations_agree_to_their_rounding():
    """A bfloat16 rounding differs by 2^-8; selections that it flips leave a few rows apart."""
    model, ids = random_model(small()), tokens(100)
    model.dtype = jnp.dtype(jnp.bfloat16)
    layout = pool_layout(model.config, CacheFormats(kv="bf16", index="bf16"))
    packed = packed_logits(model, ids, layout)
    paged = paged_logits(model, ids, layout, [60, 39, 1])
    error = np.linalg.norm(paged - packed, axis=-1) / np.linalg.norm(packed, axis=-1)
    assert packed.dtype == np.float32 and np.median(error) <= 2e-2, np.sort(error)[-10:]
