"""Blocks seen through what a pool holds for them: its bytes count, and the gradient is x's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pool import Component, through_cache, through_record, write
from tests.numerics import assert_close

BLOCKS, TOKENS, HEADS, WIDTH, LINE = 3, 16, 2, 32, 5


_write = jax.jit(write, static_argnums=(1,))
_through_cache = jax.jit(through_cache, static_argnums=(1,))


@partial(jax.jit, static_argnums=(2,))
def seen_and_gradient(x, pool, component, weight):
    """What the pool gives back, and the gradient of its product with a weight."""

    def product(x):
        seen = through_record(x, pool, component, LINE)
        return jnp.sum(seen * weight), seen

    gradient, seen = jax.grad(product, has_aux=True)(x)
    return seen, gradient


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_a_tie_falls_as_it_fell_in_the_pool(fmt):
    """A value just beside the middle of two codes gives what was stored, though it would round to
    the other one by itself.
    """
    component = Component(format=fmt, heads=HEADS, tokens=TOKENS, width=WIDTH)
    random = np.random.default_rng(0)
    x = random.normal(size=(BLOCKS, TOKENS, HEADS, WIDTH)).astype(np.float32)
    x[..., 0] = 6.0  # in NVFP4 the largest of its group, whose scale is then 1
    x[..., 1] = 0.25 if fmt == "nvfp4" else 1.0625  # half-way between two codes
    other = x.copy()
    other[..., 1] *= np.float32(1 + 1e-6)
    pool = jnp.zeros((BLOCKS, LINE + component.lines, 128), jnp.uint8)
    places, rows = jnp.arange(BLOCKS * TOKENS), jnp.asarray(x).reshape(-1, HEADS, WIDTH)
    pool = _write(pool, component, LINE, places // TOKENS, places % TOKENS, rows)
    weight = random.normal(size=x.shape).astype(np.float32)
    seen, gradient = seen_and_gradient(other, pool, component, weight)
    assert_close(seen, _through_cache(x, fmt), "exact")
    assert (np.asarray(_through_cache(other, fmt)) != np.asarray(seen)).any()
    assert_close(gradient, weight, "exact")
