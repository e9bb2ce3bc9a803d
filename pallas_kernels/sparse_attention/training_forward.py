"""sparse_attention over arrays on Hopper, blocks outside and queries inside.

Grid: KV heads x pieces (`pieces`). k and v of the block lie in shared memory; two warpgroups take
the groups of four queries in turn (4 queries x 16 heads are the 64 rows of wgmma) while a third one
fetches them, a ring ahead. One partial result (float16, with its log-sum-exp) is written for each
pair; `slots` merges those of a query in their own order.

Memory: 4 KB of queries (mostly from the L2) and 4 KB of partial results a pair, which are read once
more, and 64 KB a piece.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import half_block, lanes
from pallas_kernels.logarithms import LN2, LOG2E
from pallas_kernels.sparse_attention.pairs import Pair
from pallas_kernels.sparse_attention.pieces import GROUPS, TOGETHER, Pieces
from pallas_kernels.sparse_attention.training_rows import (
    BLOCK,
    COPYING,
    HEADS,
    MULTIPLYING,
    ROWS,
    TEAMS,
    WIDTH,
    fetch,
    kernel_of,
    matrices,
    padded,
    places_of,
    store,
)

_RING = 4
_WGMMA = plgpu.Layout.WGMMA
_ROW = _WGMMA.reduce(1)
_SCORES = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.float32, layout=_WGMMA)
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "P Z K H"],
    v: Float[Array, "P Z K H"],
    pieces: Pieces,
    scale: float,
) -> tuple[Float[Array, "T K C G H"], Float[Array, "T K C G"]]:
    """Partial results and their log-sum-exp of every slot, junk where there is no pair."""
    T, K = q.shape[0], len(pieces.block)
    out = (
        jax.ShapeDtypeStruct((T, K, pieces.slots, HEADS, WIDTH), jnp.float16),
        jax.ShapeDtypeStruct((T, K, pieces.slots, HEADS), jnp.float32),
    )
    kernel = kernel_of("sparse_attention_forward", _program, pieces, scale, out, _scratch())
    places = padded(pieces.place), padded(pieces.last)
    return kernel(q, k, v, *places, pieces.block, pieces.first, pieces.groups)


def _scratch() -> tuple:
    return (
        matrices(2, BLOCK, WIDTH),  # k and v
        matrices(_RING, ROWS, WIDTH),  # q
        plgpu.SMEM((GROUPS * TOGETHER,), jnp.int32),
        plgpu.SMEM((GROUPS * TOGETHER,), jnp.int32),
        matrices(TEAMS, ROWS, WIDTH, dtype=jnp.float16),  # results
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=TOGETHER, num_barriers=_RING),
        plgpu.Barrier(num_barriers=_RING),
    )


def _program(
    q, k, v, all_places, all_lasts, blocks, firsts, counts, out, lse,
    block, queries, places, lasts, results,
    places_there, block_there, there, read,
    *, pair: Pair, scale: float,
):  # fmt: skip
    head, piece, team = (lax.axis_index(name) for name in ("head", "piece", "team"))
    first, count = firsts[head, piece], counts[head, piece]

    def copy():
        for source, to in ((all_places, places), (all_lasts, lasts)):
            mine = source.at[head, pl.ds(first * TOGETHER, GROUPS * TOGETHER)]
            plgpu.copy_gmem_to_smem(mine, to, places_there)
        for i, part in enumerate((k, v)):
            keys = part.at[blocks[head, piece], :, head]
            plgpu.copy_gmem_to_smem(keys, block.at[i], block_there)
        plgpu.barrier_wait(places_there)

        def step(i, carry):
            slot = lax.rem(i, _RING)

            @pl.when(i >= _RING)
            def _():
                plgpu.barrier_wait(read.at[slot])

            own = places_of(places, i)
            fetch((q,), head, own, pair, (queries.at[slot],), there.at[slot])
            return carry

        lax.fori_loop(0, count, step, None)

    def multiply():
        plgpu.barrier_wait(places_there)
        plgpu.barrier_wait(block_there)

        def step(turn, carry):
            i = turn * TEAMS + team
            slot = lax.rem(i, _RING)
            plgpu.barrier_wait(there.at[slot])
            s = _scores(queries.at[slot], block.at[0], lasts, i, scale)
            plgpu.barrier_arrive(read.at[slot])
            sums, top, total = _weighted(s, block.at[1])
            _write_lse(pair, lse.shape)(top, total, lse, places, i, head)
            own = places_of(places, i)
            store(sums, results.at[team], out, head, own, pair, pl.ds(0, WIDTH))
            return carry

        lax.fori_loop(0, lax.div(count - team + 1, TEAMS), step, None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(team < TEAMS)
    def _():
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        pl.when(count > 0)(multiply)

    @pl.when(team == TEAMS)
    def _():
        plgpu.set_max_registers(COPYING, action="decrease")
        pl.when(count > 0)(copy)


def _scores(tile, keys, lasts, i, scale: float):
    """Scaled scores in powers of two; -inf for keys that a row does not see."""

    def product(sums):
        plgpu.wgmma(sums, tile, keys.transpose((1, 0)))
        return sums[...]

    s = pl.run_scoped(product, _ACC((ROWS, BLOCK), jnp.float32))
    return _hide(s, lasts, i) * (scale * LOG2E)


def _hide(s, lasts, i):
    """-inf for keys behind the last one that a pair sees; a warp, which has a pair's rows, does
    nothing where that sees the whole block.
    """

    @lanes.code(_WGMMA, lanes.REF, lanes.SCALAR, returns=_SCORES)
    def hide(_, s, lasts, i):
        at = (lanes.scalar(i) << 2) + lanes.warp()
        left = lanes.load_words(lanes.address(lasts), at << 2, 1)[0] + 1
        tiles = lanes.tiles_of(s)
        flat = lanes.branch(
            left.below(BLOCK),
            lambda: [x for values in half_block.hide(tiles, 0, left) for x in values],
            [x for values in tiles for x in values],
        )
        return lanes.array_of([flat[i : i + 4] for i in range(0, len(flat), 4)])

    return hide(s, lasts, i)


def _weighted(s, values):
    """softmax(s) @ values, the greatest s and the sum of the weights."""
    top = jnp.max(s, axis=1)
    reference = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp2(s - lax.broadcast_in_dim(reference, s.shape, [0]))
    total = jnp.sum(p, axis=1)
    weights = p.astype(jnp.bfloat16)

    def product(sums):
        plgpu.wgmma(sums, weights, values)
        return sums[...]

    sums = pl.run_scoped(product, _ACC((ROWS, WIDTH), jnp.float32))
    inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
    return sums * lax.broadcast_in_dim(inverse, sums.shape, [0]), top, total


def _write_lse(pair: Pair, shape):
    """The log-sum-exp of a group's rows: warp w has pair w."""

    @lanes.code(_ROW, _ROW, lanes.REF, lanes.REF, lanes.SCALAR, lanes.SCALAR)
    def write(_, top, total, lse, places, i, head):
        _, K, C, _ = shape
        at = (lanes.scalar(i) << 2) + lanes.warp()
        place = lanes.load_words(lanes.address(places), at << 2, 1)[0]
        query, slot = place >> pair.slot_bits, place & ((1 << pair.slot_bits) - 1)
        number = (query * K + lanes.scalar(head)) * C + slot
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        tops, totals = lanes.rows_of(top), lanes.rows_of(total)

        def store():
            row = lanes.element(lanes.address(lse), number, HEADS * 4)
            for half in (0, 1):
                value = (tops[half] + lanes.log2(totals[half])) * lanes.real(LN2)
                lanes.store_reals(row, (g + 8 * half) << 2, [value])

        used = lanes.negate(place.below(0))
        lanes.when(lanes.both(used, t.below(1)), store)

    return write
