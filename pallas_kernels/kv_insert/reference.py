"""kv_insert in plain jnp: k' = rope(norm(k)), index key likewise, v as it is; then the format's
bytes into the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.layouts.pool import PoolLayout, write


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Raw projections of T tokens; a layer with dense attention has no index key."""

    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]
    index_k: Float[Array, "T 1 I"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Slots:
    """Where each token goes: physical block (-1: nowhere) and place in the block."""

    block_ids: Int[Array, "T"]
    places: Int[Array, "T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KeyTransform:
    """Norm weights and rotation angles of T tokens, applied to keys before they are stored."""

    k_norm: Float[Array, "H"]
    index_norm: Float[Array, "I"] | None
    cos: Float[Array, "T r"]
    sin: Float[Array, "T r"]
    eps: float = field(metadata={"static": True})


class Query(NamedTuple):
    """Raw queries of T tokens and the weight of their norm; they turn by the keys' angles."""

    heads: Float[Array, "*rows N H"]
    weight: Float[Array, "H"]


def gemma_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "*rows D"]:
    """x / rms(x) * (1 + w) in float32, cast once to x's dtype (spec/model 2.2)."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def norm_rope(
    x: Float[Array, "*rows heads H"],
    weight: Float[Array, "H"],
    cos: Float[Array, "*rows r"],
    sin: Float[Array, "*rows r"],
    eps: float,
) -> Float[Array, "*rows heads H"]:
    """Per-head Gemma norm, then NeoX rotation of the first 2r dimensions (pairs i, i + r), in
    float32 (spec/model 2.5-2.6).
    """
    half = cos.shape[-1]
    y = gemma_norm(x.astype(jnp.float32), weight, eps)
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)


def kv_insert(
    pool: UInt8[Array, "P lines 128"],
    layout: PoolLayout,
    line: Array | int,
    rows: Rows,
    slots: Slots,
    transform: KeyTransform,
    queries: Sequence[Query] = (),
) -> tuple[UInt8[Array, "P lines 128"], list[Array]]:
    """See `with_queries` of the package."""
    t = transform
    turned = [norm_rope(one.heads, one.weight, t.cos, t.sin, t.eps) for one in queries]
    k = norm_rope(rows.k, t.k_norm, t.cos, t.sin, t.eps)
    pool = write(pool, layout.kv, line, slots.block_ids, slots.places, k)
    line = line + layout.kv.lines
    pool = write(pool, layout.kv, line, slots.block_ids, slots.places, rows.v)
    if rows.index_k is None:
        return pool, turned
    assert t.index_norm is not None
    index_k = norm_rope(rows.index_k, t.index_norm, t.cos, t.sin, t.eps)
    line = line + layout.kv.lines
    return write(pool, layout.index, line, slots.block_ids, slots.places, index_k), turned
