"""top-k and top-p without sorting the vocabulary: the logit at the edge is found by halving.

A float's bits, taken as an integer, are in the order of floats; so at most 32 passes over a row
find the greatest logit from which on the weights reach what is wanted, exactly. Equal logits at
the edge are kept from the lower id on, and the last such id is found in the same way. A batch
that is not cut takes no passes; no row's outcome depends on the others.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def within_top_k(scaled: Float[Array, "B V"], top_k: Int[Array, "B"]) -> Bool[Array, "B V"]:
    """The k greatest of each row; all of a row whose k is 0."""
    return lax.cond(jnp.any(top_k > 0), _cut_top_k, _everything, scaled, top_k)


def within_top_p(scaled: Float[Array, "B V"], top_p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    """The fewest greatest of each row whose share of all exp(scaled) reaches top_p, one at least;
    all of a row whose top_p is 1. The greatest of a row is 0, and -inf has no share.
    """
    return lax.cond(jnp.any(top_p < 1), _cut_top_p, _everything, scaled, top_p)


def _everything(scaled: Float[Array, "B V"], _) -> Bool[Array, "B V"]:
    return jnp.ones_like(scaled, bool)


def _cut_top_k(scaled: Float[Array, "B V"], top_k: Int[Array, "B"]) -> Bool[Array, "B V"]:
    V = scaled.shape[-1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    keys, weights = _ordered(scaled), jnp.ones_like(scaled)
    edge = _edge(keys, weights, wanted.astype(scaled.dtype), top_k > 0)
    above = keys > edge[:, None]
    return above | _first(keys == edge[:, None], wanted - jnp.sum(above, axis=-1))


def _cut_top_p(scaled: Float[Array, "B V"], top_p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    keys, weights = _ordered(scaled), jnp.exp(scaled)
    wanted = top_p * jnp.sum(weights, axis=-1)
    edge = _edge(keys, weights, wanted, top_p < 1)
    above, at_edge = keys > edge[:, None], keys == edge[:, None]
    missing = wanted - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
    each = jnp.max(jnp.where(at_edge, weights, 0.0), axis=-1)
    num = jnp.ceil(missing / jnp.maximum(each, jnp.finfo(each.dtype).tiny))
    num = jnp.where(top_p < 1, jnp.clip(num, 1, scaled.shape[-1]), scaled.shape[-1])
    return above | _first(at_edge, num.astype(jnp.int32))


def _ordered(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Integers in the order of float32; equal only where the floats are (-0.0 and 0.0 too)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _edge(keys, weights, wanted: Float[Array, "B"], cut: Bool[Array, "B"]) -> Int[Array, "B"]:
    """The greatest key of each row such that weights of keys from it on sum to at least `wanted`;
    the least key of a row that is not cut.
    """
    least, greatest = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)
    bounds = least, jnp.where(cut, greatest, least)
    return lax.while_loop(_is_open, partial(_halved, keys, weights, wanted), bounds)[0]


def _is_open(bounds) -> Bool[Array, ""]:
    return jnp.any(bounds[0] < bounds[1])


def _halved(keys, weights, wanted, bounds):
    """Bounds of the edge, each given as one that reaches and the last that may."""
    low, high = bounds
    middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and never over int32's end
    sums = jnp.sum(jnp.where(keys >= middle[:, None], weights, 0.0), axis=-1)
    reaches = sums >= wanted
    exact = sums == wanted  # nothing between this key and the edge has any weight
    high = jnp.where(reaches, jnp.where(exact, middle, high), middle - 1)
    return jnp.where(reaches, middle, low), jnp.maximum(high, low)


def _first(mask: Bool[Array, "B V"], count: Int[Array, "B"]) -> Bool[Array, "B V"]:
    """The first `count` of each row's set places."""
    V = mask.shape[-1]
    backwards = jnp.broadcast_to(V - jnp.arange(V, dtype=jnp.int32), mask.shape)
    weights = mask.astype(jnp.float32)  # counts are exact below 2^24
    some = (count > 0) & (count < jnp.sum(weights, axis=-1))
    last = _edge(backwards, weights, count.astype(jnp.float32), some)
    return mask & (backwards >= last[:, None]) & (count > 0)[:, None]
