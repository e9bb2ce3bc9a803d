"""kv_insert, its norm and its rotation in float64; it writes what the packed path sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_insert import KeyTransform, Rows, Slots, kv_insert, norm_rope
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout, gather, through_cache
from tests.numerics import assert_close
from tests.ops.oracles import gemma_norm, rotate

Z, K, H, I, T, P = 16, 2, 32, 48, 37, 5
ROTARY, THETA, EPS = 16, 5e6, 1e-6
POSITIONS = np.arange(T) + 1000
_insert = jax.jit(kv_insert, static_argnums=(1,), donate_argnums=(0,))
_norm_rope = jax.jit(norm_rope, static_argnums=(4,))
_through_cache = jax.jit(through_cache, static_argnums=(1,))


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _angles():
    frequencies = THETA ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
    angles = POSITIONS[:, None] * frequencies
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _norm_and_rotate(x, weight):
    """x [T, heads, width] in float64."""
    y = gemma_norm(x, weight, EPS)
    for t, head in np.ndindex(y.shape[:2]):
        y[t, head] = rotate(y[t, head], POSITIONS[t], ROTARY, THETA)
    return y


def _layout(fmt, sparse=(True, True)):
    formats = CacheFormats(kv=fmt, index=fmt)
    sizes = {"block_size": Z, "kv_heads": K, "head_dim": H, "index_dim": I}
    return PoolLayout(sparse_layers=sparse, formats=formats, **sizes)


def _rows(dtype=jnp.float32):
    parts = [_normal(T, K, H, seed=1), _normal(T, K, H, seed=2), _normal(T, 1, I, seed=3)]
    k, v, index_k = (jnp.asarray(x, dtype) for x in parts)
    return Rows(k=k, v=v, index_k=index_k)


def _transform():
    cos, sin = _angles()
    k_norm, index_norm = jnp.asarray(_normal(H, seed=4)), jnp.asarray(_normal(I, seed=5))
    return KeyTransform(k_norm=k_norm, index_norm=index_norm, cos=cos, sin=sin, eps=EPS)


# Logical order on scattered blocks; three tokens are padding.
BLOCK_IDS = np.array([3, 0, 4])[np.arange(T) // Z].astype(np.int32)
BLOCK_IDS[[5, 20, 36]] = -1
LIVE = BLOCK_IDS >= 0
PLACES = (np.arange(T) % Z).astype(np.int32)


def _inserted(fmt, rows, layer=1):
    """K, V and index key as read back for each token, after inserting into one layer of two."""
    layout = _layout(fmt)
    line = layout.layer_line(layer)
    slots = Slots(block_ids=jnp.asarray(BLOCK_IDS), places=jnp.asarray(PLACES))
    pool = _insert(layout.empty(P), layout, line, rows, slots, _transform())
    starts = {layout.kv: [line, line + layout.kv.lines], layout.index: [line + 2 * layout.kv.lines]}
    read = []
    for component, lines in starts.items():
        ids = jnp.broadcast_to(jnp.arange(P), (component.heads, P))
        for start in lines:
            whole = np.asarray(gather(pool, component, start, ids))  # [heads, P, Z, width]
            read.append(whole[:, BLOCK_IDS, PLACES].swapaxes(0, 1))
    return pool, read


def test_keys_are_normed_and_rotated_and_values_are_stored_as_they_are():
    rows, t = _rows(), _transform()
    _, (k, v, index_k) = _inserted("f32", rows)
    assert_close(k[LIVE], _norm_and_rotate(rows.k, t.k_norm)[LIVE], "f32")
    assert_close(index_k[LIVE], _norm_and_rotate(rows.index_k, t.index_norm)[LIVE], "f32")
    assert_close(v[LIVE], np.asarray(rows.v)[LIVE], "exact")


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages_give_back_what_the_packed_path_sees(fmt, dtype):
    rows, t = _rows(dtype), _transform()
    _, read = _inserted(fmt, rows)
    k = _norm_rope(rows.k, t.k_norm, t.cos, t.sin, EPS)
    index_k = _norm_rope(rows.index_k, t.index_norm, t.cos, t.sin, EPS)
    for found, packed in zip(read, (k, rows.v, index_k), strict=True):
        seen = np.asarray(_through_cache(packed, fmt)).astype(np.float32)
        assert_close(found[LIVE], seen[LIVE], "exact")


def test_padding_tokens_and_other_layers_leave_no_byte():
    layout = _layout("fp8")
    pool, _ = _inserted("fp8", _rows())
    written = np.asarray(pool).reshape(P, -1) != 0
    assert not written[[1, 2]].any() and not written[:, : layout.layer_line(1) * 128].any()
    first = layout.layer_line(1) * 128
    padded = written[3, first + 5 * H : first + 6 * H]  # token 5 of block 3, head 0
    assert not padded.any() and written[3, first : first + 5 * H].any()


def test_a_dense_layer_writes_keys_and_values_only():
    layout = _layout("bf16", sparse=(False, True))
    full = _rows()
    rows = Rows(k=full.k, v=full.v, index_k=None)
    transform = KeyTransform(
        k_norm=jnp.zeros(H), index_norm=None, cos=_angles()[0], sin=_angles()[1], eps=EPS
    )
    slots = Slots(block_ids=jnp.asarray(BLOCK_IDS), places=jnp.asarray(PLACES))
    pool = _insert(layout.empty(P), layout, 0, rows, slots, transform)
    lines = np.asarray(pool).any(axis=(0, 2))
    assert lines[: 2 * layout.kv.lines].any() and not lines[2 * layout.kv.lines :].any()


def test_a_jitted_insert_does_not_copy_a_donated_pool():
    layout, rows, t = _layout("nvfp4"), _rows(), _transform()
    slots = Slots(block_ids=jnp.asarray(BLOCK_IDS), places=jnp.asarray(PLACES))
    pool = jax.ShapeDtypeStruct((4096, layout.lines, 128), jnp.uint8)
    insert = jax.jit(lambda p: kv_insert(p, layout, 0, rows, slots, t), donate_argnums=0)
    memory = insert.lower(pool).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * pool.size


# ---- the transform alone


def test_norm_and_rotation_follow_float64():
    x, weight = _normal(T, K, H), _normal(H, seed=1)
    found = _norm_rope(x, weight, *_angles(), EPS)
    assert_close(found, _norm_and_rotate(x, weight), "f32")


def test_dimensions_past_the_rotary_ones_pass_through():
    x, weight = _normal(T, K, H), _normal(H, seed=1)
    found = np.asarray(_norm_rope(x, weight, *_angles(), EPS))
    normed = gemma_norm(x, weight, EPS)
    assert_close(found[..., ROTARY:], normed[..., ROTARY:], "f32")
    assert np.abs(found[..., :ROTARY] - normed[..., :ROTARY]).max() > 0.1


def test_bfloat16_rows_are_computed_in_float32_and_rounded_once():
    x, weight = jnp.asarray(_normal(T, K, H), jnp.bfloat16), _normal(H, seed=1)
    found = _norm_rope(x, weight, *_angles(), EPS)
    exact = _norm_rope(x.astype(jnp.float32), weight, *_angles(), EPS)
    assert_close(found, exact.astype(jnp.bfloat16), "exact")


@pytest.mark.parametrize(("weight", "factor"), [(0.0, 1.0), (1.0, 2.0)])
def test_the_norm_weight_is_centred_on_zero(weight, factor):
    """F182."""
    x = _normal(T, K, H)
    ones, zeros = jnp.ones((T, 0)), jnp.zeros((T, 0))  # no rotation
    found = np.asarray(_norm_rope(x, jnp.full(H, weight), ones, zeros, EPS))
    normalised = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    assert_close(found, factor * normalised, "f32")
