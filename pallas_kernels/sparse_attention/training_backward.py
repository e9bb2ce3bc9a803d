"""The gradients of sparse_attention on Hopper, blocks outside and queries inside.

Grid: KV heads x pieces (`pieces`). Two warpgroups have 64 keys of the block each, k and v in shared
memory, dk and dv in registers; a third one fetches groups of four queries with their dO, a ring
ahead. For each group, 4 queries x 16 heads = 64 rows:

    s^T = k q^T    p^T = exp2(s^T - lse)    dp^T = v dO^T    ds^T = p^T (dp^T - delta)
    dv += p^T dO   dk += ds^T q             dq = ds k

p^T and ds^T are the register operands of dv and dk. ds^T goes through shared memory too: dq needs
all 128 keys, and each warpgroup computes half of its dimensions. dq of a pair is written for its
slot; a piece's dk and dv are written once and added by `piece_sums`.

Memory: 8 KB of q and dO (mostly from the L2) and 4 KB of dq a pair, 192 KB a piece.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.logarithms import LOG2E
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

_KEYS, _DIMS = BLOCK // TEAMS, WIDTH // TEAMS  # of a warpgroup: of dk and dv, of dq
_RING = 3
_WGMMA = plgpu.Layout.WGMMA
_FRAGMENT = plgpu.ShapeDtypeStruct((_KEYS, ROWS), jnp.bfloat16, layout=_WGMMA)
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def differentiate(
    q: Float[Array, "T N H"],
    d_out: Float[Array, "T N H"],
    k: Float[Array, "P Z K H"],
    v: Float[Array, "P Z K H"],
    rows: Int[Array, "K I 3 rows"],
    pieces: Pieces,
    scale: float,
) -> tuple[Float[Array, "T K C G H"], Float[Array, "K n 2 Z H"]]:
    """dq / scale of every slot, junk where there is no pair, and (dk / scale, dv) of every piece,
    junk in those without groups. `rows` are the bits of -lse (in powers of two) and delta, and
    `last`, of a group's rows.
    """
    K, n = pieces.block.shape
    out = (
        jax.ShapeDtypeStruct((q.shape[0], K, pieces.slots, HEADS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((K, n, 2, TEAMS, _KEYS, WIDTH), jnp.float32),
    )
    kernel = kernel_of("sparse_attention_backward", _program, pieces, scale, out, _scratch())
    work = pieces.block, pieces.first, pieces.groups
    d_q, parts = kernel(q, d_out, k, v, rows, padded(pieces.place), *work)
    return d_q, parts.reshape(K, n, 2, BLOCK, WIDTH)


def _scratch() -> tuple:
    return (
        matrices(2, TEAMS, _KEYS, WIDTH),  # k and v
        matrices(_RING, 2, ROWS, WIDTH),  # q and dO
        plgpu.SMEM((_RING, 3, ROWS), jnp.int32),
        plgpu.SMEM((GROUPS * TOGETHER,), jnp.int32),
        matrices(2, TEAMS, _KEYS, ROWS),  # ds^T
        matrices(TEAMS, ROWS, _DIMS),  # dq
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * TEAMS),
        plgpu.Barrier(num_arrivals=2 * TOGETHER + 1, num_barriers=_RING),
        plgpu.Barrier(num_arrivals=TEAMS, num_barriers=_RING),
        plgpu.Barrier(num_arrivals=TEAMS),
    )


def _program(
    q, d_out, k, v, rows, all_places, blocks, firsts, counts, d_q, parts,
    block, queries, own_rows, places, weights, result,
    places_there, block_there, there, read, ready,
    *, pair: Pair, scale: float,
):  # fmt: skip
    head, piece, team = (lax.axis_index(name) for name in ("head", "piece", "team"))
    first, count = firsts[head, piece], counts[head, piece]

    def copy():
        start = first * TOGETHER
        source = all_places.at[head, pl.ds(start, GROUPS * TOGETHER)]
        plgpu.copy_gmem_to_smem(source, places, places_there)
        for i, part in enumerate((k, v)):
            for half in range(TEAMS):
                keys = part.at[blocks[head, piece], pl.ds(half * _KEYS, _KEYS), head]
                plgpu.copy_gmem_to_smem(keys, block.at[i, half], block_there)
        plgpu.barrier_wait(places_there)

        def step(i, carry):
            slot = lax.rem(i, _RING)

            @pl.when(i >= _RING)
            def _():
                plgpu.barrier_wait(read.at[slot])

            plgpu.copy_gmem_to_smem(rows.at[head, first + i], own_rows.at[slot], there.at[slot])
            tiles = queries.at[slot, 0], queries.at[slot, 1]
            fetch((q, d_out), head, places_of(places, i), pair, tiles, there.at[slot])
            return carry

        lax.fori_loop(0, count, step, None)

    def multiply():
        plgpu.barrier_wait(places_there)
        plgpu.barrier_wait(block_there)

        def step(i, sums):
            slot = lax.rem(i, _RING)
            plgpu.barrier_wait(there.at[slot])
            tiles = queries.at[slot, 0], queries.at[slot, 1]
            p, d_s = _weigh(block, tiles, own_rows, slot, team, scale)
            shared = weights.at[lax.rem(i, 2)]
            shared[team] = d_s
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)
            d_k, d_v, part = _products(p, d_s, tiles, shared, block.at[0], team, ready, sums)
            plgpu.barrier_arrive(read.at[slot])
            own, dims = places_of(places, i), pl.ds(team * _DIMS, _DIMS)
            store(part, result.at[team], d_q, head, own, pair, dims)
            return d_k, d_v

        zeros = plgpu.layout_cast(jnp.zeros((_KEYS, WIDTH), jnp.float32), _WGMMA)
        d_k, d_v = lax.fori_loop(0, count, step, (zeros, zeros))
        parts[head, piece, 0, team] = d_k
        parts[head, piece, 1, team] = d_v
        plgpu.wait_smem_to_gmem(0)

    @pl.when(team < TEAMS)
    def _():
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        pl.when(count > 0)(multiply)

    @pl.when(team == TEAMS)
    def _():
        plgpu.set_max_registers(COPYING, action="decrease")
        pl.when(count > 0)(copy)


def _weigh(block, tiles, rows, slot, team, scale: float):
    """p^T and ds^T of this team's keys in bfloat16."""

    def products(s, d_p):
        for sums, part, tile in zip((s, d_p), (block.at[0], block.at[1]), tiles, strict=True):
            plgpu.wgmma(sums, part.at[team], tile.transpose((1, 0)))
        return s[...], d_p[...]

    shape = (_KEYS, ROWS)
    s, d_p = pl.run_scoped(products, _ACC(shape, jnp.float32), _ACC(shape, jnp.float32))
    return _soften(scale)(s, d_p, rows, slot, team)


