"""No step program of a mesh copies a rank's row of the pool."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from configs.parallel import ParallelConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import POOL_AXES, Cache, local_heads, pool_layout
from minimax_jax.steps import prefill
from pallas_kernels.layouts.pool import LINE, CacheFormats
from sharding import SERVE, make_mesh, named_sharding
from tests.model.models import small
from tests.sharding.test_model_on_meshes import placed

pytestmark = [pytest.mark.devices(8), pytest.mark.slow]  # 10 s a mesh
CONFIG, BLOCKS = small(2), 16384


def step(layout, model, pool, tile, table, row, logits):
    batch = Batch(tokens=tile, positions=tile, block_table=table)
    cache, logits = prefill(model, None, Cache(pool=pool, layout=layout), batch, row, logits)
    return cache.pool, logits


@pytest.mark.parametrize("text", ["tp4", "tp4,sp,overlap", "dp2,tp2,ep,sp"])
def test_a_prefill_copies_no_pool(text):
    parallel = ParallelConfig.parse(text)
    mesh = make_mesh(parallel)
    model = placed(mesh, parallel)
    heads = local_heads(CONFIG, mesh)
    layout = pool_layout(CONFIG, CacheFormats(kv="nvfp4", index="nvfp4"), heads)
    shape, B = (mesh.size, BLOCKS, layout.lines, LINE), parallel.dp
    sharding = named_sharding(mesh, POOL_AXES, SERVE, shape)
    pool = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=sharding)
    tile, table = jnp.zeros((B, 32), jnp.int32), jnp.zeros((B, 8), jnp.int32)
    arguments = tile, table, jnp.zeros(B, jnp.int32), jnp.zeros((B, CONFIG.vocab_size))
    with jax.set_mesh(mesh):
        run = jax.jit(partial(step, layout), donate_argnums=1)
        needs = run.lower(model, pool, *arguments).compile().memory_analysis()
    assert needs.temp_size_in_bytes < 0.05 * layout.block_bytes * BLOCKS
