"""What both kernels of training do with a group's rows: 4 queries x 16 heads, side by side in
shared memory, each query's from and to a place of its own.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import lanes
from pallas_kernels.sparse_attention.pairs import Pair
from pallas_kernels.sparse_attention.pieces import GROUPS, TOGETHER, Pieces

HEADS, WIDTH, BLOCK = 16, 128, 128
ROWS = TOGETHER * HEADS
TEAMS = 2  # warpgroups that multiply; a third one copies
MULTIPLYING, COPYING = 232, 40  # registers of a thread
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def kernel_of(
    name: str, program: Callable[..., None], pieces: Pieces, scale: float, out: Any, scratch: Any
) -> Callable[..., Any]:
    """A kernel with a program a KV head and piece."""
    return plgpu.kernel(
        lanes.named(name, program, pair=pieces.pair, scale=scale),
        out_type=out,
        grid=pieces.block.shape,
        grid_names=("head", "piece"),
        num_threads=TEAMS + 1,
        thread_name="team",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
    )


def padded(x: Array) -> Array:
    """A number of each pair [K, I, R] as [K, I R and more]: the last piece reads as many as any."""
    return jnp.pad(x.reshape(len(x), -1), ((0, 0), (0, GROUPS * TOGETHER)))


def matrices(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Shared memory as operands of wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=TILED)


def fetch(sources: tuple, head: Any, places: Any, pair: Pair, tiles: tuple, there: Any) -> None:
    """Starts `TOGETHER` copies for each source [T, N, H], the queries of these places, to its tile
    [ROWS, H].
    """
    for n in range(TOGETHER):
        query = jnp.maximum(places[n], ~places[n]) >> pair.slot_bits
        for source, tile in zip(sources, tiles, strict=True):
            mine = source.at[query, pl.ds(head * HEADS, HEADS)]
            plgpu.copy_gmem_to_smem(mine, tile.at[pl.ds(n * HEADS, HEADS)], there)


def store(values: Any, tile: Any, out: Any, head: Any, places: Any, pair: Pair, dims: Any) -> None:
    """Writes a group's values [ROWS, dims] by way of `tile`, each pair's to its slot of `out`
    [T, K, C, G, H]; nothing for a place without a pair.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = values.astype(tile.dtype)
    plgpu.commit_smem()
    for n in range(TOGETHER):

        @pl.when(places[n] >= 0)
        def _(n=n):
            query, slot = places[n] >> pair.slot_bits, places[n] & ((1 << pair.slot_bits) - 1)
            to = out.at[query, head, slot, :, dims]
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(n * HEADS, HEADS)], to)


def places_of(places: Any, i: Any) -> list:
    """Those of a piece's i-th group."""
    return [places[i * TOGETHER + n] for n in range(TOGETHER)]