def _soften(scale: float):
    """p^T = exp2(s^T - lse), zeros for keys that a row does not see, and p^T (dp^T - delta)."""

    @lanes.code(
        _WGMMA, _WGMMA, lanes.REF, lanes.SCALAR, lanes.SCALAR, returns=[_FRAGMENT, _FRAGMENT]
    )
    def soften(_, s, d_p, rows, slot, team):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        key = (lanes.warp() << 4) + g + lanes.scalar(team) * _KEYS
        at = lanes.scalar(slot) * (3 * ROWS * 4) + (t << 3)
        weights, changes = [], []
        for n, tiles in enumerate(zip(lanes.tiles_of(s), lanes.tiles_of(d_p), strict=True)):
            parts = [at + (i * ROWS * 4 + 32 * n) for i in range(3)]
            parts = [lanes.load_words(lanes.address(rows), part, 2) for part in parts]
            p, d_s = _soften_tile(tiles, parts, [key, key + 8], lanes.real(scale * LOG2E))
            weights.append([lanes.bf16_of_reals(*p[i : i + 2]) for i in (0, 2)])
            changes.append([lanes.bf16_of_reals(*d_s[i : i + 2]) for i in (0, 2)])
        return [lanes.bf16_accumulator(x) for x in (weights, changes)]

    return soften


def _soften_tile(tiles, parts, keys, scale) -> tuple[list, list]:
    """A lane's four values of 8 columns: those of two rows, for two keys."""
    lse, delta, last = parts
    p, d_s = [], []
    for i, (score, product) in enumerate(zip(*tiles, strict=True)):
        half, row = divmod(i, 2)
        power = lanes.multiply_add(score, scale, lanes.real_of_bits(lse[row]))
        hidden = last[row].below(keys[half])
        p.append(lanes.select(hidden, lanes.real(0.0), lanes.exp2(power)))
        d_s.append(p[-1] * (product - lanes.real_of_bits(delta[row])))
    return p, d_s


def _products(p, d_s, tiles, shared, keys, team, ready, sums) -> tuple[Any, ...]:
    """dk and dv with a group's added, and this team's half of its dq."""

    def add(refs):
        d_k, d_v, d_q = refs
        plgpu.wgmma(d_v, p, tiles[1])
        plgpu.wgmma(d_k, d_s, tiles[0])
        plgpu.barrier_wait(ready)
        for half in range(TEAMS):
            own = keys.at[half, :, pl.ds(team * _DIMS, _DIMS)]
            plgpu.wgmma(d_q, shared.at[half].transpose((1, 0)), own)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, _DIMS), jnp.float32), _WGMMA)
    return pl.run_state(add)(tuple(_ACC.init(x) for x in (*sums, zeros)))
