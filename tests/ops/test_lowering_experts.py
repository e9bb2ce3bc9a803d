"""The experts' kernels lower to CUDA with the installed JAX, on a machine without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import Activation, Matrices, mosaic
from pallas_kernels.layouts.nvfp4_pages import LINE, LINES, NVFP4Pages

E, D, F, X = 8, 512, 768, 4
_KERNEL = "mosaic_gpu"  # names the custom call


def _shape(*axes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(axes, dtype)


def _pages(rows, columns):
    pages = _shape(E, rows // 32, columns // 128, LINES, LINE, dtype=jnp.uint8)
    return NVFP4Pages(pages, _shape(E, dtype=jnp.float32))


def _lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, jnp.bfloat16), (2, jnp.float16), (40, jnp.bfloat16)]
)
def test_routed_experts_lower_for_few_and_many_tokens(tokens, dtype):
    def experts(x, matrices, ids, weights):
        return mosaic.mixture(x, matrices, ids, weights, Activation(), None)

    matrices = Matrices(_pages(F, D), _pages(F, D), _pages(D, F))
    weights = _shape(tokens, X, dtype=jnp.float32)
    rows = _shape(tokens, D, dtype=dtype), matrices, _shape(tokens, X), weights
    assert _lowered(experts, *rows).count(_KERNEL) >= 3


def test_one_matrix_an_expert_lowers():
    def products(x, weights, sizes):
        return mosaic.grouped_matmul(x, weights, sizes, out_dtype=jnp.float32)

    rows = _shape(600, D, dtype=jnp.bfloat16), _pages(F, D), _shape(E)
    assert _KERNEL in _lowered(products, *rows)
