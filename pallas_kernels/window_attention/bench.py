"""Rows of the benchmark: the drafter's window of pages, at full width on one of four ranks, and on
one.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark import CALLS, Benchmark, random_pool, random_tables, rotation
from pallas_kernels.cases import WINDOW, WindowCase
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from pallas_kernels.timing import Chain
from pallas_kernels.window_attention import window_attention

_BYTES = {"fp8": 1, "bf16": 2}
_CONTEXT = 5120  # tokens that are stored: the window never needs more


def _make(case: WindowCase) -> Chain:
    layers = rotation(_page_bytes(case))
    layout = PoolLayout(
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        index_dim=case.head_dim,
        sparse_layers=(),
        draft_layers=layers,
        formats=CacheFormats(kv="nvfp4", index="nvfp4", draft=case.format),
    )
    component = layout.draft
    table = random_tables(case.batch, _CONTEXT // case.block_size)
    lengths = jnp.full((case.batch,), _CONTEXT - 5, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    block = (case.batch, case.queries, case.kv_heads, case.head_dim)
    own_k, own_v = (jax.random.normal(key, block, jnp.bfloat16) for key in keys[:2])

    @jax.jit
    def attend(pool, q, k_line, v_line):
        k, v = (Pages(pool=pool, line=line, component=component) for line in (k_line, v_line))
        options = {"window": case.window, "scale": case.head_dim**-0.5}
        return window_attention(q, k, v, own_k, own_v, table, lengths, **options)

    def call(pool, q, lines):
        out = attend(pool, q, *lines)
        return out, out[0, 0, 0]

    first = [layout.draft_line(i % layers) for i in range(CALLS)]
    shape = (case.batch, case.queries, case.heads, case.head_dim)
    pool = random_pool(layout, table.size) & 0xBF  # keeps FP8 small and BF16 finite
    lines = [(jnp.int32(line), jnp.int32(line + component.lines)) for line in first]
    return Chain(call, pool, jax.random.normal(keys[2], shape, jnp.bfloat16), lines)


def _page_bytes(case: WindowCase) -> int:
    return 2 * case.batch * case.window * case.kv_heads * case.head_dim * _BYTES[case.format]


def _row(case: WindowCase) -> Benchmark:
    return Benchmark(
        name=f"window {case.batch} x {case.queries}, {case.kv_heads} KV, {case.format}",
        make=partial(_make, case),
        bytes=_page_bytes(case),
        flops=4 * case.batch * case.queries * case.heads * case.window * case.head_dim,
    )


_FULL = WINDOW["full_draft"]
BENCHMARKS = tuple(
    _row(case)
    for case in (
        replace(_FULL, batch=1, heads=64, kv_heads=4),
        _FULL,
        replace(_FULL, heads=64, kv_heads=4),
        replace(_FULL, format="bf16"),
    )
)
