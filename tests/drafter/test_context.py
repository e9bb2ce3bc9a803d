"""The draft part of the pages: what is written, by whom, and what is read back."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache, layer_pages, pool_layout
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.speculative.drafting import draft_sampling, inject, propose
from pallas_kernels.layouts.pages import read
from pallas_kernels.layouts.pool import CacheFormats, through_cache
from tests.drafter.models import EXACT, WINDOW, Z, at, drafted, empty_cache, random_drafter, streams
from tests.drafter.reference import Reference
from tests.model.models import random_model, tokens
from tests.numerics import assert_close

CONFIG = drafted()
MODEL, DRAFTER = random_model(CONFIG), random_drafter(CONFIG)
D, T = CONFIG.hidden_size, CONFIG.drafter.draft_block
P, S = 4, 50  # blocks and tokens of a sequence
TABLE = np.array([[5, 2, 7, 0]])
TAPS = streams(CONFIG, 1, S)
SAMPLING = draft_sampling(SamplingState.of([SamplingParams(temperature=0.0)]), "probabilistic")
_inject, _propose = jax.jit(inject), jax.jit(propose)


def formats(draft):
    return CacheFormats(kv="f32", index="f32", draft=draft)


def inserted(cache, positions, taps=None, table=TABLE, drafter=DRAFTER) -> Cache:
    """The cache with rows of `taps` (those of the positions themselves) at these positions."""
    positions = np.asarray(positions)[None]
    rows = [tap[:, np.maximum(positions[0], 0)] for tap in TAPS] if taps is None else taps
    return _inject(drafter, cache, rows, at(positions, table))


def rows_of(cache, layer, table=TABLE, count=S):
    """K and V [count, K, H] of a draft layer, as they are read back in order of positions."""
    layout = cache.layout.draft_part
    pages = layer_pages(cache.pool[0], layout, layout.layer_line(layer), sparse=False)
    ids = jnp.broadcast_to(jnp.asarray(table[0]), (CONFIG.attention.num_kv_heads, table.shape[1]))
    whole = [np.asarray(read(source, ids)) for source in pages[:2]]  # [K, P, Z, H]
    flat = [x.reshape(x.shape[0], -1, x.shape[-1]).swapaxes(0, 1) for x in whole]
    return [x[:count] for x in flat]


@pytest.mark.parametrize("draft", ["f32", "bf16", "fp8"])
def test_every_layer_keeps_its_keys_and_values_in_the_drafts_format(draft):
    cache = inserted(empty_cache(CONFIG, 8, formats(draft)), np.arange(S))
    reference = Reference.of(DRAFTER, CONFIG)
    fused = reference.fused([tap[0] for tap in TAPS])
    for layer in range(2):
        wanted = reference.keys_and_values(layer, fused, np.arange(S))
        for found, exact in zip(rows_of(cache, layer), wanted, strict=True):
            assert_close(found, exact, draft)
            seen = through_cache(jnp.asarray(found), draft)
            assert_close(found, seen, "exact")


def test_the_target_and_the_draft_write_apart():
    cache = empty_cache(CONFIG, 8)
    layout, before = cache.layout, np.asarray(cache.pool[0])
    first, last = layout.draft_line(0), layout.draft_line(2)
    draft = np.asarray(inserted(cache, np.arange(S)).pool[0]) != before
    assert draft[:, first:last].any() and not draft[:, :first].any() and last == layout.lines
    batch = Batch(
        tokens=jnp.asarray([tokens(S)]),
        positions=jnp.arange(S, dtype=jnp.int32)[None],
        block_table=jnp.asarray(TABLE, jnp.int32),
    )
    _, after, _ = MODEL.hidden(batch, layout, cache)
    target = np.asarray(after.pool[0]) != before
    assert target[:, :first].any() and not target[:, first:].any()


@pytest.mark.parametrize("chunks", [[1] * 9 + [41], [16, 16, 16, 2], [15, 2, 33], [8, 42]])
def test_incremental_injection_equals_all_at_once(chunks):
    whole = inserted(empty_cache(CONFIG, 8), np.arange(S))
    cache, start = empty_cache(CONFIG, 8), 0
    for count in chunks:
        cache = inserted(cache, np.arange(start, start + count))
        start += count
    for layer in range(2):
        for found, wanted in zip(rows_of(cache, layer), rows_of(whole, layer), strict=True):
            assert_close(found, wanted, "f32")


@pytest.mark.parametrize("accepted", range(T + 1))
def test_rejected_rows_are_not_written(accepted):
    """A verified block of 8 rows leaves the context of the rows that were kept, and not a byte of
    the others (spec/dspark 7.13).
    """
    start = 20
    before = inserted(empty_cache(CONFIG, 8), np.arange(start))
    rows = start + np.arange(T + 1)
    kept = np.where(np.arange(T + 1) <= accepted, rows, -1)
    after = inserted(before, kept, [tap[:, rows] for tap in TAPS])
    wanted = inserted(before, rows[: accepted + 1])
    for layer in range(2):
        for found, right in zip(rows_of(after, layer), rows_of(wanted, layer), strict=True):
            end = start + accepted + 1
            assert_close(found[:end], right[:end], "f32")
            assert np.isnan(found[end:]).all()


def test_padding_rows_write_nowhere():
    """Neither a padded row, nor one whose table has no block, nor one past the table's end."""
    cache = empty_cache(CONFIG, 8)
    positions = np.array([[-1, -1, -1], [0, 17, 33], [P * Z, P * Z + 5, -1]])
    table = np.array([[0, 1, 2, 3], [-1, -1, -1, -1], [0, 1, 2, 3]])
    taps = streams(CONFIG, 3, 3)
    after = _inject(DRAFTER, cache, taps, at(positions, table))
    np.testing.assert_array_equal(after.pool[0], cache.pool[0])


