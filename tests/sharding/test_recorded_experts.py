"""A cache on a mesh takes down the experts that one device does, by each data rank's blocks."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import NO_ROUTE, Cache, local_heads, pool_layout
from minimax_jax.checkpoint import parameters_of
from pallas_kernels.layouts.pool import CacheFormats
from sharding import SERVE, make_mesh, named_sharding, with_parallel
from tests.model.models import random_model, small, tokens

pytestmark = pytest.mark.devices(8)
CONFIG, LENGTH, BLOCKS = small(2), 33, 3


@cache
def record(text: str, rows: int) -> np.ndarray:
    """Of sequences of 33 tokens: [sequence, token, layer, choice], read as a data rank has them."""
    parallel = ParallelConfig.parse(text)
    mesh, rules = make_mesh(parallel), with_parallel(SERVE, parallel)
    model = random_model(CONFIG)
    for one in parameters_of(model).values():
        value = one.get_value()
        one.set_value(jax.device_put(value, named_sharding(mesh, one.axes, rules, value.shape)))
    model.rules = rules
    own = rows if rows % parallel.dp else rows // parallel.dp
    ids = jnp.asarray([tokens(LENGTH, seed=row) for row in range(rows)])
    places = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (rows, LENGTH))
    table = jnp.arange(rows)[:, None] % own * BLOCKS + jnp.arange(BLOCKS)[::-1]
    batch = Batch(tokens=ids, positions=places, block_table=table.astype(jnp.int32))
    layout = pool_layout(CONFIG, CacheFormats(kv="f32", index="f32"), local_heads(CONFIG, mesh))
    with jax.set_mesh(mesh):
        cache = Cache.empty(layout, own * BLOCKS, mesh).recording(CONFIG)
        cache = jax.jit(lambda model, cache: model.hidden(batch, layout, cache)[1])(model, cache)
    pages = np.asarray(cache.choices).reshape(parallel.dp, own * BLOCKS, *cache.choices.shape[1:])
    owners = np.arange(rows) // own if own < rows else np.full(rows, parallel.dp - 1)
    found = np.moveaxis(pages[owners[:, None], np.asarray(table)], 2, 3)  # row block place layer X
    found = found.reshape(rows, -1, *found.shape[3:])
    assert (found[:, LENGTH:] == NO_ROUTE).all()
    return found[:, :LENGTH]


@pytest.mark.parametrize(("text", "rows"), [("dp2,tp2,ep", 4), ("dp2", 1)])
def test_a_mesh_records_the_experts_of_one_device(text, rows):
    """The last data rank's copy of a lone sequence, too."""
    found = record(text, rows)
    np.testing.assert_array_equal(found, record("tp1", 4)[:rows])
    assert (found != NO_ROUTE).all() and len(np.unique(found)) > 4
