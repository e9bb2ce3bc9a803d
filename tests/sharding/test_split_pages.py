"""Pages of a context that neighbouring ranks share out: what each has, and that the parts make the
whole again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.presets import m3_1_flash
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache, heads_of_rank, layer_pages, pool_layout
from minimax_jax.capacity import Question, capacity
from minimax_jax.context_blocks import chosen_blocks
from minimax_jax.split_pages import chosen_of_parts, merged, own_choice, own_part, own_slots
from pallas_kernels.kv_insert import Slots
from pallas_kernels.layouts.pages import Blocks
from pallas_kernels.layouts.pool import CacheFormats
from pallas_kernels.sparse_attention import dense_attention
from sharding import SERVE, local, make_mesh, with_parallel
from sharding.axes import MODEL
from sharding.collectives import rank
from tests.model.models import random_model, small

pytestmark = pytest.mark.devices(8)
RANKS, SIZE, HEADS, WIDTH = 4, 16, 4, 32
MESH = ParallelConfig(tp=RANKS, dcp=RANKS, split=True)


def by_rank(function, *arrays):
    """What each rank of a group of four makes of the same arrays, a rank a row."""
    run = local(
        lambda *all_of: jax.tree.map(lambda x: x[None], function(*all_of)),
        in_axes=[(None,)] * len(arrays),
        out_axes=("partials",),
    )
    with jax.set_mesh(make_mesh(MESH)):
        return np.asarray(jax.jit(run)(*arrays))


def test_a_rank_writes_its_own_blocks_alone():
    ids = jnp.array([0, 5, 6, 7, -1, 8])
    found = by_rank(lambda x: own_slots(Slots(block_ids=x, places=x), RANKS).block_ids, ids)
    own = [[0, -1, -1, -1, -1, 2], [-1, 1, -1, -1, -1, -1], [-1, -1, 1, -1, -1, -1]]
    assert found.tolist() == [*own, [-1, -1, -1, 1, -1, -1]]
    chosen = by_rank(lambda x: own_choice(x, RANKS), ids[None, None, None])
    np.testing.assert_array_equal(chosen[:, 0, 0, 0], found)


# The newest token: in the first block, so that three ranks have no key; at an edge; none at all.
@pytest.mark.parametrize("newest", [3, 63, -1])
def test_attention_of_parts_merges_to_that_of_the_whole(newest):
    """F150: a rank without a key of the context has a weight of nought, and no NaN."""
    of_q, of_k, of_v = jax.random.split(jax.random.key(newest + 1), 3)
    q = jax.random.normal(of_q, (1, 1, 2 * HEADS, WIDTH))
    k, v = (jax.random.normal(of, (7, SIZE, HEADS, WIDTH)) for of in (of_k, of_v))
    table, places = jnp.arange(7)[None], jnp.array([[newest]])
    expected, _ = dense_attention(q, Blocks(k), Blocks(v), table, places, scale=0.2)

    def attend(q, k, v):
        own = own_part(Batch(tokens=places, positions=places, block_table=table), RANKS, SIZE)
        every = jnp.arange(0, 28, RANKS) + rank(MODEL) % RANKS  # its rows, in the whole's blocks
        k, v = (Blocks(x[jnp.minimum(every, 6)]) for x in (k, v))
        out, lse = dense_attention(q, k, v, own.block_table, own.positions, scale=0.2)
        return merged(out, lse, RANKS)

    found = np.moveaxis(by_rank(attend, q, k, v), 0, 2).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("tokens", [3, 9])  # scores travel, or keys
def test_the_choice_from_shared_out_pages_is_that_of_one_device(tokens):
    """Bit for bit, with whole numbers as keys, so that many scores are equal."""
    config = small(1)
    layout = pool_layout(config, CacheFormats(kv="f32", index="f32"), 1)
    lines = layout.index.lines
    of_q, of_k = jax.random.split(jax.random.key(0))
    keys = jax.random.randint(of_k, (24, SIZE * WIDTH), -2, 3).astype(jnp.float32)
    as_bytes = jax.lax.bitcast_convert_type(keys, jnp.uint8).reshape(24, lines, 128)
    pool = jnp.zeros((24, layout.lines, 128), jnp.uint8).at[:, 2 * layout.kv.lines :].set(as_bytes)
    q = jax.random.randint(of_q, (2, tokens, HEADS, WIDTH), -2, 3).astype(jnp.float32)
    table = jnp.arange(24)[::-1].reshape(2, 12) // RANKS * RANKS + jnp.arange(12) % RANKS
    places = jnp.tile(jnp.array([[190, 191, -1], [47, 48, 100]]), tokens // 3)
    batch = Batch(tokens=places, positions=places, block_table=table.astype(jnp.int32))
    _, _, whole = layer_pages(pool, layout, 0, sparse=True)
    assert whole is not None
    expected = chosen_blocks(q, whole, batch, config.indexer)

    def choose(pool, q, tokens, positions, table):
        batch = Batch(tokens=tokens, positions=positions, block_table=table)
        rows = pool[jnp.arange(0, 24, RANKS) + rank(MODEL) % RANKS]
        _, _, index_k = layer_pages(rows, layout, 0, sparse=True)
        assert index_k is not None
        own = own_part(batch, RANKS, SIZE)
        return chosen_of_parts(q, index_k, batch, own, config.indexer, RANKS)

    found = by_rank(choose, pool, q, batch.tokens, batch.positions, batch.block_table)
    for one in found:
        np.testing.assert_array_equal(one, expected)


def test_more_sequences_fit_where_no_rank_repeats_another():
    """At eight ranks a key head is on two of them, and the index on all."""
    config, formats = m3_1_flash(), CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8")

    def bytes_of_a_token(text: str) -> float:
        parallel = ParallelConfig.parse(text)
        asked = {"config": config, "formats": formats, "memory_bytes": 10**12, "context": 131_072}
        stages = capacity(Question(parallel=parallel, **asked)).stages
        return sum(stage.token_bytes for stage in stages[:2])

    assert bytes_of_a_token("tp8,dcp2") == 60 * 72 * (2 + 1)
    assert bytes_of_a_token("tp8,dcp2,split") == 60 * 72 * (2 + 1) / 2
    assert bytes_of_a_token("tp4,dcp4,split") == 60 * 72 * (8 + 1) / 4
    assert heads_of_rank(config, 8, 4) == 2


def test_pages_that_were_made_without_knowing_of_it_are_refused():
    config = small(1)
    model = jax.eval_shape(lambda: random_model(config))
    model.rules = with_parallel(SERVE, MESH)
    layout = pool_layout(config, CacheFormats(kv="f32", index="f32"))
    batch = Batch(
        tokens=jnp.zeros((1, 1), int),
        positions=jnp.zeros((1, 1), int),
        block_table=jnp.zeros((1, 1), int),
    )
    assert Cache.empty(layout, 4).blocks_of(jnp.array([[3, -1]])).tolist() == [[3, -1]]
    shared = Cache.empty(layout, 4, page_ranks=2)
    assert shared.blocks_of(jnp.array([[3, -1]])).tolist() == [[6, 7, -1, -1]]
    with pytest.raises(ValueError, match="lie on 4 ranks .* but these were made for 1"):
        model.hidden(batch, layout, Cache.empty(layout, 4))
