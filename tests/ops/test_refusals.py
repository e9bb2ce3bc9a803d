"""What the kernels do not do, they refuse with a sentence."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels.block_select import mosaic as select_kernel
from pallas_kernels.kv_insert import KeyTransform, Rows, Slots
from pallas_kernels.kv_insert import mosaic as insert_kernel
from pallas_kernels.layouts.pages import Blocks, Pages
from pallas_kernels.layouts.pool import CacheFormats, Component, PoolLayout

INDEX = Component(format="nvfp4", heads=1, tokens=128, width=128)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    for module in (select_kernel, insert_kernel):
        monkeypatch.setattr(module, "refuse_device", lambda: None)


def _pages(component=INDEX, **options):
    pool = jnp.zeros((3, component.lines, 128), jnp.uint8)
    return Pages(pool=pool, line=jnp.int32(0), component=component, **options)


def _refuse(q=jnp.bfloat16, heads=4, pages=None, **options):
    options = {"top_k": 16, "init_blocks": 0, "local_blocks": 1, **options}
    query = jnp.zeros((2, 1, heads, 128), q)
    table, positions = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 1), jnp.int32)
    return select_kernel.refuse(query, pages or _pages(), table, positions, **options)


def test_what_the_selection_is_for_is_not_refused():
    assert _refuse() is None and _refuse(jnp.float16, heads=1) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"q": jnp.float32}, "index queries are float32, neither bfloat16 nor float16"),
        ({"heads": 3}, "3 index heads, not one of (1, 2, 4, 8)"),
        ({"local_blocks": 0}, "local_blocks=0: the newest block is not always chosen"),
        ({"top_k": 33}, "top_k=33 is more than 32"),
        ({"pages": _pages(compute="e4m3")}, "cache compute 'e4m3' is not 'exact'"),
        ({"pages": _pages(replace(INDEX, format="fp8"))}, "index keys are not NVFP4 pages"),
        ({"pages": Blocks(jnp.zeros((3, 128, 1, 128)))}, "index keys are not NVFP4 pages"),
        ({"pages": _pages(replace(INDEX, tokens=16))}, "index pages of 16 x 128, not 128 x 128"),
    ],
)
def test_what_the_selection_cannot_do_is_refused(arguments, sentence):
    assert _refuse(**arguments) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"kv": "f32"}, "pages are f32, not one of nvfp4, fp8, bf16"),
        ({"width": 64}, "vectors of 64 elements, not 128"),
        ({"dtype": jnp.float32}, "rows are float32, not bfloat16"),
        ({"pairs": 24}, "24 pairs are rotated, not one of (16, 32, 64)"),
    ],
)
def test_what_the_insertion_cannot_do_is_refused(change, sentence):
    kv, width = change.get("kv", "nvfp4"), change.get("width", 128)
    layout = PoolLayout(
        block_size=128,
        kv_heads=1,
        head_dim=width,
        index_dim=128,
        sparse_layers=(False,),
        formats=CacheFormats(kv=kv),
    )
    x = jnp.zeros((5, 1, width), change.get("dtype", jnp.bfloat16))
    angles, where = jnp.zeros((5, change.get("pairs", 32))), jnp.zeros(5, jnp.int32)
    transform = KeyTransform(
        k_norm=jnp.zeros(width), index_norm=None, cos=angles, sin=angles, eps=1e-6
    )
    rows, slots = Rows(k=x, v=x, index_k=None), Slots(block_ids=where, places=where)
    assert insert_kernel.refuse(layout.empty(2), layout, 0, rows, slots, transform) == sentence
