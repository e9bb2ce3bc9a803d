"""The pool: its bytes, where each of them lies, and that writing and reading touch nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from configs.presets import m3, m3_1_flash
from minimax_jax.cache import pool_layout
from pallas_kernels.layouts import pool as pool_file
from pallas_kernels.layouts.pool import (
    LINE,
    CacheFormats,
    Component,
    PoolLayout,
    decode,
    gather,
    through_cache,
    write,
)
from tests.numerics import assert_close, relative_error

FULL = CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8")
FORMATS = ["f32", "bf16", "fp8", "nvfp4"]
BLOCKS, HEADS, TOKENS, WIDTH = 5, 2, 16, 32
_write = jax.jit(write, static_argnums=(1,))
_through_cache = jax.jit(through_cache, static_argnums=(1, 2))
_gather = jax.jit(gather, static_argnums=(1,), static_argnames=("compute",))

each_format = pytest.mark.parametrize("fmt", FORMATS)


def _component(fmt):
    return Component(format=fmt, heads=HEADS, tokens=TOKENS, width=WIDTH)


def _every_slot():
    """Block and slot of all tokens of the pool, shuffled."""
    order = np.random.default_rng(7).permutation(BLOCKS * TOKENS)
    return np.divmod(order, TOKENS)


def _numpy_bytes(rows, fmt):
    """The stored codes of one token's rows [heads, width] by numpy's casts."""
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[fmt]
    return rows.astype(dtype).view(np.uint8)


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# ---- bytes


def test_a_token_takes_34560_bytes_of_kv_and_4320_of_index_in_nvfp4():
    layout = pool_layout(m3_1_flash(), FULL)
    assert 60 * 2 * layout.kv.lines * LINE // 128 == 34_560
    assert 60 * layout.index.lines * LINE // 128 == 4_320


def test_a_token_takes_61440_bytes_of_kv_in_fp8():
    layout = pool_layout(m3_1_flash(), CacheFormats(kv="fp8"))
    assert 60 * 2 * layout.kv.lines * LINE // 128 == 61_440


def test_a_block_of_one_rank_of_four_with_an_fp8_draft_is_14240_lines():
    layout = pool_layout(m3_1_flash(), FULL, local_heads=1)
    assert (layout.lines, layout.block_bytes) == (14_240, 1_822_720)


def test_an_empty_pool_has_one_row_of_lines_a_block():
    pool = replace(pool_layout(m3_1_flash(), FULL, 1), draft_layers=0, sparse_layers=(True,)).empty(
        3
    )
    assert pool.shape == (3, 2 * (64 + 8) + 64 + 8, 128) and pool.dtype == jnp.uint8


def test_sparse_layers_follow_one_another_as_k_v_index():
    layout = pool_layout(m3_1_flash(), FULL, local_heads=1)
    assert [layout.layer_line(i) for i in (0, 1, 59)] == [0, 3 * 72, 59 * 3 * 72]


def test_a_dense_layer_has_no_index_part():
    layout = pool_layout(m3(), FULL, local_heads=1)
    assert [layout.layer_line(i) for i in (2, 3, 4)] == [2 * 144, 3 * 144, 3 * 144 + 216]


def test_draft_layers_come_last():
    layout = pool_layout(m3_1_flash(), FULL, local_heads=1)
    assert [layout.draft_line(i) for i in (0, 1, 5)] == [12_960, 12_960 + 256, 14_240]


def test_codes_and_scales_are_each_padded_to_whole_lines():
    # 3 x 5 tokens of 8 bytes of codes are 120 bytes, their scales 15
    odd = Component(format="nvfp4", heads=3, tokens=5, width=16)
    assert (odd.code_bytes, odd.scale_bytes, odd.code_lines, odd.lines) == (8, 1, 1, 2)


@pytest.mark.parametrize("name", ["kv", "index", "draft"])
def test_an_unknown_format_is_refused_by_name(name):
    with pytest.raises(
        ValueError, match=f"^{name} format 'int8' is not one of f32, bf16, fp8, nvfp4$"
    ):
        CacheFormats(**{name: "int8"})


def test_an_unknown_cache_compute_is_refused():
    with pytest.raises(ValueError, match="^cache compute 'fp8' is neither 'exact' nor 'e4m3'$"):
        CacheFormats(compute="fp8")


@pytest.mark.parametrize("name", ["kv", "index", "draft"])
def test_an_nvfp4_width_must_hold_whole_groups(name):
    with pytest.raises(ValueError, match=f"^{name} width 24 is not a multiple of 16$"):
        PoolLayout(
            block_size=16,
            kv_heads=1,
            head_dim=24,
            index_dim=24,
            sparse_layers=(True,),
            draft_layers=1,
            formats=CacheFormats(**{name: "nvfp4"}),
        )


# ---- where the bytes lie


@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8"])
def test_a_row_lies_at_head_then_token_of_its_block(fmt):
    component, line = _component(fmt), 3
    blocks, slots = _every_slot()
    rows = _normal(BLOCKS * TOKENS, HEADS, WIDTH)
    pool = jnp.zeros((BLOCKS, component.lines + 5, LINE), jnp.uint8)
    flat = np.asarray(_write(pool, component, line, blocks, slots, rows)).reshape(BLOCKS, -1)
    for block, slot, row in zip(blocks, slots, rows, strict=True):
        for head in range(HEADS):
            start = line * 128 + (head * TOKENS + slot) * component.code_bytes
            found = flat[block, start : start + component.code_bytes]
            assert_close(found, _numpy_bytes(row[head], fmt), "exact")


def _distinct_nvfp4():
    """Values of random codes and scales; each group holds a 6, so that its scale is met."""
    rng = np.random.default_rng(3)
    groups = (BLOCKS * TOKENS, HEADS, WIDTH // 16)
    scale_bytes = rng.integers(0x20, 0x78, groups).astype(np.uint8)
    codes = rng.integers(0, 16, (*groups, 16)).astype(np.uint8)
    codes[..., 5] = 7  # 6.0
    codes[codes == 8] = 0
    scales = scale_bytes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales[..., None]
    return values.reshape(BLOCKS * TOKENS, HEADS, WIDTH), codes, scale_bytes


def test_nvfp4_codes_and_scales_lie_in_two_regions_by_head_token_and_group():
    """F75."""
    component, line = _component("nvfp4"), 2
    values, codes, scale_bytes = _distinct_nvfp4()
    blocks, slots = _every_slot()
    pool = jnp.zeros((BLOCKS, component.lines + 4, LINE), jnp.uint8)
    flat = np.asarray(_write(pool, component, line, blocks, slots, values)).reshape(BLOCKS, -1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(-1, HEADS, WIDTH // 2)
    for t, head in np.ndindex(BLOCKS * TOKENS, HEADS):
        row = head * TOKENS + slots[t]
        start = line * 128 + row * 16
        assert_close(flat[blocks[t], start : start + 16], packed[t, head], "exact")
        start = (line + HEADS * TOKENS * 16 // 128) * 128 + row * 2
        assert_close(flat[blocks[t], start : start + 2], scale_bytes[t, head], "exact")


def test_distinct_nvfp4_groups_are_read_back_for_all_block_ids():
    """F75."""
    component = _component("nvfp4")
    values, _, _ = _distinct_nvfp4()
    blocks, slots = _every_slot()
    pool = _write(
        jnp.zeros((BLOCKS, component.lines, LINE), jnp.uint8), component, 0, blocks, slots, values
    )
    ids = np.broadcast_to(np.arange(BLOCKS), (HEADS, BLOCKS))
    found = np.asarray(_gather(pool, component, 0, ids))
    assert_close(found[:, blocks, slots].swapaxes(0, 1), values, "exact")


@each_format
def test_writing_one_component_changes_none_of_the_other_bytes(fmt):
    component, line = _component(fmt), 2
    pool = np.random.default_rng(1).integers(0, 256, (3, component.lines + 4, LINE), dtype=np.uint8)
    ids, slots = np.ones(TOKENS, np.int32), np.arange(TOKENS)
    after = np.asarray(
        _write(jnp.asarray(pool), component, line, ids, slots, _normal(TOKENS, HEADS, WIDTH))
    )
    inside = np.zeros(pool.shape, bool)
    inside[1, line : line + component.lines] = True
    assert_close(after[~inside], pool[~inside], "exact")


@each_format
def test_each_head_gathers_its_own_list_of_blocks(fmt):
    component = _component(fmt)
    pool = jnp.asarray(
        np.random.default_rng(2).integers(0, 100, (BLOCKS, component.lines, LINE)), jnp.uint8
    )
    lists = np.array([[[4, 0], [1, 1]], [[2, 3], [0, 4]]])  # [batch, heads, C]
    found = np.asarray(_gather(pool, component, 0, lists))
    for batch, head, place in np.ndindex(2, HEADS, 2):
        alone = np.asarray(
            _gather(pool, component, 0, np.full((HEADS, 1), lists[batch, head, place]))
        )
        assert_close(found[batch, head, place], alone[head, 0], "exact")


@each_format
def test_gathering_an_id_outside_the_pool_gives_zeros(fmt):
    component = _component(fmt)
    pool = jnp.full((BLOCKS, component.lines, LINE), 0x31, jnp.uint8)
    ids = np.array([[-1, BLOCKS, 2**31 - 1], [-(2**31), -BLOCKS, BLOCKS + 1]])
    assert not np.asarray(_gather(pool, component, 0, ids)).any()


@each_format
@pytest.mark.parametrize("block", [BLOCKS, -1, -BLOCKS, 2**31 - 1])
def test_a_write_outside_the_pool_is_dropped(fmt, block):
    """F80: the last block does not take what is for none."""
    component = _component(fmt)
    pool = jnp.asarray(
        np.random.default_rng(4).integers(0, 256, (BLOCKS, component.lines, LINE)), jnp.uint8
    )
    ids = jnp.full(TOKENS, block, jnp.int32)
    after = _write(pool, component, 0, ids, np.arange(TOKENS), _normal(TOKENS, HEADS, WIDTH))
    assert_close(after, pool, "exact")


# ---- what comes back


def _written_and_read(x_Thw, fmt, compute="exact"):
    component = replace(_component(fmt), heads=x_Thw.shape[1])
    tokens = x_Thw.shape[0]
    pool = jnp.zeros((tokens // TOKENS, component.lines, LINE), jnp.uint8)
    blocks, slots = np.divmod(np.arange(tokens), TOKENS)
    pool = _write(pool, component, 0, blocks, slots, x_Thw)
    ids = np.broadcast_to(np.arange(tokens // TOKENS), (x_Thw.shape[1], tokens // TOKENS))
    found = np.asarray(_gather(pool, component, 0, ids, compute=compute))  # [heads, P, Z, w]
    return found.reshape(x_Thw.shape[1], tokens, WIDTH).swapaxes(0, 1)


@pytest.mark.parametrize("name", ["K", "V"])
def test_nvfp4_loses_about_a_tenth_of_keys_and_of_values(name):
    """F74: scales in another order would lose about 0.76."""
    x = _normal(BLOCKS * TOKENS, HEADS, WIDTH, seed="KV".index(name))
    assert 0.08 < relative_error(_written_and_read(x, "nvfp4"), x) < 0.12


@each_format
@pytest.mark.parametrize("compute", ["exact", "e4m3"])
def test_through_cache_is_what_writing_and_reading_gives(fmt, compute):
    x = _normal(BLOCKS * TOKENS, HEADS, WIDTH) * 3
    seen = _through_cache(x, fmt, compute)
    assert_close(seen, _written_and_read(x, fmt, compute), "exact")


@each_format
def test_through_cache_keeps_bfloat16_and_rounds_nothing_twice(fmt):
    x = jnp.asarray(_normal(TOKENS, HEADS, WIDTH), jnp.bfloat16)
    seen = _through_cache(x, fmt)
    assert seen.dtype == jnp.bfloat16
    expected = _written_and_read(x.astype(jnp.float32), fmt)
    assert_close(np.asarray(seen).astype(np.float32), expected, "exact")


def test_e4m3_compute_rounds_the_expanded_nvfp4_value_once_more():
    x = _normal(BLOCKS * TOKENS, HEADS, WIDTH)
    exact = _written_and_read(x, "nvfp4")
    again = exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (again != exact).any()
    assert_close(_written_and_read(x, "nvfp4", "e4m3"), again, "exact")


@each_format
def test_the_gradient_passes_straight_through_the_cache(fmt):
    x, weight = _normal(4, WIDTH), _normal(4, WIDTH, seed=1)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(through_cache(x, fmt) * weight)))(x)
    assert_close(gradient, weight, "exact")


def test_decode_reads_fp8_bytes_like_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_close(decode(jnp.asarray(codes), None, "fp8"), expected, "exact")


# ---- large pools and copies


def _equations(jaxpr):
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


LARGE = Component(format="nvfp4", heads=1, tokens=128, width=128)
LARGE_POOL = jax.ShapeDtypeStruct((20_001, 14_240, LINE), jnp.uint8)  # 36 GB


def _address_equations(primitive):
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    tokens = jax.ShapeDtypeStruct((4,), jnp.int32)
    values = jax.ShapeDtypeStruct((4, 1, 128), jnp.float32)
    if primitive == "gather":
        jaxpr = jax.make_jaxpr(lambda p, i: gather(p, LARGE, 14_000, i))(LARGE_POOL, ids)
    else:
        jaxpr = jax.make_jaxpr(lambda p, i, s, v: write(p, LARGE, 14_000, i, s, v))(
            LARGE_POOL, tokens, tokens, values
        )
    return [e for e in _equations(jaxpr.jaxpr) if e.primitive.name == primitive]


@pytest.mark.parametrize("primitive", ["gather", "scatter"])
def test_block_and_byte_of_a_row_are_two_indices_that_each_fit_int32(primitive):
    """F186: no index is the place in the whole pool."""
    equations = _address_equations(primitive)
    assert len(equations) == 2  # codes and scales
    for equation in equations:
        operand, indices = equation.invars[0].aval, equation.invars[1].aval
        assert operand.shape == (20_001, 14_240 * 128) and indices.shape[-1] == 2
        assert np.prod(operand.shape, dtype=np.int64) > 2**31 > max(operand.shape)


@pytest.mark.parametrize("block", [16_383, 16_384, 20_000])
def test_the_indices_of_a_large_pool_are_its_block_and_byte(block, monkeypatch):
    """F186."""
    # 14,240-line rows: byte offsets of these blocks in the whole pool lie beyond 2^34
    seen = []
    monkeypatch.setattr(pool_file.lax, "gather", lambda flat, where, *a, **k: _note(seen, where, k))
    with jax.enable_x64(False):
        pool_file._slices(_Shape(LARGE_POOL.shape), 14_000, 128, 64, jnp.array([[block]]))
    assert seen == [[block, 14_000 * 128]]


class _Shape:
    """Stands for an array of a shape too large to make."""

    def __init__(self, shape):
        self.shape = shape

    def reshape(self, *shape):
        return _Shape(shape)


def _note(seen, where, options):
    seen.append(np.asarray(where).reshape(-1).tolist())
    return jnp.zeros((*where.shape[:-1], options["slice_sizes"][1]), jnp.uint8)


def _temporary_share(function, component, *arguments, donate=()):
    """Bytes that the compiled program needs beside its arguments, as a share of the pool."""
    pool = jax.ShapeDtypeStruct((64, component.lines + 800, LINE), jnp.uint8)
    compiled = jax.jit(function, donate_argnums=donate).lower(pool, *arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / pool.size


@each_format
def test_a_jitted_write_does_not_copy_a_donated_pool(fmt):
    component = replace(LARGE, format=fmt)
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    values = jax.ShapeDtypeStruct((8, 1, 128), jnp.float32)
    share = _temporary_share(
        lambda p, i, s, v: write(p, component, 5, i, s, v),
        component,
        tokens,
        tokens,
        values,
        donate=0,
    )
    assert share < 0.05


@each_format
def test_a_jitted_gather_copies_no_more_than_its_blocks(fmt):
    component = replace(LARGE, format=fmt)
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    share = _temporary_share(lambda p, i: gather(p, component, 5, i), component, ids)
    assert share < 0.05