def propose_at(cache, lengths, anchors, table=TABLE):
    count = len(lengths)
    sampling = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), SAMPLING)
    lengths, anchors, table = (jnp.asarray(x, jnp.int32) for x in (lengths, anchors, table))
    return _propose(MODEL, DRAFTER, cache, table, anchors, lengths, sampling)


def test_proposing_writes_nothing_and_reads_nothing_beyond_the_length():
    cache = inserted(empty_cache(CONFIG, 8), np.arange(S))
    for length in (0, 1, 17, 33):
        short = inserted(empty_cache(CONFIG, 8), np.arange(length)) if length else cache
        one, other = (propose_at(c, [length], [3]) for c in (cache, short))
        assert np.isfinite(one.logits[..., : CONFIG.num_tokens]).all()
        assert_close(one.logits[..., :501], other.logits[..., :501], "f32_logits")


def test_a_padding_sequence_sees_no_page_and_stays_finite():
    cache = empty_cache(CONFIG, 8)
    found = propose_at(cache, [-1], [0], np.full((1, P), -1))
    assert np.isfinite(found.logits[..., : CONFIG.num_tokens]).all()
    other = propose_at(cache, [-1], [0], np.array([[0, 1, 2, 3]]))
    assert_close(other.logits, found.logits, "exact")


def test_blocks_that_another_sequence_had_before_are_as_good_as_new():
    """Slots are reused: what an earlier, longer sequence left is never read (7.14, 7.16b)."""
    used = inserted(empty_cache(CONFIG, 8), np.arange(S), streams(CONFIG, 1, S, seed=9))
    again, fresh = (inserted(cache, np.arange(20)) for cache in (used, empty_cache(CONFIG, 8)))
    found, wanted = (propose_at(cache, [20], [3]) for cache in (again, fresh))
    assert_close(found.logits, wanted.logits, "exact")


