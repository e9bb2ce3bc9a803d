"""Rows of the benchmark: choosing blocks from NVFP4 index pages, at full width on one rank."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark import CALLS, Benchmark, random_pool, random_tables, rotation
from pallas_kernels.block_select import block_select
from pallas_kernels.cases import ONE_RANK, AttentionCase
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from pallas_kernels.timing import Chain

_FORMATS = CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8")
_AIMS = {"decode_512k": 19, "decode_64x128k": 165}


@dataclass(frozen=True)
class _Inputs:
    """Arrays of a case: a pool of some layers, and the operands that stay the same."""

    pool: jax.Array
    layout: PoolLayout
    table: jax.Array
    positions: jax.Array
    q: jax.Array

    def pages(self, pool: jax.Array, line: jax.Array) -> Pages:
        return Pages(pool=pool, line=line, component=self.layout.index)

    @property
    def lines(self) -> list[jax.Array]:
        """Where the index keys of each call begin."""
        layers = len(self.layout.sparse_layers)
        first = [self.layout.layer_line(i) + 2 * self.layout.kv.lines for i in range(layers)]
        return [jnp.int32(first[i % layers]) for i in range(CALLS)]


def inputs(case: AttentionCase, seed: int = 0) -> _Inputs:
    """Random pages and queries; the queries are the last of a full context."""
    layout = PoolLayout(
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        index_dim=case.index_dim,
        sparse_layers=(True,) * rotation(_page_bytes(case)),
        formats=_FORMATS,
    )
    shape = (case.batch, case.queries, case.kv_heads, case.index_dim)
    last = case.context - case.queries + jnp.arange(case.queries, dtype=jnp.int32)
    return _Inputs(
        pool=random_pool(layout, case.batch * case.blocks, seed),
        layout=layout,
        table=random_tables(case.batch, case.blocks, seed),
        positions=jnp.broadcast_to(last, shape[:2]),
        q=jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16),
    )


def _select(case: AttentionCase) -> Chain:
    x = inputs(case)

    def call(pool, q, line):
        ids = block_select(q, x.pages(pool, line), x.table, x.positions, top_k=case.top_k)
        return q, ids

    return Chain(call, x.pool, x.q, x.lines)


def _page_bytes(case: AttentionCase) -> int:
    return case.batch * case.context * (case.index_dim // 2 + case.index_dim // 16)


def _row(name: str) -> Benchmark:
    case = ONE_RANK[name]
    return Benchmark(
        name=f"select {case.title}",
        make=partial(_select, case),
        bytes=_page_bytes(case),
        aim_us=_AIMS.get(name),
    )


BENCHMARKS = tuple(
    _row(name) for name in ("decode_512k", "verify_512k", "decode_64x128k", "verify_16x128k")
)
