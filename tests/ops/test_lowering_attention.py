"""The Mosaic kernels of attention lower to CUDA with the installed JAX, on a machine without a
GPU.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import Component
from pallas_kernels.sparse_attention import decode, prefill
from pallas_kernels.window_attention import hopper

_KERNEL = "mosaic_gpu"  # names the custom call
_SCALE = 128**-0.5


def _shape(*axes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(axes, dtype)


def _lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def _sparse(kernel, batch, queries, heads, chosen) -> str:
    component = Component(format="nvfp4", heads=heads, tokens=128, width=128)

    def attend(q, pool, line, *rest):
        k = Pages(pool=pool, line=line, component=component)
        v = Pages(pool=pool, line=line + component.lines, component=component)
        return kernel(q, k, v, *rest, scale=_SCALE)

    return _lowered(
        attend,
        _shape(batch, queries, 16 * heads, 128, dtype=jnp.bfloat16),
        _shape(50, 2 * component.lines + 8, 128, dtype=jnp.uint8),
        _shape(),
        _shape(batch, queries, heads, chosen),
        _shape(batch, 40),
        _shape(batch, queries),
    )


@pytest.mark.parametrize(
    ("batch", "queries", "heads", "chosen"),
    [
        (1, 1, 4, 16),
        (32, 1, 4, 16),
        (40, 1, 4, 16),
        (32, 8, 4, 16),
        (3, 2, 1, 5),
        (1, 1, 2, 32),
        (2, 1, 1, 1),
    ],
)
def test_decode_lowers_however_units_are_spread(batch, queries, heads, chosen):
    assert _KERNEL in _sparse(decode.sparse_attention, batch, queries, heads, chosen)


@pytest.mark.parametrize(("batch", "queries"), [(4, 128), (1, 100)])
def test_prefill_lowers(batch, queries):
    assert _KERNEL in _sparse(prefill.sparse_attention, batch, queries, 2, 16)


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("queries", [1, 7])
def test_the_drafters_window_lowers(fmt, queries):
    component = Component(format=fmt, heads=2, tokens=128, width=128)

    def attend(q, own_k, own_v, pool, table, lengths):
        k, v = (Pages(pool=pool, line=jnp.int32(i), component=component) for i in (0, 512))
        options = {"window": 4096, "scale": _SCALE}
        return hopper.window_attention(q, k, v, own_k, own_v, table, lengths, **options)

    own = _shape(3, queries, 2, 128, dtype=jnp.bfloat16)
    q = _shape(3, queries, 32, 128, dtype=jnp.bfloat16)
    pool = _shape(99, 1024, 128, dtype=jnp.uint8)
    assert _KERNEL in _lowered(attend, q, own, own, pool, _shape(3, 33), _shape(3))
