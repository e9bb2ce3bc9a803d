"""The named shapes are those of the presets; on the small ones the ops follow the loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.presets import m3_1_flash, tiny
from pallas_kernels import cases
from pallas_kernels.block_select import block_select
from pallas_kernels.sparse_attention import sparse_attention
from tests.numerics import assert_close
from tests.ops.oracles import as_pages, attend_blocks, pick_blocks, scattered, stored


@pytest.mark.parametrize("name", [*cases.ATTENTION, *cases.ONE_RANK])
def test_attention_cases_have_the_shapes_of_their_preset(name):
    case = (cases.ATTENTION | cases.ONE_RANK)[name]
    config = tiny() if name.startswith("tiny") else m3_1_flash()
    ranks, a, indexer = 4 if name.startswith("full") else 1, config.attention, config.indexer
    assert (case.heads, case.kv_heads) == (a.num_heads // ranks, a.num_kv_heads // ranks)
    assert (case.head_dim, case.index_dim) == (a.head_dim, indexer.head_dim)
    assert (case.block_size, case.top_k) == (indexer.block_size, indexer.top_k)
    assert case.context <= config.max_context and case.blocks > case.top_k


def test_the_full_window_case_has_the_drafters_shape():
    case, drafter = cases.WINDOW["full_draft"], m3_1_flash().drafter
    assert (case.queries, case.window) == (drafter.draft_block, drafter.window)


@pytest.mark.parametrize("name", cases.GROUPED)
def test_grouped_cases_have_the_shapes_of_their_preset(name):
    case, full = cases.GROUPED[name], name.startswith("full")
    config = m3_1_flash() if full else tiny()
    ranks = 4 if full else 1
    assert (case.in_dim, case.out_dim) == (config.hidden_size, config.moe.expert_dim // ranks)
    assert case.experts == config.moe.num_experts and case.rows % config.moe.experts_per_token == 0


@pytest.mark.parametrize("name", cases.MOE)
def test_moe_cases_have_the_shapes_of_the_full_model(name):
    case, moe = cases.MOE[name], m3_1_flash().moe
    assert (case.choices, case.experts) == (moe.experts_per_token, moe.num_experts)
    assert (case.width, case.expert_width) == (m3_1_flash().hidden_size, moe.expert_dim)


def test_dense_cases_have_the_shapes_of_their_preset():
    config, ranks = m3_1_flash(), 4
    a, indexer = config.attention, config.indexer
    index_dims = indexer.num_heads // ranks * indexer.head_dim + indexer.head_dim
    heads = (a.num_heads + 2 * a.num_kv_heads) // ranks
    assert cases.DENSE["full_qkv_decode"].out_dim == heads * a.head_dim + index_dims
    assert cases.DENSE["full_head_decode"].out_dim == config.vocab_size // ranks


@pytest.fixture(scope="module", params=[n for n in cases.ATTENTION if n.startswith("tiny")])
def small(request):
    """A small case's arrays: as pages, and the values that the pages give back."""
    c, rng = cases.ATTENTION[request.param], np.random.default_rng(0)
    B = min(c.batch, 2)  # a loop in float64 checks every query

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    positions = c.context - 1 - rng.integers(0, 100, (B, 1)) + np.arange(c.queries)[None]
    positions = np.minimum(positions, c.context - 1).astype(np.int32)
    q, iq = normal(B, c.queries, c.heads, c.head_dim), normal(B, c.queries, c.kv_heads, c.index_dim)
    keys = [normal(B, c.context, heads, c.head_dim) for heads in (c.kv_heads, c.kv_heads, 1)]
    pages, table = [], None
    for x in keys:
        rows, table = scattered(x, c.block_size)
        pages.append(as_pages(rows, c.format))
    ids = jax.jit(block_select, static_argnames="top_k")(
        iq, pages[2], table, positions, top_k=c.top_k
    )
    return c, q, iq, pages, [stored(x, c.format) for x in keys], table, positions, np.asarray(ids)


def test_small_cases_select_the_blocks_of_the_loop(small):
    case, _, iq, _, (_, _, index_k), _, positions, ids = small
    for b, i, head in np.ndindex(*ids.shape[:3]):
        expected = pick_blocks(
            iq[b, i, head], index_k[b, :, 0], positions[b, i], case.block_size, case.top_k
        )
        assert set(ids[b, i, head].tolist()) == expected


@pytest.mark.parametrize("name", [None, "reference"])
def test_small_cases_attend_like_the_loop(small, name):
    case, q, _, (k, v, _), values, table, positions, ids = small
    scale = case.head_dim**-0.5
    run = jax.jit(sparse_attention, static_argnames=("scale", "implementation"))
    out, _ = run(q, k, v, ids, table, positions, scale=scale, implementation=name)
    expected, _ = attend_blocks(q, *values[:2], ids, positions, case.block_size, scale)
    assert_close(out, expected, "f32")
    assert jnp.isfinite(out).all()
