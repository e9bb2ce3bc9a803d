"""sparse_attention over whole arrays by XLA, for what `training`'s kernels refuse (another width or
type): blocks outside, with a backward pass of its own.

Tiles are cut to `_QUERIES` queries. The (query, slot) pairs of a tile and KV head, sorted by block,
are cut into groups of `_PAIRS` pairs of one block (`pairs`): each group is a matrix of
`_PAIRS` x heads rows against one block of keys, so that all work is batched matrix products in the
type of the keys, summed in float32. Slots of a query are merged by their log-sum-exp. The backward
pass keeps (q, k, v, out, lse) alone and computes the weights again, tile by tile (the choice of
blocks is not differentiated):

    p = exp(s - lse)    dv += p^T do    dp = do v^T    ds = p (dp - (do · out - dlse)) scale
    dq += ds k          dk += ds^T q

Memory beside operands and results: the groups of one tile (about 0.3 GB at full size, whatever the
context) and float32 sums of dk and dv.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.pages import Blocks, Source
from pallas_kernels.sparse_attention.pairs import Groups, Pair, group, merge_slots

_QUERIES = 512  # of a tile
_PAIRS = 8  # of a group: with 16 heads, 128 rows
_MIN_QUERIES = 32  # of a tile; below, groups are mostly empty


def refuse(q, k, v, block_ids, block_table, positions, *, scale) -> str | None:
    """A sentence for pages, and where the mask is cheaper: a CPU computes what it masks faster than
    it gathers.
    """
    if not (isinstance(k, Blocks) and isinstance(v, Blocks)):
        return "keys and values are pages, and only arrays have gradients"
    cut = _cut(q.shape[1])
    if cut < _MIN_QUERIES:
        return f"{q.shape[1]} queries have no divisor from {_MIN_QUERIES} to {_QUERIES}"
    return Pair.of(cut, block_ids.shape[-1]).refuse(block_table.shape[1]) or refuse_device()


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
    return _attend(q, k.values, v.values, block_ids, block_table, positions, scale)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, ids, table, positions, scale: float):
    return _forward(q, k, v, ids, table, positions, scale)[0]


def _forward(q, k, v, ids, table, positions, scale: float):
    def attend(tile):
        return _attend_tile(tile, k, v, scale)

    out, lse = lax.map(attend, _tiles(q, ids, table, positions))
    out, lse = _whole(out, q.shape).astype(q.dtype), _whole(lse, q.shape[:-1])
    return (out, lse), (q, k, v, ids, table, positions, out, lse)


def _backward(scale: float, kept, cotangents):
    q, k, v, ids, table, positions, out, lse = kept
    d_out, d_lse = (x.astype(jnp.float32) for x in cotangents)
    delta = jnp.sum(d_out * out.astype(jnp.float32), axis=-1) - d_lse
    rows = [_heads(x, ids) for x in (d_out.astype(v.dtype), lse, delta)]

    def step(sums, operands):
        tile, *rows = operands
        d_q, parts, (blocks, head) = _differentiate_tile(tile, k, v, rows, scale)
        add = zip(sums, parts, strict=True)
        return [x.at[blocks, :, head].add(part, mode="drop") for x, part in add], d_q

    sums = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    (d_k, d_v), d_q = lax.scan(step, sums, (_tiles(q, ids, table, positions), *rows))
    d_q = _whole(d_q, q.shape).astype(q.dtype)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_attend.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tile:
    """`_QUERIES` queries or fewer of one KV head (or all tiles, on a leading axis)."""

    q: Float[Array, "*all T G H"]
    head: Int[Array, "*all"]
    ids: Int[Array, "*all T C"]
    table: Int[Array, "*all P"]
    positions: Int[Array, "*all T"]

    def grouped(self) -> tuple[Groups, Int[Array, "I"]]:
        """Groups of pairs, and the block of keys that each reads."""
        pages = self.table[jnp.maximum(self.ids, 0)]
        pair, num_blocks = Pair.of(*self.ids.shape), self.table.shape[0]
        keys = pair.sort(self.ids, (self.ids >= 0) & (pages >= 0))
        groups = group(keys, pair, num_blocks, _PAIRS)
        return groups, jnp.maximum(self.table[groups.block], 0)


def _attend_tile(tile: _Tile, k, v, scale: float):
    """(out [T, G, H], lse [T, G]) in float32."""
    T, C = tile.ids.shape
    groups, blocks = tile.grouped()
    s = _scores(tile, groups, k[blocks, :, tile.head], scale)  # [I, R, G, Z]
    top = jnp.max(s, axis=-1)
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0.0, top)[..., None])
    total = jnp.sum(p, axis=-1)
    some = total > 0
    out = _product("irgz,izh->irgh", p.astype(v.dtype), v[blocks, :, tile.head])
    out = out / jnp.where(some, total, 1.0)[..., None]
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)
    place = jnp.where(groups.used, groups.query, T), groups.slot
    G, H = out.shape[2:]
    out = jnp.zeros((T, C, G, H), jnp.float32).at[place].set(out, mode="drop")
    return merge_slots(out, jnp.full((T, C, G), -jnp.inf).at[place].set(lse, mode="drop"))


def _differentiate_tile(tile: _Tile, k, v, rows, scale: float):
    """d_q [T, G, H]; d_k and d_v of each group [I, Z, H]; where the latter belong."""
    T, C = tile.ids.shape
    groups, blocks = tile.grouped()
    d_out, lse, delta = (x[groups.query] for x in rows)  # [I, R, G, ..]
    keys, values = (x[blocks, :, tile.head] for x in (k, v))
    s = _scores(tile, groups, keys, scale)
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    d_p = _product("irgh,izh->irgz", d_out, values)
    d_s = (p * (d_p - delta[..., None]) * scale).astype(keys.dtype)
    d_k = _product("irgz,irgh->izh", d_s, tile.q[groups.query].astype(keys.dtype))
    d_v = _product("irgz,irgh->izh", p.astype(d_out.dtype), d_out)
    part = _product("irgz,izh->irgh", d_s, keys)
    place = jnp.where(groups.used, groups.query, T), groups.slot
    d_q = jnp.zeros((T, C, *part.shape[2:]), jnp.float32).at[place].set(part, mode="drop")
    owned = jnp.where(jnp.any(groups.used, axis=-1), blocks, k.shape[0])
    return jnp.sum(d_q, axis=1), (d_k, d_v), (owned, tile.head)


def _scores(tile: _Tile, groups: Groups, keys_IZH, scale: float):
    """Scaled scores [I, R, G, Z], -inf for what a pair does not see."""
    Z = keys_IZH.shape[1]
    q = tile.q[groups.query].astype(keys_IZH.dtype)
    s = _product("irgh,izh->irgz", q, keys_IZH) * scale
    last = tile.positions[groups.query] - groups.block[:, None] * Z  # of the block, seen
    seen = groups.used[..., None] & (jnp.arange(Z) <= last[..., None])  # [I, R, Z]
    return jnp.where(seen[:, :, None], s, -jnp.inf)


def _product(equation: str, a, b):
    """A product summed in float32: exact for float32 operands, on tensor cores for bfloat16."""
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    return jnp.einsum(equation, a, b, **options)


def _tiles(q, ids, table, positions) -> _Tile:
    """All tiles, the KV heads of one side by side."""
    B, T, K, _ = ids.shape
    cut = _cut(T)
    tiles = B * T // cut
    return _Tile(
        q=_heads(q, ids),
        head=jnp.tile(jnp.arange(K), tiles),
        ids=_heads(ids, ids)[:, :, 0],
        table=jnp.repeat(table, T // cut * K, axis=0),
        positions=jnp.repeat(positions.reshape(tiles, cut), K, axis=0),
    )


def _heads(x: Float[Array, "B T N ..."] | Int[Array, "B T N ..."], ids: Int[Array, "B T K C"]):
    """x with its heads divided among the KV heads: [tiles, T of a tile, G, ..]."""
    B, T, K, _ = ids.shape
    cut, G = _cut(T), x.shape[2] // K
    x = x.reshape(B * T // cut, cut, K, G, *x.shape[3:]).swapaxes(1, 2)
    return x.reshape(-1, cut, G, *x.shape[4:])


def _whole(x: Float[Array, "tiles T G ..."], shape: tuple[int, ...]):
    """The inverse of `_heads`."""
    cut, G = x.shape[1:3]
    K = shape[2] // G
    return x.reshape(-1, K, cut, *x.shape[2:]).swapaxes(1, 2).reshape(shape)


def _cut(queries: int) -> int:
    """Queries of a tile: the most that divide them."""
    return next(n for n in range(min(queries, _QUERIES), 0, -1) if queries % n == 0)