def test_a_shared_prefix_is_read_through_both_tables():
    """A second sequence takes the first one's two full blocks and injects just its own tail."""
    cache = inserted(empty_cache(CONFIG, 8), np.arange(S))
    shared = np.array([[*TABLE[0, :2], 6, 1]])
    tail = np.arange(2 * Z, S)
    other = [tap.at[:, 2 * Z :].add(1.0) for tap in TAPS]
    cache = inserted(cache, tail, [tap[:, tail] for tap in other], shared)
    both = propose_at(cache, [S, S], [3, 3], np.concatenate([TABLE, shared]))
    alone = [inserted(empty_cache(CONFIG, 8), np.arange(S), taps) for taps in (TAPS, other)]
    for row, own in enumerate(alone):
        wanted = propose_at(own, [S], [3])
        assert_close(both.logits[row, :, :501], wanted.logits[0, :, :501], "f32_logits")


def test_context_belongs_to_blocks_and_not_to_rows_of_the_batch():
    """Sequences may change their places in the batch (7.14)."""
    cache = inserted(empty_cache(CONFIG, 8), np.arange(S))
    table = np.array([[1, 3, 4, 6]])
    cache = inserted(cache, np.arange(30), streams(CONFIG, 1, 30, seed=5), table)
    tables = np.concatenate([TABLE, table])
    one = propose_at(cache, [S, 30], [3, 4], tables)
    turned = propose_at(cache, [30, S], [4, 3], tables[::-1])
    assert_close(turned.logits[::-1], one.logits, "exact")


def test_context_left_of_the_window_may_be_lost():
    cache = inserted(empty_cache(CONFIG, 8), np.arange(S))
    recent = inserted(empty_cache(CONFIG, 8), np.arange(S - WINDOW + 1, S))
    one, other = (propose_at(c, [S], [3]) for c in (cache, recent))
    assert_close(one.logits[..., :501], other.logits[..., :501], "f32_logits")


@pytest.mark.parametrize("draft", ["bf16", "fp8"])
def test_neither_injecting_nor_proposing_copies_the_pool(draft):
    jaxtyping.config.update("jaxtyping_disable", True)  # `lower` builds dataclasses of no arrays
    layout = pool_layout(CONFIG, formats(draft))
    pool = jax.ShapeDtypeStruct((1, 1024, layout.lines, 128), jnp.uint8)
    cache, table, one = (
        Cache(pool=pool, layout=layout),
        jnp.zeros((1, 8), jnp.int32),
        jnp.array([20]),
    )
    taps = [tap[:, :8] for tap in TAPS]
    programs = [
        jax.jit(inject, donate_argnums=1).lower(
            DRAFTER, cache, taps, at(np.arange(8)[None], table)
        ),
        jax.jit(propose).lower(MODEL, DRAFTER, cache, table, one, one, SAMPLING),
    ]
    jaxtyping.config.update("jaxtyping_disable", False)
    for program in programs:
        temporary = program.compile().memory_analysis().temp_size_in_bytes
        assert temporary < 0.05 * layout.block_bytes * 1024, temporary


def test_layers_of_a_drafter_are_traced_once():
    cache = empty_cache(CONFIG, 8)
    args = (cache, TAPS, at(np.arange(S)[None], TABLE))
    jaxpr = jax.make_jaxpr(lambda d, *args: inject(d, *args).pool)(DRAFTER, *args)
    calls = [e for e in jaxpr.eqns if e.params.get("name") == "insert"]
    assert len(calls) == 2 and len({id(call.params["jaxpr"]) for call in calls}) == 1


def test_the_draft_part_is_a_layout_of_its_own():
    layout = pool_layout(CONFIG, CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8"))
    part = layout.draft_part
    assert [part.layer_line(i) for i in range(3)] == [layout.draft_line(i) for i in range(3)]
    assert part.kv == layout.draft and part.lines == layout.lines
    assert EXACT.draft == "f32"
