"""top-k and top-p without sorting the vocabulary: the logit at the edge is found bit by bit.

A float's bits, taken as an integer, are in the order of floats; so 16 passes over a row, for two
bits each, find the greatest logit from which on the weights reach what is wanted, exactly. Equal
logits at the edge are kept from the lower id on, and the last such id is found in the same way. A
batch that is not cut takes no passes; no row's outcome depends on the others.

On a GPU the passes are unrolled: XLA records a conditional into a command buffer, where the device
decides, only if there is no loop in its branches; else the host reads the condition, every step.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

_BITS = 2  # of the edge that a pass finds: it compares with 3 thresholds at once,
_MORE_BITS, _FEW_ROWS = 4, 4  # or, for a few rows on a GPU, whose launches count, with 15


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


def _ordered(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Integers in the order of float32; equal only where the floats are (-0.0 and 0.0 too)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)


def _edge(keys, weights, wanted: Float[Array, "B"], cut: Bool[Array, "B"], bits: int = 32):
    """The greatest key of each row such that weights of keys from it on sum to at least `wanted`,
    of keys of so many bits; 0 in a row that is not cut.
    """
    many = _MORE_BITS if len(keys) <= _FEW_ROWS else _BITS
    found = lax.platform_dependent(
        keys,
        weights,
        wanted,
        cuda=partial(_searched, bits=bits, at_once=many, unrolled=True),
        default=partial(_searched, bits=bits, at_once=_BITS, unrolled=False),
    )
    found = jnp.minimum(found, jnp.max(keys, axis=-1))  # where nothing at all is wanted
    return jnp.where(cut, found, jnp.uint32(0))


@partial(jax.jit, static_argnames=("bits", "at_once", "unrolled"))
def _searched(keys, weights, wanted, *, bits: int, at_once: int, unrolled: bool):
    """`_edge` by passes for some bits of it at once, the highest first."""
    shifts = jnp.arange(bits - 1 - (bits - 1) % at_once, -1, -at_once, dtype=jnp.uint32)

    def next_bits(edge: UInt32[Array, "B"], shift: UInt32[Array, ""]):
        return _refined(keys, weights, wanted, edge, shift, at_once), None

    start = jnp.zeros(len(keys), jnp.uint32)
    return lax.scan(next_bits, start, shifts, unroll=len(shifts) if unrolled else 1)[0]


@partial(jax.jit, static_argnames="at_once")
def _refined(keys, weights, wanted, edge: UInt32[Array, "B"], shift, at_once: int):
    """The edge with its bits at `shift`: the highest of which the weights reach what is wanted."""
    digits = jnp.arange(1, 1 << at_once, dtype=jnp.uint32)
    thresholds = edge[:, None] + (digits << shift)
    reached = keys[:, None] >= thresholds[..., None]
    sums = jnp.sum(jnp.where(reached, weights[:, None], 0.0), axis=-1)
    best = jnp.max(jnp.where(sums >= wanted[:, None], digits, 0), axis=-1)
    return edge + (best << shift)


def _first(mask: Bool[Array, "B V"], count: Int[Array, "B"]) -> Bool[Array, "B V"]:
    """The first `count` of each row's set places."""
    total = jnp.sum(mask.astype(jnp.float32), axis=-1)  # counts are exact below 2^24
    some = (count > 0) & (count < total)
    mask = mask & (count > 0)[:, None]
    return lax.cond(jnp.any(some), _cut_first, lambda mask, *_: mask, mask, count, some)


def _cut_first(mask: Bool[Array, "B V"], count: Int[Array, "B"], some: Bool[Array, "B"]):
    V = mask.shape[-1]
    backwards = jnp.broadcast_to(V - jnp.arange(V, dtype=jnp.uint32), mask.shape)
    wanted, weights = count.astype(jnp.float32), mask.astype(jnp.float32)
    last = _edge(backwards, weights, wanted, some, V.bit_length())
    return mask & (backwards >= last[:, None])
