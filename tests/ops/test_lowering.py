"""Every Mosaic kernel lowers to CUDA with the installed JAX, on a machine without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_select import schedule, score
from pallas_kernels.block_select.top_k import top_blocks

_KERNEL = "mosaic_gpu"  # names the custom call


def _shape(*axes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(axes, dtype)


def _lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [4, 8, 16, 32, 64, 128, 512])
def test_scores_lower_for_every_number_of_rows(rows):
    def scores(q, pool, line, table, positions):
        options = {"heads": 4, "block_size": 128, "programs": score.PROGRAMS}
        plan = schedule.make(positions, table, **options)
        return score.block_scores(q, pool, line, plan, table.shape[1])

    q, pool = _shape(2, rows, 128, dtype=jnp.bfloat16), _shape(200, 648, 128, dtype=jnp.uint8)
    lowered = _lowered(scores, q, pool, _shape(), _shape(2, 131), _shape(2, rows // 4))
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
