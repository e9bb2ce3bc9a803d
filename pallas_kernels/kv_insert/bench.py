"""Rows of the benchmark: one layer's keys and values written into NVFP4 pages, full width."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import CALLS, Benchmark, random_pool
from pallas_kernels.cases import ONE_RANK
from pallas_kernels.kv_insert import KeyTransform, Rows, Slots, kv_insert
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from pallas_kernels.timing import Chain

_CASE = ONE_RANK["decode_32k"]
_ROTATED = 32  # pairs of a head
_TOKENS = {"insert 32 tokens": 32, "insert 16K tokens": 16_384}
_BLOCKS = 512
_LAYOUT = PoolLayout(
    block_size=_CASE.block_size,
    kv_heads=_CASE.kv_heads,
    head_dim=_CASE.head_dim,
    index_dim=_CASE.index_dim,
    sparse_layers=(True,) * CALLS,
    formats=CacheFormats(kv="nvfp4", index="nvfp4"),
)


def _chain(tokens: int) -> Chain:
    """A chain whose calls write to one layer after the other; the pool goes from call to call."""
    c, keys = _CASE, jax.random.split(jax.random.key(0), 5)

    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    rows = Rows(
        k=normal(keys[0], tokens, c.kv_heads, c.head_dim),
        v=normal(keys[1], tokens, c.kv_heads, c.head_dim),
        index_k=normal(keys[2], tokens, 1, c.index_dim),
    )
    where = np.random.default_rng(0).permutation(_BLOCKS * c.block_size)[:tokens]
    where = np.sort(where) if tokens > _BLOCKS else where
    ids, places = (jnp.asarray(x, jnp.int32) for x in np.divmod(where, c.block_size))
    angles = jax.random.normal(keys[3], (tokens, _ROTATED))
    weights = normal(keys[4], c.head_dim)
    transform = KeyTransform(
        k_norm=weights, index_norm=weights, cos=jnp.cos(angles), sin=jnp.sin(angles), eps=1e-6
    )

    def call(constants, pool, line):
        rows, slots, transform = constants
        return kv_insert(pool, _LAYOUT, line, rows, slots, transform), ()

    lines = [jnp.int32(_LAYOUT.layer_line(i)) for i in range(CALLS)]
    constants = rows, Slots(block_ids=ids, places=places), transform
    return Chain(call, constants, random_pool(_LAYOUT, _BLOCKS), lines)


def _bytes(tokens: int) -> int:
    """Rows read in bfloat16 and written in 4.5 bits, and the angles."""
    vectors = (2 * _CASE.kv_heads + 1) * (2 * _CASE.head_dim + _CASE.head_dim * 9 // 16)
    return tokens * (vectors + 2 * 4 * _ROTATED)


BENCHMARKS = tuple(
    Benchmark(name=name, make=partial(_chain, tokens), bytes=_bytes(tokens))
    for name, tokens in _TOKENS.items()
)
