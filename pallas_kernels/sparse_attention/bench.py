"""Rows of the benchmark: attention over chosen NVFP4 blocks, at full width on one rank.

Blocks are drawn for each query and KV head on its own, the newest always among them (`random
blocks`), or drift slowly along the queries of a tile (`shared blocks`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import CALLS, Benchmark, random_pool, random_tables, rotation
from pallas_kernels.cases import ONE_RANK, AttentionCase
from pallas_kernels.layouts.pages import Blocks, Pages
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.timing import Chain

_FORMATS = CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8")
_DRIFT = 0.05  # how far a query's scores are from its neighbours': 15.6 of 16 blocks are shared
_PREFILLS = 6  # calls of a chain
_TRAININGS, _TRAINED = 6, 4096  # calls of a chain, tokens
_NEVER, _FIRST = 9.0, -1.0  # scores, others are 0 .. 2


def _layout(case: AttentionCase) -> PoolLayout:
    layers = 1 if case.queries > 8 else rotation(_page_bytes(case))
    return PoolLayout(
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        index_dim=case.index_dim,
        sparse_layers=(True,) * layers,
        formats=_FORMATS,
    )


def _chain(case: AttentionCase, table, positions, ids: list) -> Chain:
    """Calls whose queries are the results of the call before."""
    layout = _layout(case)
    component, layers = layout.kv, len(layout.sparse_layers)
    shape = (*positions.shape, case.heads, case.head_dim)

    @jax.jit
    def attend(pool, q, k_line, v_line, ids):
        k, v = (Pages(pool=pool, line=line, component=component) for line in (k_line, v_line))
        scale = case.head_dim**-0.5
        return sparse_attention(q, k, v, ids, table, positions, scale=scale)

    lines = [layout.layer_line(i % layers) for i in range(len(ids))]
    return Chain(
        lambda pool, q, operands: attend(pool, q, *operands),
        random_pool(layout, int(table.max()) + 1),
        jax.random.normal(jax.random.key(0), shape, jnp.bfloat16),
        [
            (jnp.int32(line), jnp.int32(line + component.lines), one)
            for line, one in zip(lines, ids, strict=True)
        ],
    )


def _decode(case: AttentionCase) -> Chain:
    last = case.context - case.queries + jnp.arange(case.queries, dtype=jnp.int32)
    positions = jnp.broadcast_to(last, (case.batch, case.queries))
    rng = np.random.default_rng(0)
    ids = [_choose(case, np.asarray(positions), rng.random) for _ in range(CALLS)]
    return _chain(case, random_tables(case.batch, case.blocks), positions, ids)


def _prefill(case: AttentionCase, drift: float | None) -> Chain:
    """One sequence of `batch` tiles, all of it."""
    positions = np.arange(case.context, dtype=np.int32).reshape(case.batch, case.queries)
    rng = np.random.default_rng(0)
    draw = rng.random if drift is None else partial(_drifting, rng, drift)
    ids = _choose(case, positions, draw)
    table = jnp.broadcast_to(random_tables(1, case.blocks), (case.batch, case.blocks))
    return _chain(case, table, jnp.asarray(positions), [ids] * _PREFILLS)


def _training(case: AttentionCase) -> Chain:
    """One sequence in one tile, forwards and backwards; q's gradient goes from call to call."""
    positions = np.arange(case.context, dtype=np.int32)[None]
    ids = _choose(case, positions, np.random.default_rng(0).random)
    table = random_tables(1, case.blocks)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (1, case.queries, case.heads, case.head_dim), jnp.bfloat16)
    shape = (case.blocks, case.block_size, case.kv_heads, case.head_dim)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:3])
    d_out = jax.random.normal(keys[3], q.shape, jnp.bfloat16)

    def call(constants, q, ids):
        k, v, table, positions, d_out = constants

        def attend(q, k, v):
            scale = case.head_dim**-0.5
            return sparse_attention(q, Blocks(k), Blocks(v), ids, table, positions, scale=scale)[0]

        _, backward = jax.vjp(attend, q, k, v)
        d_q, d_k, d_v = backward(d_out)
        return d_q, (d_k, d_v)

    constants = k, v, table, jnp.asarray(positions), d_out
    return Chain(call, constants, q, [ids] * _TRAININGS)


def _choose(case: AttentionCase, positions: np.ndarray, draw: Callable) -> jax.Array:
    """The C causal blocks of the least scores, the newest among them; -1 where there are fewer."""
    scores = draw((*positions.shape, case.kv_heads, case.blocks))
    own = (positions // case.block_size)[..., None, None]
    blocks = np.arange(case.blocks)
    scores = np.where(blocks < own, scores, _NEVER)
    scores = np.where(blocks == own, _FIRST, scores)
    ids = np.argsort(scores, -1)[..., : case.top_k]
    return jnp.asarray(np.where(ids <= own, ids, -1), jnp.int32)


def _drifting(rng: np.random.Generator, drift: float, shape: tuple[int, ...]) -> np.ndarray:
    """Scores that go from one draw to the next along the queries of a tile, and some noise."""
    tiles, queries, *rest = shape
    ends = rng.random((tiles + 1, 1, *rest))
    weight = (np.arange(queries) / queries).reshape(queries, 1, 1)
    return ends[:-1] * (1 - weight) + ends[1:] * weight + drift * rng.random(shape)


def _page_bytes(case: AttentionCase) -> int:
    """Bytes of the chosen blocks of all queries."""
    row = case.head_dim // 2 + case.head_dim // 16
    units = case.batch * case.queries * case.kv_heads
    return units * min(case.top_k, case.blocks) * case.block_size * 2 * row


def _flops(case: AttentionCase) -> int:
    keys = case.top_k * case.block_size
    return 4 * case.batch * case.queries * case.heads * keys * case.head_dim


def _decode_row(name: str, aim_us: float) -> Benchmark:
    case = ONE_RANK[name]
    return Benchmark(
        name=f"attend {case.title}",
        make=partial(_decode, case),
        bytes=_page_bytes(case),
        flops=_flops(case),
        aim_us=aim_us,
    )


def _prefill_row(blocks: str, drift: float | None, aim_us: float) -> Benchmark:
    case = ONE_RANK["prefill_16k"]
    return Benchmark(
        name=f"attend prefill 16K, {blocks} blocks",
        make=partial(_prefill, case, drift),
        bytes=2 * case.batch * case.queries * case.heads * case.head_dim * 2,
        flops=_flops(case),
        aim_us=aim_us,
    )


def _training_row() -> Benchmark:
    """Two products forwards, five backwards, of the pairs that are causal."""
    whole = ONE_RANK["prefill_16k"]
    case = replace(whole, batch=1, queries=_TRAINED, context=_TRAINED)
    own = np.arange(_TRAINED) // case.block_size
    keys = np.minimum(own, case.top_k - 1) * case.block_size + np.arange(_TRAINED) % case.block_size
    return Benchmark(
        name="attend training 4K, forward and backward",
        make=partial(_training, case),
        bytes=0,
        flops=7 * 2 * int((keys + 1).sum()) * case.heads * case.head_dim,
        aim_us=10_000,  # what a layer's routed experts take, forward and backward
    )


BENCHMARKS = (
    _decode_row("decode_32k", 6),
    _decode_row("decode_32x32k", 18),
    _decode_row("verify_32x32k", 105),
    _prefill_row("random", None, 5000),
    _prefill_row("shared", _DRIFT, 3500),
    _training_row(),
)
