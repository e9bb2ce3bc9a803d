"""The speculative steps against plain decoding of the same prompts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from minimax_jax.cache import Cache, layer_pages, pool_layout
from minimax_jax.sampling import SamplingParams, packed_mask
from minimax_jax.speculative.steps import SpeculationOptions, speculate
from pallas_kernels.layouts.pages import read
from pallas_kernels.layouts.pool import CacheFormats
from tests.drafter.models import drafted, random_drafter
from tests.model.models import random_model, tokens
from tests.numerics import assert_close
from tests.speculation.runs import Run, proposing

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 15, 16, 17, 30, 45, 50, 64)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
B, T = len(PROMPTS), 7
RECTANGLE, PACKED = (SpeculationOptions(rows=rows) for rows in (B * (T + 1), 40))
GREEDY_RUN = Run.of(PROMPTS, [GREEDY] * B)


@pytest.fixture(scope="module")
def plain():
    """24 greedy tokens of each prompt."""
    return GREEDY_RUN.plain(24)


def continued(plain, right) -> np.ndarray:
    """Drafts that go on as plain decoding does for `right[b]` tokens and are wrong then."""
    drafts = plain.tokens[1 : T + 1].T.copy()
    for row, count in enumerate(right):
        drafts[row, count:] = (drafts[row, count:] + 1) % 400
    return drafts


def draft_rows(run: Run, cache: Cache, row: int, count: int) -> np.ndarray:
    """Keys and values of a sequence's first positions in all draft layers."""
    layout, found = cache.layout.draft_part, []
    ids = jnp.broadcast_to(run.table[row], (layout.kv_heads, run.table.shape[1]))
    for layer in range(2):
        pages = layer_pages(cache.pool[0], layout, layout.layer_line(layer), sparse=False)
        found += [np.asarray(read(source, ids)) for source in pages[:2]]  # [K, P, Z, H]
    return np.stack(found).reshape(len(found), layout.kv_heads, -1, layout.head_dim)[:, :, :count]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(RECTANGLE, id="rectangle", marks=pytest.mark.slow),
        pytest.param(PACKED, id="packed"),
    ],
)
def test_a_ragged_batch_commits_what_plain_decoding_does(options, plain):
    """Each sequence tests its own number of drafts, of which its own number is right."""
    widths = np.array([7, 1, 2, 7, 4, 5, 6, 0])
    right = np.array([7, 1, 0, 3, 7, 2, 6, 7])
    accepted = np.minimum(widths, right)
    cache, state, first = GREEDY_RUN.started(24, options)
    np.testing.assert_array_equal(first.tokens, plain.tokens[0])
    state = proposing(state, continued(plain, right))
    cache, state, done = GREEDY_RUN.step(cache, state, widths, options)
    assert done.tested.tolist() == widths.tolist()
    assert done.accepted.tolist() == accepted.tolist()
    assert state.anchors.positions.tolist() == (np.array(LENGTHS) + accepted + 1).tolist()
    for row, count in enumerate(accepted + 1):
        found = done.generated.tokens[:, row]
        np.testing.assert_array_equal(found[:count], plain.tokens[1 : count + 1, row])
        assert (found[count:] == -1).all()


def test_after_any_acceptance_the_draft_pages_are_as_if_recomputed(plain):
    """Partial acceptance 0 to 7: rejected rows left nothing, kept ones are those that injecting
    the committed tokens all at once gives (spec/dspark 7.13).
    """
    right = np.arange(8)
    cache, state, _ = GREEDY_RUN.started(24, RECTANGLE)
    state = proposing(state, continued(plain, right))
    cache, _, _ = GREEDY_RUN.step(cache, state, 7, RECTANGLE)
    longer = [
        p + plain.tokens[: r + 1, i].tolist()
        for i, (p, r) in enumerate(zip(PROMPTS, right, strict=True))
    ]
    whole, _ = Run.of(longer, [GREEDY] * B).prefilled(1, chunk=128)
    for row, ids in enumerate(longer):
        found, wanted = (draft_rows(GREEDY_RUN, c, row, len(ids) + 8) for c in (cache, whole))
        assert_close(found[:, :, : len(ids)], wanted[:, :, : len(ids)], "f32")
        assert np.isnan(found[:, :, len(ids) :]).all()


