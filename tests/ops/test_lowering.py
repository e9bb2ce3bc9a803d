"""Every Mosaic kernel lowers to CUDA with the installed JAX, on a machine without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_select import mosaic as select
from pallas_kernels.block_select import schedule, score
from pallas_kernels.block_select.top_k import top_blocks
from pallas_kernels.kv_insert import KeyTransform, Query, Rows, Slots, mosaic
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import CacheFormats, Component, PoolLayout

_KERNEL = "mosaic_gpu"  # names the custom call


def _shape(*axes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(axes, dtype)


def _lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(4, 131), (8, 131), (8, 5000), (16, 131), (32, 131), (64, 131), (128, 131), (512, 131)],
)
def test_scores_lower_for_every_number_of_rows(rows, blocks):
    def scores(q, pool, line, table, positions):
        programs = score.programs(2, rows, blocks)
        plan = schedule.make(positions, table, heads=4, block_size=128, programs=programs)
        return score.block_scores(q, pool, line, plan, blocks)

    q, pool = _shape(2, rows, 128, dtype=jnp.bfloat16), _shape(200, 648, 128, dtype=jnp.uint8)
    lowered = _lowered(scores, q, pool, _shape(), _shape(2, blocks), _shape(2, rows // 4))
    assert _KERNEL in lowered


@pytest.mark.parametrize("init_blocks", [0, 1])
def test_the_choice_of_blocks_lowers(init_blocks):
    def choose(scores, positions):
        return top_blocks(
            scores,
            positions,
            heads=4,
            block_size=128,
            top_k=16,
            init_blocks=init_blocks,
            local_blocks=1,
        )

    assert _KERNEL in _lowered(choose, _shape(3, 32, 1024, dtype=jnp.float32), _shape(3, 8))


@pytest.mark.parametrize(("queries", "heads", "blocks"), [(1, 4, 131), (8, 4, 1024), (8, 8, 6)])
def test_scores_and_choice_lower_apart(queries, heads, blocks):
    """As ranks that share a context call them: the parts of three make the whole."""
    component = Component(format="nvfp4", heads=1, tokens=128, width=128)

    def choose(q, pool, table, positions):
        pages = Pages(pool=pool, line=jnp.int32(0), component=component)
        scores = select.block_scores(q, pages, table, positions)
        scores = jnp.concatenate([scores] * 3, axis=-1)
        forced = {"init_blocks": 1, "local_blocks": 1}
        return select.best_blocks(scores, positions, block_size=128, top_k=16, **forced)

    q = _shape(3, queries, heads, 128, dtype=jnp.bfloat16)
    pool = _shape(200, 72, 128, dtype=jnp.uint8)
    lowered = _lowered(choose, q, pool, _shape(3, blocks), _shape(3, queries))
    assert lowered.count(_KERNEL) >= 2


@pytest.mark.parametrize("kv", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("sparse", [True, False])
def test_inserting_lowers_and_is_in_place(kv, sparse):
    layout = PoolLayout(
        block_size=128,
        kv_heads=2,
        head_dim=128,
        index_dim=128,
        sparse_layers=(sparse,),
        formats=CacheFormats(kv=kv, index="nvfp4"),
    )

    def insert(pool, k, index_k, norm, angles, slots):
        rows = Rows(k=k, v=k, index_k=index_k if sparse else None)
        index_norm = norm if sparse else None
        transform = KeyTransform(
            k_norm=norm, index_norm=index_norm, cos=angles, sin=angles, eps=1e-6
        )
        queries = [Query(k, norm), Query(index_k, norm)][: 1 + sparse]
        return mosaic.kv_insert(
            pool, layout, 0, rows, Slots(block_ids=slots, places=slots), transform, queries
        )

    half = jnp.bfloat16
    lowered = _lowered(
        insert,
        _shape(9, layout.lines, 128, dtype=jnp.uint8),
        _shape(5, 2, 128, dtype=half),
        _shape(5, 1, 128, dtype=half),
        _shape(128, dtype=half),
        _shape(5, 32, dtype=jnp.float32),
        _shape(5),
    )
    assert _KERNEL in lowered and "output_operand_alias<" in lowered
