"""The ops in numpy float64, by loops over queries and heads; keys as pages and as plain blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts.pages import Blocks, Pages
from pallas_kernels.layouts.pool import LINE, Component, through_cache, write

_write = jax.jit(write, static_argnums=(1,))
_through_cache = jax.jit(through_cache, static_argnums=(1,))


def attend(q_H, keys_SH, values_SH, scale):
    """(output, log-sum-exp) of one query over all the keys given; (0, -inf) over none."""
    if not len(keys_SH):
        return np.zeros(values_SH.shape[-1]), -np.inf
    scores = keys_SH.astype(np.float64) @ q_H.astype(np.float64) * scale
    weights = np.exp(scores - scores.max())
    lse = np.log(weights.sum()) + scores.max()
    return weights @ values_SH.astype(np.float64) / weights.sum(), lse


def attend_blocks(q, k, v, block_ids, positions, block_size, scale):
    """q [B, T, N, H] over the causal k, v [B, S, K, H] of the blocks each query and head names."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    group = q.shape[2] // k.shape[2]
    for b, i, n in np.ndindex(*lse.shape):
        head, position = n // group, positions[b, i]
        seen = [
            j
            for j in range(k.shape[1])
            if j <= position and j // block_size in block_ids[b, i, head]
        ]
        out[b, i, n], lse[b, i, n] = attend(q[b, i, n], k[b, seen, head], v[b, seen, head], scale)
    return out, lse


def pick_blocks(q_I, keys_SI, position, block_size, top_k, init_blocks=0, local_blocks=1):
    """The set of blocks one query chooses: forced ones, then the best; equal ones by rising id."""
    own = position // block_size
    forced = [b for b in range(own + 1) if b < init_blocks or b > own - local_blocks]
    scores = {}
    for b in range(own + 1):
        causal = range(b * block_size, min((b + 1) * block_size, position + 1))
        scores[b] = max(float(np.dot(keys_SI[j].astype(np.float64), q_I)) for j in causal)
    rest = sorted(set(scores) - set(forced), key=lambda b: (-scores[b], b))
    return set((forced + rest)[:top_k])


def rotate(x_H, position, rotary_dim, theta):
    """Pairs (i, i + rotary_dim / 2) of one vector turned by position x theta^(-2i / rotary_dim)."""
    y, half = np.array(x_H, np.float64), rotary_dim // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / rotary_dim)
        a, b = x_H[i], x_H[i + half]
        y[i] = a * np.cos(angle) - b * np.sin(angle)
        y[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return y


def gemma_norm(x, weight, eps):
    """x / rms(x) (1 + w) in float64."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + np.asarray(weight, np.float64))


def scattered(values, block_size, seed=0):
    """Values [B, S, ...] as rows [block, Z, ...] in shuffled order, one spare; the table [B, P]."""
    B, S = values.shape[:2]
    P = S // block_size
    table = (
        np.random.default_rng(seed).permutation(B * P + 1)[: B * P].reshape(B, P).astype(np.int32)
    )
    rows = np.zeros((B * P + 1, block_size, *values.shape[2:]), values.dtype)
    rows[table] = values.reshape(B, P, block_size, *values.shape[2:])
    return rows, table


def as_pages(rows, fmt="f32", junk=0xFF):
    """Rows [P, Z, heads, width] in a pool whose other bytes are junk (0xFF: NaN in each format)."""
    P, Z, heads, width = rows.shape
    component = Component(format=fmt, heads=heads, tokens=Z, width=width)
    pool = jnp.full((P, component.lines + 2, LINE), junk, jnp.uint8)
    ids, slots = np.divmod(np.arange(P * Z), Z)
    flat = rows.reshape(P * Z, heads, width)
    pool = _write(pool, component, 1, ids, slots, flat)
    return Pages(pool=pool, line=jnp.int32(1), component=component)


def as_source(rows, kind):
    """Rows as `Blocks`, or as pages of a format."""
    return Blocks(jnp.asarray(rows)) if kind == "blocks" else as_pages(rows, kind)


def stored(values, kind):
    """What a source gives back for these values."""
    return values if kind == "blocks" else np.asarray(_through_cache(values, kind))


def temporary_share(function, component, num_blocks=1024):
    """Bytes that a program of a page source needs beside its arguments, as a share of the pool."""

    def of_pool(pool):
        return function(Pages(pool=pool, line=jnp.int32(1), component=component))

    # a row is longer than the component: one layer among others
    pool = jax.ShapeDtypeStruct((num_blocks, 8 * component.lines, LINE), jnp.uint8)
    memory = jax.jit(of_pool).lower(pool).compile().memory_analysis()
    return memory.temp_size_in_bytes / pool.size


def portable(table) -> list[str]:
    """Names of the implementations that run without a GPU; the others' tests are in tests/gpu."""
    return [one.name for one in table if one.name in ("masked", "reference")]
