"""What attention from pages may hold in memory: the chosen blocks, nothing longer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.layouts.pages import Blocks, Pages
from pallas_kernels.layouts.pool import LINE, Component
from pallas_kernels.sparse_attention import SPARSE, decode, masked, sparse_attention
from pallas_kernels.sparse_attention.plan import MULTIPROCESSORS, Plan
from tests.ops.oracles import portable, temporary_share

Z, C, K, G, H, P = 16, 4, 2, 2, 32, 8
N, S, SCALE = K * G, P * Z, H**-0.5


def _float_sizes(jaxpr):
    """Sizes of all floating arrays that a jaxpr makes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if jnp.issubdtype(variable.aval.dtype, jnp.floating):
                yield variable.aval.size
        for inner in jaxprs_in_params(equation.params):
            yield from _float_sizes(inner)


def test_decode_at_32k_tokens_makes_no_array_as_long_as_the_context():
    context, top_k, heads, width = 32_768, 16, 1, 128
    component = Component(format="nvfp4", heads=heads, tokens=128, width=width)
    pool = jax.ShapeDtypeStruct((300, component.lines, LINE), jnp.uint8)

    def decode(pool, q, ids, table, positions):
        pages = Pages(pool=pool, line=jnp.int32(0), component=component)
        return sparse_attention(q, pages, pages, ids, table, positions, scale=1.0)[0]

    integers = [(1, 1, heads, top_k), (1, context // 128), (1, 1)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
    q = jax.ShapeDtypeStruct((1, 1, 16, width), jnp.float32)
    sizes = list(_float_sizes(jax.make_jaxpr(decode)(pool, q, *arguments).jaxpr))
    chosen_keys = top_k * 128 * width
    assert max(sizes) == chosen_keys < context * width


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_decode_spreads_whole_units_in_the_memory_of_a_multiprocessor(parts):
    for units in [*range(1, 600), 1024, 10_000]:
        plan = Plan.of(units, parts)
        assert plan.together * plan.teams * plan.ctas == parts and plan.ctas <= 8
        pages, *rest, _ = decode._scratch(plan)
        held = sum(math.prod(x.shape) * x.dtype.itemsize for x in (pages, *rest))
        assert held < 227 * 1024
        if units > 2 * MULTIPROCESSORS:  # three CTAs of one warpgroup, 1 KB of each the system's
            assert plan.teams == 1 and (parts == 1 or 3 * (held + 2048) < 228 * 1024)


@pytest.mark.parametrize("name", portable(SPARSE))
def test_attending_to_pages_does_not_copy_the_pool(name):
    component = Component(format="fp8", heads=K, tokens=Z, width=H)
    q, ids = jnp.ones((1, 2, N, H)), jnp.broadcast_to(jnp.arange(C), (1, 2, K, C))
    table, position = jnp.arange(P)[None], jnp.full((1, 2), S - 1)
    options = {"scale": SCALE, "implementation": name}
    share = temporary_share(
        lambda pages: sparse_attention(q, pages, pages, ids, table, position, **options), component
    )
    assert share < 0.05


def test_from_pages_the_reference_reads_only_the_chosen_blocks():
    component = Component(format="f32", heads=K, tokens=Z, width=H)
    pool = jnp.zeros((512, component.lines, LINE), jnp.uint8)

    def attend(pool, q, ids, table, position):
        pages = Pages(pool=pool, line=jnp.int32(0), component=component)
        options = {"scale": SCALE, "implementation": "reference"}
        return sparse_attention(q, pages, pages, ids, table, position, **options)[0]

    arguments = jnp.ones((1, 1, N, H)), jnp.zeros((1, 1, K, C), jnp.int32)
    program = jax.jit(attend).lower(
        pool, *arguments, jnp.zeros((1, 512), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    )
    chosen_bytes = 2 * K * C * Z * H * 4
    assert program.compile().memory_analysis().temp_size_in_bytes < 6 * chosen_bytes < pool.size / 8


def test_a_wide_tile_is_cut_so_that_scores_stay_bounded(monkeypatch):
    """A tile's queries are walked in parts: the same result, and no [queries, context] scores."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 96, 4, 16))
    k, v = (Blocks(jax.random.normal(key, (12, 16, 2, 16))) for key in keys[1:])
    table = jnp.arange(12).reshape(2, 6)
    positions = jnp.broadcast_to(jnp.arange(96), (2, 96))

    def run():
        return masked.dense_attention(q, k, v, table, positions, scale=0.25)

    whole = run()
    monkeypatch.setattr(masked, "_MAX_SCORES", 4 * 96 * 10)  # ten queries at once: parts of eight
    parts = run()
    assert "8,4,16" in str(jax.make_jaxpr(run)()) and "96,96]" not in str(jax.make_jaxpr(run)())
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