def test_chunked_and_whole_prefill_leave_the_same_draft_pages():
    chunked, whole = (GREEDY_RUN.prefilled(1, chunk)[0] for chunk in (16, 64))
    for row, length in enumerate(LENGTHS):
        found, wanted = (draft_rows(GREEDY_RUN, c, row, length + 1) for c in (chunked, whole))
        assert_close(found[:, :, :length], wanted[:, :, :length], "f32")
        assert np.isnan(found[:, :, length:]).all()


@pytest.mark.parametrize("widths", [7, 3, lambda step: (np.arange(B) + 3 * step) % 8])
def test_greedy_speculation_is_greedy_decoding(widths, plain):
    found, logprobs = GREEDY_RUN.speculative(24, widths, PACKED)
    assert found == plain.tokens.T.tolist()
    np.testing.assert_allclose(np.array(logprobs).T, plain.logprobs, atol=1e-4)


@pytest.mark.parametrize(("width", "tested"), [(-3, 0), (8, 7), (100, 7)])
def test_a_width_beyond_the_drafts_is_cut_to_them(width, tested, plain):
    """Else the token after the last draft would be drawn as if that had been rejected (F101)."""
    cache, state, _ = GREEDY_RUN.started(24, RECTANGLE)
    state = proposing(state, continued(plain, [7] * B))
    _, _, done = GREEDY_RUN.step(cache, state, width, RECTANGLE)
    assert done.tested.tolist() == [tested] * B == done.accepted.tolist()
    found = done.generated.tokens[: tested + 1]
    np.testing.assert_array_equal(found, plain.tokens[1 : tested + 2])


def test_without_drafts_sampling_is_plain_sampling():
    """The same random numbers, cuts and mixture of requests."""
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k, seed=i)
        for i, (t, p, k) in enumerate(
            [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.9, 0), (2.0, 1.0, 5)] * 2
        )
    ]
    run = Run.of(PROMPTS, params)
    expected = run.plain(12)
    found, logprobs = run.speculative(12, 0, SpeculationOptions(rows=B))
    assert found == expected.tokens.T.tolist()
    np.testing.assert_allclose(np.array(logprobs).T, expected.logprobs, atol=1e-4)


def test_a_sequence_is_drawn_the_same_alone_and_among_others():
    params = [SamplingParams(temperature=1.0, seed=i, top_p=0.9) for i in range(B)]
    together = Run.of(PROMPTS, params).speculative(12, 5, RECTANGLE)[0]
    alone = Run.of(PROMPTS[3:4], params[3:4]).speculative(12, 5, SpeculationOptions(rows=8))[0]
    assert together[3] == alone[0]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10])
def test_limits_are_kept_however_many_drafts_are_right(max_tokens, plain):
    cache, state, _ = GREEDY_RUN.started(max_tokens, RECTANGLE)
    state = proposing(state, continued(plain, [7] * B))
    assert bool(state.anchors.running.all()) == (max_tokens > 1)
    cache, state, done = GREEDY_RUN.step(cache, state, 7, RECTANGLE)
    committed = (np.asarray(done.generated.tokens) >= 0).sum(0)
    assert committed.tolist() == [min(8, max_tokens - 1)] * B
    assert bool(state.anchors.running.any()) == (max_tokens == 10)


def test_a_stop_token_ends_its_sequence_within_the_block(plain):
    stop = int(plain.tokens[3, 5])  # the third token after the first of sequence 5
    run = Run.of(PROMPTS, [replace(GREEDY, stop_token_ids=(stop,))] * B)
    cache, state, _ = run.started(24, RECTANGLE)
    state = proposing(state, continued(plain, [7] * B))
    cache, state, done = run.step(cache, state, 7, RECTANGLE)
    place = plain.tokens[1:9, 5].tolist().index(stop) + 1
    found = done.generated.tokens[:, 5].tolist()
    assert found == plain.tokens[1 : 1 + place, 5].tolist() + [-1] * (8 - place)
    assert not state.anchors.running[5] and done.accepted[5] == place
    before = np.asarray(cache.pool[0])
    cache, state, done = run.step(cache, state, 7, RECTANGLE)
    assert (np.asarray(done.generated.tokens[:, 5]) == -1).all() and done.tested[5] == 0
    np.testing.assert_array_equal(
        np.asarray(cache.pool[0])[GREEDY_RUN.table[5]], before[GREEDY_RUN.table[5]]
    )


