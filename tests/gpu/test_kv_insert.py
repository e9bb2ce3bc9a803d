"""kv_insert's kernel on the GPU against the reference: the same bytes, up to ties of roundings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_insert import KeyTransform, Query, Rows, Slots, kv_insert, with_queries
from pallas_kernels.layouts.pages import Pages, read
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from tests.numerics import assert_close, relative_error

pytestmark = pytest.mark.gpu

BLOCKS, Z, H, PAIRS = 7, 128, 128, 32
_insert = jax.jit(kv_insert, static_argnames=("layout", "implementation"))


def _layout(heads, kv="nvfp4", index="nvfp4", sparse=True):
    return PoolLayout(
        block_size=Z,
        kv_heads=heads,
        head_dim=H,
        index_dim=H,
        sparse_layers=(sparse,) * 3,
        formats=CacheFormats(kv=kv, index=index),
    )


def _arguments(tokens, heads, sparse=True, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    where = rng.permutation(BLOCKS * Z)[:tokens]
    ids, places = np.divmod(where, Z)
    ids = np.where(rng.random(tokens) < 0.2, -1, ids)
    rows = Rows(
        k=normal(tokens, heads, H),
        v=normal(tokens, heads, H),
        index_k=normal(tokens, 1, H) if sparse else None,
    )
    angles = rng.uniform(0, 6, (tokens, PAIRS))
    transform = KeyTransform(
        k_norm=normal(H) * 0.1,
        index_norm=normal(H) * 0.1 if sparse else None,
        cos=jnp.asarray(np.cos(angles), jnp.float32),
        sin=jnp.asarray(np.sin(angles), jnp.float32),
        eps=1e-6,
    )
    slots = Slots(block_ids=jnp.asarray(ids, jnp.int32), places=jnp.asarray(places, jnp.int32))
    return rows, slots, transform


def _pools(layout, rows, slots, transform, layer=1):
    """The pool after the kernel and after the reference; before, all bytes are 0xFF."""
    pool = jnp.full((BLOCKS, layout.lines, 128), 0xFF, jnp.uint8)
    line = jnp.int32(layout.layer_line(layer))
    names = ("mosaic", "reference")
    return [
        np.asarray(_insert(pool, layout, line, rows, slots, transform, implementation=name))
        for name in names
    ]


def _assert_same(layout, arguments):
    fast, expected = _pools(layout, *arguments)
    written = fast != 0xFF
    assert written.any() and (fast != expected).mean() < 1e-3, (fast != expected).mean()
    kinds = [("kv", layout.kv, 0), ("kv", layout.kv, layout.kv.lines)]
    if arguments[0].index_k is not None:
        kinds.append(("index", layout.index, 2 * layout.kv.lines))
    slots = arguments[1]
    stored = np.asarray(slots.block_ids) >= 0
    for name, component, offset in kinds:
        line = jnp.int32(layout.layer_line(1) + offset)
        ids = jnp.arange(BLOCKS)[:, None, None] * jnp.ones((1, component.heads, 1), jnp.int32)
        values = [
            np.asarray(read(Pages(pool=jnp.asarray(p), line=line, component=component), ids))
            for p in (fast, expected)
        ]
        ours, theirs = (
            v[np.asarray(slots.block_ids)[stored], :, 0, np.asarray(slots.places)[stored]]
            for v in values
        )
        assert np.isfinite(ours).all()
        assert relative_error(ours, theirs) < 1e-2, (name, offset, relative_error(ours, theirs))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4"), ("fp8", "bf16"), ("bf16", "fp8")])
def test_the_pages_hold_what_the_reference_writes(heads, formats):
    _assert_same(_layout(heads, *formats), _arguments(200, heads))


def test_a_layer_without_an_index_writes_keys_and_values_only():
    layout = _layout(2, "fp8", sparse=False)
    _assert_same(layout, _arguments(33, 2, sparse=False, seed=1))


@pytest.mark.parametrize("scale", [1e-4, 3e3])
def test_values_beyond_the_format_saturate_or_vanish_alike(scale):
    rows, slots, transform = _arguments(64, 1, seed=2, scale=scale)
    fast, expected = _pools(_layout(1), rows, slots, transform)
    assert (fast != expected).mean() < 1e-3


def test_values_are_stored_bit_for_bit():
    """No norm and no rotation touches a value, so that nothing can be a tie."""
    layout = _layout(4)
    fast, expected = _pools(layout, *_arguments(300, 4, seed=3))
    first = layout.layer_line(1) + layout.kv.lines
    part = slice(first, first + layout.kv.lines)
    assert_close(fast[:, part], expected[:, part], "exact")


@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_queries_turn_as_the_reference_turns_them(tokens):
    """In the same launch, and the pages are those without them. They are parts of one array, as a
    layer's projections are.
    """
    layout, rng = _layout(4), np.random.default_rng(5)
    rows, slots, transform = _arguments(min(tokens, 800), 4, seed=5)
    if tokens > 800:  # padding has queries too
        more = tokens - 800
        rows, transform = jax.tree.map(lambda x: _repeated(x, more), (rows, transform))
        ids = jnp.pad(slots.block_ids, (0, more), constant_values=-1)
        slots = Slots(block_ids=ids, places=jnp.pad(slots.places, (0, more)))
    heads = jnp.asarray(rng.standard_normal((tokens, 20, H)), jnp.bfloat16)
    weights = jnp.asarray(0.1 * rng.standard_normal((2, H)), jnp.bfloat16)
    pool = jnp.full((BLOCKS, layout.lines, 128), 0xFF, jnp.uint8)

    @partial(jax.jit, static_argnames="name")
    def run(pool, heads, name):
        queries = [Query(heads[:, :16], weights[0]), Query(heads[:, 16:], weights[1])]
        arguments = pool, layout, jnp.int32(layout.layer_line(1)), rows, slots, transform
        return with_queries(*arguments, queries, implementation=name)

    pages, turned = run(pool, heads, "mosaic")
    _, expected = run(pool, heads, "reference")
    for ours, theirs in zip(turned, expected, strict=True):
        assert_close(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), "bf16")
    alone = _insert(pool, layout, jnp.int32(layout.layer_line(1)), rows, slots, transform)
    assert (np.asarray(pages) == np.asarray(alone)).all()


def _repeated(x, more):
    """Rows of tokens and more of them; weights of norms as they are."""
    return x if x.ndim == 1 else jnp.concatenate([x, jnp.resize(x, (more, *x.shape[1:]))])


def test_nothing_else_is_written():
    layout = _layout(4)
    rows, slots, transform = _arguments(100, 4, seed=4)
    nowhere = Slots(block_ids=jnp.full_like(slots.block_ids, -1), places=slots.places)
    fast, _ = _pools(layout, rows, nowhere, transform)
    assert (fast == 0xFF).all()
    fast, _ = _pools(layout, rows, slots, transform)
    assert (fast[:, : layout.layer_line(1)] == 0xFF).all()
    assert (fast[:, layout.layer_line(2) :] == 0xFF).all()


def test_the_pool_is_not_copied():
    layout = _layout(4)
    leaves, tree = jax.tree.flatten(_arguments(8, 4))  # `lower` cannot rebuild checked dataclasses
    pool = jax.ShapeDtypeStruct((4096, layout.lines, 128), jnp.uint8)

    def insert(pool, leaves):
        line = jnp.int32(layout.layer_line(1))
        arguments = jax.tree.unflatten(tree, leaves)
        return kv_insert(pool, layout, line, *arguments, implementation="mosaic")

    program = jax.jit(insert, donate_argnums=0).lower(pool, leaves).compile()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * memory.argument_size_in_bytes
