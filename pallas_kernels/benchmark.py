"""What one row of the benchmark's table is, and the pool and tables that rows are measured on."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from pallas_kernels.layouts.pool import LINE, Component, PoolLayout
from pallas_kernels.timing import Chain

CALLS = 24  # of a chain; a third of them is its other length
_L2_BYTES = 60 * 2**20  # of an H200
_MOST_AT_ONCE = 64 * 2**20  # bytes of a pool that are made in one go
_SCALE_BITS = 0x77  # keeps a random byte clear of E4M3's sign and NaN
_E4M3_BITS = 0xBF  # of NaN and of what is 2 or more


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named case of one op.

    The arrays are made on the device when the row runs. `bytes` and `flops` are of one call: what
    any implementation has to read and write once, and the products of its matrix units.
    """

    name: str
    make: Callable[[], Chain]
    bytes: int
    flops: int = 0
    aim_us: float | None = None  # what issue 6 asks for


def rotation(bytes_a_call: int) -> int:
    """How many layers a chain has to walk over so that it reads nothing twice from the L2."""
    return max(1, -(-3 * _L2_BYTES // bytes_a_call))


def random_pool(layout: PoolLayout, num_blocks: int, seed: int = 0) -> UInt8[Array, "P lines 128"]:
    """A pool of random codes and random positive scales; FP8 draft keys and values are under 2."""
    mask = jnp.asarray(_byte_masks(layout))[:, None]
    most = max(1, min(num_blocks, _MOST_AT_ONCE // layout.block_bytes))
    size = next(size for size in range(most, 0, -1) if num_blocks % size == 0)

    def some(key):
        return jax.random.bits(key, (size, layout.lines, LINE), jnp.uint8) & mask

    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), num_blocks // size)
    chunks = jax.jit(lambda keys: jax.lax.map(some, keys))(keys)
    return chunks.reshape(num_blocks, layout.lines, LINE)


def random_tables(batch: int, blocks: int, seed: int = 0) -> Int[Array, "B P"]:
    """Physical ids of every sequence's blocks, scattered over a pool of batch x blocks."""
    ids = np.random.default_rng(seed).permutation(batch * blocks)
    return jnp.asarray(ids.reshape(batch, blocks), jnp.int32)


def _byte_masks(layout: PoolLayout) -> np.ndarray:
    """For each line, the bits of a random byte that may stay."""
    masks = np.full(layout.lines, 0xFF, np.uint8)
    for layer, sparse in enumerate(layout.sparse_layers):
        line = layout.layer_line(layer)
        for component in [layout.kv, layout.kv, *([layout.index] if sparse else [])]:
            _mask_scales(masks, component, line)
            line += component.lines
    if layout.formats.draft == "fp8":
        masks[layout.draft_line(0) :] = _E4M3_BITS
    return masks


def _mask_scales(masks: np.ndarray, component: Component, line: int) -> None:
    masks[line + component.code_lines : line + component.lines] = _SCALE_BITS
