"""Rows of the benchmark: choosing blocks from NVFP4 index pages, at full width on one rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark import CALLS, Benchmark, random_pool, random_tables, rotation
from pallas_kernels.block_select import block_select, schedule, score
from pallas_kernels.cases import ONE_RANK, AttentionCase
from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from pallas_kernels.timing import Chain

_FORMATS = CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8")
_AIMS = {  # issue 6
    ("score", "decode_512k"): 14,
    ("score", "verify_512k"): 20,
    ("score", "decode_64x128k"): 152,
    ("score", "verify_16x128k"): 52,
    ("select", "decode_512k"): 19,
    ("select", "decode_64x128k"): 165,
    ("score", "prefill_16k"): 300,
}


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
    """Random pages and queries: the last ones of a full context, or (as many tiles as the context
    has blocks) all of one sequence.
    """
    prefill = case.batch * case.queries == case.context
    sequences = 1 if prefill else case.batch
    layout = PoolLayout(
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        index_dim=case.index_dim,
        sparse_layers=(True,) * (1 if prefill else rotation(_page_bytes(case))),
        formats=_FORMATS,
    )
    shape = (case.batch, case.queries, case.kv_heads, case.index_dim)
    last = case.context - case.queries + jnp.arange(case.queries, dtype=jnp.int32)
    positions = jnp.broadcast_to(last, shape[:2])
    if prefill:
        positions = jnp.arange(case.context, dtype=jnp.int32).reshape(shape[:2])
    table = random_tables(sequences, case.blocks, seed)
    return _Inputs(
        pool=random_pool(layout, sequences * case.blocks, seed),
        layout=layout,
        table=jnp.broadcast_to(table, (case.batch, case.blocks)),
        positions=positions,
        q=jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16),
    )


def _select(case: AttentionCase) -> Chain:
    x = inputs(case)

    def call(constants, q, line):
        pool, table, positions = constants
        return q, block_select(q, x.pages(pool, line), table, positions, top_k=case.top_k)

    return Chain(call, (x.pool, x.table, x.positions), x.q, x.lines)


def _score(case: AttentionCase) -> Chain:
    """Scores alone, by a schedule that a step computes once for all of its layers."""
    x = inputs(case)
    plan = schedule.make(
        x.positions,
        x.table,
        heads=case.kv_heads,
        block_size=case.block_size,
        programs=score.programs(case.batch, case.queries * case.kv_heads, case.blocks),
    )

    def call(constants, q, line):
        pool, plan = constants
        return q, score.block_scores(q, pool, line, plan, case.blocks)

    rows = x.q.reshape(case.batch, case.queries * case.kv_heads, case.index_dim)
    return Chain(call, (x.pool, plan), rows, x.lines)


def _page_bytes(case: AttentionCase) -> int:
    return case.batch * case.context * (case.index_dim // 2 + case.index_dim // 16)


def _decode_row(kind: str, make: Callable[[AttentionCase], Chain], name: str) -> Benchmark:
    case = ONE_RANK[name]
    return Benchmark(
        name=f"{kind} {case.title}",
        make=partial(make, case),
        bytes=_page_bytes(case),
        aim_us=_AIMS.get((kind, name)),
    )


def _prefill_row(kind: str, make: Callable[[AttentionCase], Chain]) -> Benchmark:
    """A prompt scored against itself, in tiles of a block: half of all pairs are causal."""
    case = ONE_RANK["prefill_16k"]
    return Benchmark(
        name=f"{kind} prefill {case.context // 1024}K",
        make=partial(make, case),
        bytes=case.context * (case.index_dim // 2 + case.index_dim // 16),
        flops=case.context**2 * case.kv_heads * case.index_dim,
        aim_us=_AIMS.get((kind, "prefill_16k")),
    )


_CASES = ("decode_512k", "verify_512k", "decode_64x128k", "verify_16x128k")
BENCHMARKS = (
    *(_decode_row("score", _score, name) for name in _CASES),
    *(_decode_row("select", _select, name) for name in _CASES),
    _prefill_row("score", _score),
    _prefill_row("select", _select),
)
