"""sparse_attention for training on Hopper: whole arrays as keys and values, a kernel for each
direction.

Both kernels have blocks outside and queries inside (`pieces`): forwards `training_forward` and the
merge of `slots`, backwards `training_backward`, whose slots of dq are summed by XLA, and
`piece_sums`. The backward pass keeps (q, k, v, out, lse) alone and computes the weights again; the
choice of blocks is not differentiated. No sum depends on chance: results are the same bits from run
to run.

Memory beside operands and results: partial results of at most `_MAX_PARTIAL` bytes (queries are cut
into chunks for that), the pieces' dk and dv (a seventh of it, and 128 KB for each block and KV
head), and float32 sums of dk and dv, as much again.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.pages import Blocks, Source
from pallas_kernels.logarithms import LOG2E
from pallas_kernels.sparse_attention import piece_sums, slots, training_backward, training_forward
from pallas_kernels.sparse_attention.pairs import Pair
from pallas_kernels.sparse_attention.pieces import pieces_of
from pallas_kernels.sparse_attention.training_rows import BLOCK, HEADS, WIDTH

_MAX_PARTIAL = 1 << 30


def refuse(q, k, v, block_ids, block_table, positions, *, scale) -> str | None:
    """A sentence for what these kernels do not do."""
    if not (isinstance(k, Blocks) and isinstance(v, Blocks)):
        return "keys and values are pages, and only arrays have gradients"
    B, T, K, C = block_ids.shape
    shape = q.shape[2] // K, q.shape[3], k.block_size
    if shape != (HEADS, WIDTH, BLOCK):
        expected = f"{HEADS}, {WIDTH} and {BLOCK}"
        return f"query heads a KV head, their width and tokens a block are {shape}, not {expected}"
    if kinds := {str(x.dtype) for x in (q, k.values, v.values)} - {"bfloat16"}:
        return f"queries, keys or values are {', '.join(sorted(kinds))}, not bfloat16"
    most = min(B * T, _chunk(K, C))
    return Pair.of(most, C).refuse(k.values.shape[0]) or refuse_device()


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_ids: Int[Array, "B T K C"],
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """See the package."""
    assert isinstance(k, Blocks) and isinstance(v, Blocks)
    B, T, K, C = block_ids.shape
    ids, table, at = (x.astype(jnp.int32) for x in (block_ids, block_table, positions))
    pages = table[jnp.arange(B)[:, None, None, None], jnp.maximum(ids, 0)]
    pages = jnp.where(ids >= 0, pages, -1)
    queries = (x.reshape(B * T, *x.shape[2:]) for x in (q, ids, pages, at))
    chunks = [_cut(x, _chunk(K, C), fill) for x, fill in zip(queries, (0, -1, -1, -1), strict=True)]
    results: Any = _attend(chunks[0], k.values, v.values, *chunks[1:], scale)
    out, lse = (x.reshape(-1, *x.shape[2:])[: B * T] for x in results)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _chunk(kv_heads: int, slots: int) -> int:
    """Queries of a chunk."""
    return max(1, _MAX_PARTIAL // (kv_heads * slots * HEADS * WIDTH * 2))


def _cut(x: Array, most: int, fill: int) -> Array:
    """Equal chunks of at most so many rows, filled up behind the last row."""
    chunks = -(-x.shape[0] // most)
    rows = -(-x.shape[0] // chunks)
    behind = ((0, chunks * rows - x.shape[0]), *((0, 0),) * (x.ndim - 1))
    return jnp.pad(x, behind, constant_values=fill).reshape(chunks, rows, *x.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, ids, pages, positions, scale: float) -> tuple[Array, Array]:
    """(out, lse) of chunks of queries [chunks, T, ..]."""
    return _forward(q, k, v, ids, pages, positions, scale)[0]


def _forward(q, k, v, ids, pages, positions, scale: float):
    def attend(chunk):
        return _attend_chunk(chunk, k, v, scale)

    out, lse = lax.map(attend, (q, ids, pages, positions))
    return (out, lse), (q, k, v, ids, pages, positions, out, lse)


def _backward(scale: float, kept, cotangents):
    q, k, v, ids, pages, positions, out, lse = kept
    d_out, d_lse = (x.astype(jnp.float32) for x in cotangents)
    delta = jnp.sum(d_out * out.astype(jnp.float32), axis=-1) - d_lse
    chunks = q, d_out.astype(q.dtype), lse * -LOG2E, delta, ids, pages, positions

    def step(sums, chunk):
        d_q, parts = _differentiate_chunk(chunk, k, v, scale)
        return sums + parts, d_q

    sums, d_q = lax.scan(step, jnp.zeros((2, *k.shape), jnp.float32), chunks)
    return d_q, (sums[0] * scale).astype(k.dtype), sums[1].astype(v.dtype), None, None, None


_attend.defvjp(_forward, _backward)


def _attend_chunk(chunk, k, v, scale: float):
    """(out [T, N, H], lse [T, N])."""
    q, ids, pages, positions = chunk
    pieces = pieces_of(ids, pages, positions, *k.shape[:2])
    out, lse = training_forward.attend(q, k, v, pieces, scale)
    lse = jnp.where(pages[..., None] >= 0, lse, -jnp.inf)
    out, lse = slots.merge(out[None], lse[None])
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _differentiate_chunk(chunk, k, v, scale: float):
    """dq [T, N, H], and dk / scale and dv [2, P, Z, K, H] in float32."""
    q, d_out, lse, delta, ids, pages, positions = chunk
    pieces = pieces_of(ids, pages, positions, *k.shape[:2])
    heads = *ids.shape[:2], HEADS
    rows = [pieces.of_rows(x.reshape(heads)) for x in (lse, delta)]
    rows = [lax.bitcast_convert_type(x, jnp.int32) for x in rows]
    last = jnp.repeat(pieces.last, HEADS, axis=-1)
    rows = jnp.stack([*rows, last], axis=2)  # [K, I, 3, rows]
    d_q, parts = training_backward.differentiate(q, d_out, k, v, rows, pieces, scale)
    d_q = jnp.where(pages[..., None, None] >= 0, d_q.astype(jnp.float32), 0.0)
    d_q = (jnp.sum(d_q, axis=2) * scale).reshape(q.shape).astype(q.dtype)
    return d_q, piece_sums.add(parts, pieces.starts, pieces.counts)
