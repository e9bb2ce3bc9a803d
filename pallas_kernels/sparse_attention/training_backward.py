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

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.sparse_attention.pairs import Pair
from pallas_kernels.sparse_attention.pieces import GROUPS, TOGETHER, Pieces

HEADS, WIDTH, BLOCK = 16, 128, 128
_ROWS = TOGETHER * HEADS  # of a matrix product
_TEAMS, _KEYS = 2, 64  # warpgroups that multiply, keys of each
_RING = 3
_MULTIPLYING, _COPYING = 232, 40  # registers of a thread
_LOG2E = 1.4426950408889634
_WGMMA = plgpu.Layout.WGMMA
_FRAGMENT = plgpu.ShapeDtypeStruct((_KEYS, _ROWS), jnp.bfloat16, layout=_WGMMA)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
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
    kernel = plgpu.kernel(
        lanes.named("sparse_attention_backward", _program, pair=pieces.pair, scale=scale),
        out_type=(
            jax.ShapeDtypeStruct((q.shape[0], K, pieces.slots, HEADS, WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct((K, n, 2, _TEAMS, _KEYS, WIDTH), jnp.float32),
        ),
        grid=(K, n),
        grid_names=("head", "piece"),
        num_threads=_TEAMS + 1,
        thread_name="team",
        scratch_types=_scratch(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
    )
    place = jnp.pad(pieces.place.reshape(K, -1), ((0, 0), (0, GROUPS * TOGETHER)))
    d_q, parts = kernel(q, d_out, k, v, rows, place, pieces.block, pieces.first, pieces.groups)
    return d_q, parts.reshape(K, n, 2, BLOCK, WIDTH)


def _scratch() -> tuple:
    def matrices(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=_TILED)

    return (
        matrices(2, _TEAMS, _KEYS, WIDTH),  # k and v
        matrices(_RING, 2, _ROWS, WIDTH),  # q and dO
        plgpu.SMEM((_RING, 3, _ROWS), jnp.int32),
        plgpu.SMEM((GROUPS * TOGETHER,), jnp.int32),
        matrices(2, _TEAMS, _KEYS, _ROWS),  # ds^T
        matrices(_TEAMS, _ROWS, WIDTH // _TEAMS),  # dq
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * _TEAMS),
        plgpu.Barrier(num_arrivals=2 * TOGETHER + 1, num_barriers=_RING),
        plgpu.Barrier(num_arrivals=_TEAMS, num_barriers=_RING),
        plgpu.Barrier(num_arrivals=_TEAMS),
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
            for half in range(_TEAMS):
                keys = part.at[blocks[head, piece], pl.ds(half * _KEYS, _KEYS), head]
                plgpu.copy_gmem_to_smem(keys, block.at[i, half], block_there)
        plgpu.barrier_wait(places_there)
        fetch = functools.partial(_fetch, q, d_out, rows, head, queries, own_rows, places, pair)

        def step(i, carry):
            slot = lax.rem(i, _RING)

            @pl.when(i >= _RING)
            def _():
                plgpu.barrier_wait(read.at[slot])

            fetch(i, first + i, slot, there.at[slot])
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
            _store(part, result.at[team], d_q, places, i, head, team, pair)
            return d_k, d_v

        zeros = plgpu.layout_cast(jnp.zeros((_KEYS, WIDTH), jnp.float32), _WGMMA)
        d_k, d_v = lax.fori_loop(0, count, step, (zeros, zeros))
        parts[head, piece, 0, team] = d_k
        parts[head, piece, 1, team] = d_v
        plgpu.wait_smem_to_gmem(0)

    @pl.when(team < _TEAMS)
    def _():
        plgpu.set_max_registers(_MULTIPLYING, action="increase")
        pl.when(count > 0)(multiply)

    @pl.when(team == _TEAMS)
    def _():
        plgpu.set_max_registers(_COPYING, action="decrease")
        pl.when(count > 0)(copy)


def _fetch(q, d_out, rows, head, queries, own_rows, places, pair: Pair, i, group, slot, there):
    """A group's q, dO and rows."""
    plgpu.copy_gmem_to_smem(rows.at[head, group], own_rows.at[slot], there)
    for n in range(TOGETHER):
        place = places[i * TOGETHER + n]
        query = jnp.maximum(place, ~place) >> pair.slot_bits
        for half, source in enumerate((q, d_out)):
            mine = source.at[query, pl.ds(head * HEADS, HEADS)]
            to = queries.at[slot, half, pl.ds(n * HEADS, HEADS)]
            plgpu.copy_gmem_to_smem(mine, to, there)


def _weigh(block, tiles, rows, slot, team, scale: float):
    """p^T and ds^T of this team's keys in bfloat16."""

    def products(s, d_p):
        for sums, part, tile in zip((s, d_p), (block.at[0], block.at[1]), tiles, strict=True):
            plgpu.wgmma(sums, part.at[team], tile.transpose((1, 0)))
        return s[...], d_p[...]

    shape = (_KEYS, _ROWS)
    s, d_p = pl.run_scoped(products, _ACC(shape, jnp.float32), _ACC(shape, jnp.float32))
    return _soften(scale)(s, d_p, rows, slot, team)


def _soften(scale: float):
    """p^T = exp2(s^T - lse), zeros for keys that a row does not see, and p^T (dp^T - delta)."""

    @lanes.code(
        _WGMMA, _WGMMA, lanes.REF, lanes.SCALAR, lanes.SCALAR, returns=[_FRAGMENT, _FRAGMENT]
    )
    def soften(_, s, d_p, rows, slot, team):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        first = (lanes.warp() << 4) + g + lanes.scalar(team) * _KEYS
        keys = [first, first + 8]
        at = lanes.scalar(slot) * (3 * _ROWS * 4) + (t << 3)
        weights, changes = [], []
        for n, (scores, products) in enumerate(
            zip(lanes.tiles_of(s), lanes.tiles_of(d_p), strict=True)
        ):
            lse, delta, last = (
                lanes.load_words(lanes.address(rows), at + (i * _ROWS * 4 + 32 * n), 2)
                for i in range(3)
            )
            lse, delta = ([lanes.real_of_bits(x) for x in pair] for pair in (lse, delta))
            p, d_s = [], []
            for i, (score, product) in enumerate(zip(scores, products, strict=True)):
                row, half = i % 2, i // 2
                power = lanes.multiply_add(score, lanes.real(scale * _LOG2E), lse[row])
                weight = lanes.select(
                    last[row].below(keys[half]), lanes.real(0.0), lanes.exp2(power)
                )
                p.append(weight)
                d_s.append(weight * (product - delta[row]))
            weights.append([lanes.bf16_of_reals(*p[i : i + 2]) for i in (0, 2)])
            changes.append([lanes.bf16_of_reals(*d_s[i : i + 2]) for i in (0, 2)])
        return [lanes.bf16_accumulator(x) for x in (weights, changes)]

    return soften


def _products(p, d_s, tiles, shared, keys, team, ready, sums) -> tuple[Any, ...]:
    """dk and dv with a group's added, and this team's half of its dq."""

    def add(refs):
        d_k, d_v, d_q = refs
        plgpu.wgmma(d_v, p, tiles[1])
        plgpu.wgmma(d_k, d_s, tiles[0])
        plgpu.barrier_wait(ready)
        for half in range(_TEAMS):
            own = keys.at[half, :, pl.ds(team * (WIDTH // _TEAMS), WIDTH // _TEAMS)]
            plgpu.wgmma(d_q, shared.at[half].transpose((1, 0)), own)

    zeros = plgpu.layout_cast(jnp.zeros((_ROWS, WIDTH // _TEAMS), jnp.float32), _WGMMA)
    return pl.run_state(add)(tuple(_ACC.init(x) for x in (*sums, zeros)))


def _store(part, result, d_q, places, i, head, team, pair: Pair):
    """This team's half of the dimensions of a group's dq, each pair's at its slot."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    result[...] = part.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for n in range(TOGETHER):
        place = places[i * TOGETHER + n]

        @pl.when(place >= 0)
        def _(n=n, place=place):
            query, slot = place >> pair.slot_bits, place & ((1 << pair.slot_bits) - 1)
            half = pl.ds(team * (WIDTH // _TEAMS), WIDTH // _TEAMS)
            to = d_q.at[query, head, slot, :, half]
            plgpu.copy_smem_to_gmem(result.at[pl.ds(n * HEADS, HEADS)], to)
