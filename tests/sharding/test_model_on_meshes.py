"""The steps of a model on every kind of mesh: pages of each rank's own heads, the same logits."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache, local_heads, pool_layout
from minimax_jax.checkpoint import parameters_of
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, decode, prefill
from pallas_kernels.layouts.pool import CacheFormats
from sharding import SERVE, make_mesh, named_sharding, with_parallel
from tests.model.models import random_model, small, tokens

pytestmark = pytest.mark.devices(8)
CONFIG = small(2, num_tokens=501)
FORMATS = CacheFormats(kv="f32", index="f32")
LENGTHS = (15, 33, 70, 97)  # up to 7 blocks of 16, of which each query chooses 2
CHUNK, BLOCKS, STEPS = 48, 7, 3
# dp4 and dp2,tp2,ep are in these: steps that decode split no tokens, and run in one piece.
MORE = ("tp4,sp,overlap", "tp8", "dp2,tp2", "tp4,ep", "dp2,tp2,ep,sp", "tp4,dcp4", "dep4,overlap")
SPLIT = ("tp4,dcp4,split", "tp8,dcp4,split")  # of tp8 each rank has two heads of the four


def slow(text: str):
    return pytest.param(text, marks=pytest.mark.slow)


@cache
def whole():
    """The random model, whose parts `placed` lays out anew for each mesh."""
    return jax.tree.flatten(random_model(CONFIG))


def placed(mesh, parallel: ParallelConfig):
    """The random model, each device with its shard of every weight."""
    leaves, tree = whole()
    model, rules = jax.tree.unflatten(tree, leaves), with_parallel(SERVE, parallel)
    for parameter in parameters_of(model).values():
        value = parameter.get_value()
        sharding = named_sharding(mesh, parameter.axes, rules, value.shape)
        parameter.set_value(jax.device_put(value, sharding))
    model.rules = rules
    return model


def run(parallel: ParallelConfig, lengths=LENGTHS) -> tuple[np.ndarray, np.ndarray]:
    """Logits after prompts that came in chunks, and the greedy tokens after them."""
    mesh, B = make_mesh(parallel), len(lengths)
    model = placed(mesh, parallel)
    n = parallel.page_ranks
    layout = pool_layout(CONFIG, FORMATS, local_heads(CONFIG, mesh, n))
    width = -(-BLOCKS // n)  # rows of the pool
    of_rank = B // parallel.dp if B % parallel.dp == 0 else B  # sequences; ids count within a rank
    pages = Cache.empty(layout, of_rank * width, mesh, n)
    table = pages.blocks_of(jnp.arange(B)[:, None] % of_rank * width + jnp.arange(width))
    logits = jnp.zeros((B, CONFIG.vocab_size))
    ends = jnp.array(lengths, jnp.int32)
    ids = np.zeros((B, 2 * CHUNK + CHUNK), np.int32)
    for row, length in enumerate(lengths):
        ids[row, :length] = tokens(length, seed=row)
    with jax.set_mesh(mesh):
        for start in range(0, max(lengths), CHUNK):
            places = jnp.broadcast_to(start + jnp.arange(CHUNK), (B, CHUNK))
            batch = Batch(
                tokens=jnp.asarray(ids[:, start : start + CHUNK]),
                positions=jnp.where(places < ends[:, None], places, -1),
                block_table=table,
            )
            last = ends - 1 - start
            last = jnp.where((last >= 0) & (last < CHUNK), last, -1)
            pages, logits = prefill(model, None, pages, batch, last, logits)
        first = np.asarray(logits)
        state = DecodeState(
            logits=logits, positions=ends, limits=ends + STEPS, running=jnp.ones(B, bool)
        )
        sampling = SamplingState.of([SamplingParams(temperature=0.0)] * B)
        _, _, generated = decode(
            model, None, pages, table, state, sampling, DecodeOptions(steps=STEPS)
        )
    return first, np.asarray(generated.tokens)


@cache
def alone(lengths=LENGTHS):
    return run(ParallelConfig(), lengths)


@pytest.mark.parametrize("text", ["tp4", "dep4", *map(slow, MORE), *map(slow, SPLIT)])
def test_a_mesh_gives_the_logits_and_tokens_of_one_device(text):
    """F145: tp8 has each of the four key heads twice."""
    expected, found = alone(), run(ParallelConfig.parse(text))
    np.testing.assert_allclose(found[0], expected[0], atol=2e-5)
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp2,tp2,ep,sp,overlap"])
def test_a_lone_sequence_runs_on_every_data_rank_alike(text):
    """And by columns, where its chunks are two micro-batches."""
    expected, found = alone(LENGTHS[-1:]), run(ParallelConfig.parse(text), LENGTHS[-1:])
    np.testing.assert_allclose(found[0], expected[0], atol=2e-5)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_rank_holds_its_own_heads_and_a_whole_index():
    """F145."""
    mesh = make_mesh(ParallelConfig(dp=2, tp=4))
    layout = pool_layout(CONFIG, FORMATS, local_heads(CONFIG, mesh))
    pages = Cache.empty(layout, 5, mesh)
    assert layout.kv_heads == 1 and pages.pool.shape[:2] == (8, 5)
    assert {shard.data.shape[0] for shard in pages.pool.addressable_shards} == {1}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "sentence"),
    [
        (8, 4, 3, "tp=3 neither divides the 4 key/value heads nor is a multiple of them"),
        (24, 4, 6, "tp=6 neither divides the 4 key/value heads"),
        (12, 6, 4, "tp=4 neither divides the 6 key/value heads"),
        (6, 2, 4, "tp=4 does not divide the 6 query heads"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(heads, kv_heads, tp, sentence):
    """F146: where shards of the weights would be even, a step would take other heads' keys."""
    attention = replace(CONFIG.attention, num_heads=heads, num_kv_heads=kv_heads)
    indexer = replace(CONFIG.indexer, num_heads=kv_heads)
    config = replace(CONFIG, attention=attention, indexer=indexer)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        local_heads(config, make_mesh(ParallelConfig(tp=tp)))