def test_padding_sequences_write_nowhere():
    run = Run.of([*PROMPTS[:3], []], [GREEDY] * 4)
    options = SpeculationOptions(rows=32)
    cache, state, first = run.started(24, options)
    assert int(first.tokens[3]) == -1
    before = np.asarray(cache.pool[0])
    cache, state, done = run.step(cache, state, 7, options)
    after = np.asarray(cache.pool[0])
    own = np.asarray(run.table[:3]).ravel()
    others = np.setdiff1d(np.arange(len(after)), own)
    np.testing.assert_array_equal(after[others], before[others])
    assert (after[own] != before[own]).any()
    assert (np.asarray(done.generated.tokens[:, 3]) == -1).all()


def test_nan_logits_end_one_sequence_and_no_other(plain):
    model = random_model(drafted())
    marked = 450
    model.embedding.set_value(model.embedding.get_value().at[marked].set(jnp.nan))
    run = Run.of(PROMPTS, [GREEDY] * B, model)
    cache, state, _ = run.started(24, RECTANGLE)
    drafts = continued(plain, [7] * B)
    state = proposing(state, drafts)
    spoilt = replace(state.anchors, tokens=state.anchors.tokens.at[2].set(marked))
    before = np.asarray(cache.pool[0])
    cache, state, done = run.step(cache, replace(state, anchors=spoilt), 7, RECTANGLE)
    assert done.generated.broken[0].tolist() == [row == 2 for row in range(B)]
    assert (np.asarray(done.generated.tokens[:, 2]) == -1).all() and not state.anchors.running[2]
    for row in (0, 1, 3, 4, 5, 6, 7):
        np.testing.assert_array_equal(done.generated.tokens[:, row], plain.tokens[1:9, row])
    part = cache.layout.draft_line(0)
    pages = np.asarray(run.table[2])
    np.testing.assert_array_equal(np.asarray(cache.pool[0])[pages, part:], before[pages, part:])


def test_a_grammar_masks_each_row_after_its_own_drafts(plain):
    """What the mask forbids is neither kept nor drawn, even at a place within the block."""
    cache, state, _ = GREEDY_RUN.started(24, RECTANGLE)
    drafts = continued(plain, [7] * B)
    allowed = np.ones((B, T + 1, GREEDY_RUN.config.vocab_size), bool)
    allowed[1, 2, drafts[1, 2]] = False  # the third draft of sequence 1
    allowed[4, 7] = np.arange(allowed.shape[2]) == 33  # after all drafts of sequence 4
    state = proposing(state, drafts)
    bits = jnp.asarray(packed_mask(allowed))
    _, _, done = GREEDY_RUN.step(cache, state, 7, RECTANGLE, bits)
    assert done.accepted.tolist() == [7, 2, 7, 7, 7, 7, 7, 7]
    assert int(done.generated.tokens[2, 1]) not in (-1, drafts[1, 2])
    assert int(done.generated.tokens[7, 4]) == 33


@pytest.mark.slow
def test_likeliest_tokens_are_reported_for_each_committed_one(plain):
    options = replace(PACKED, top_logprobs=3)
    wanted = GREEDY_RUN.plain(24, top_logprobs=3)
    cache, state, first = GREEDY_RUN.started(24, options)
    np.testing.assert_array_equal(first.top_tokens, wanted.top_tokens[0])
    state = proposing(state, continued(plain, [2] * B))
    _, _, done = GREEDY_RUN.step(cache, state, 3, options)
    np.testing.assert_array_equal(done.generated.top_tokens[:3], wanted.top_tokens[1:4])
    found = done.generated.top_logprobs[:3]
    np.testing.assert_allclose(found, wanted.top_logprobs[1:4], atol=1e-4)


def test_the_step_does_not_copy_the_pool():
    config = drafted()
    model, drafter = random_model(config), random_drafter(config)
    layout = pool_layout(config, CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8"))
    _, state, _ = GREEDY_RUN.started(24, PACKED)
    pool = jax.ShapeDtypeStruct((1, 32768, layout.lines, 128), jnp.uint8)
    jaxtyping.config.update("jaxtyping_disable", True)  # `lower` builds dataclasses of no arrays
    args = model, drafter, None, Cache(pool=pool, layout=layout), GREEDY_RUN.table, state
    widths = jnp.full(B, 7, jnp.int32)
    lowered = speculate.lower(*args, widths, GREEDY_RUN.sampling, PACKED)
    jaxtyping.config.update("jaxtyping_disable", False)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * pool.size, memory.temp_size_in_bytes
