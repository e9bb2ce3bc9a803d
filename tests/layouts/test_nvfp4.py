"""NVFP4 bytes against an encoder of a few numpy lines, and both conventions of the outer scale."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layouts import e2m1, nvfp4

ALL_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
# Halfway points and the neighbour with the even code, by hand.
TIES = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
ON_GPU = jax.default_backend() == "gpu"  # whose float32 division is within 2 units, not exact
TIE_WIDTH = 2.0**-21 if ON_GPU else 2.0**-22

# Compiled once a shape; the tests that take `transform` run each operation by itself too.
encode, decode = jax.jit(nvfp4.encode), jax.jit(nvfp4.decode)
quantize = jax.jit(nvfp4.quantize)
dequantize = jax.jit(lambda tensor: tensor.dequantize())

both_ways = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def _reference(x, outer=1.0):
    """(codes one a byte, scales), the rule in float32 numpy with ml_dtypes' rounding."""
    groups, outer = x.reshape(*x.shape[:-1], -1, 16), np.float32(outer)
    amax = np.abs(groups).max(-1)
    scales = np.minimum(amax * np.float32(1 / 6) / outer, 448).astype(ml_dtypes.float8_e4m3fn)
    step = (scales.astype(np.float32) * outer)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.clip(groups / step, -6, 6)
    codes = np.where(step == 0, 0, ratio).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), scales


def _reference_values(codes, scales):
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (values.reshape(*scales.shape, 16) * scales.astype(np.float32)[..., None]).reshape(
        codes.shape
    )


def _assert_same_bytes(x, transform, outer=1.0):
    packed, scales = transform(nvfp4.encode)(jnp.asarray(x), outer)
    codes, expected_scales = _reference(x, outer)
    np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), expected_scales.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(packed), codes[..., ::2] | codes[..., 1::2] << 4)


def _many_magnitudes(shape, low=-14, high=14):
    """Normal numbers in groups of random magnitude; a third are on a grid that has many ties."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, dtype=np.float32)
    x[::3] = np.round(x[::3] * 8) / 8
    magnitude = 2.0 ** rng.integers(low, high, (*shape[:-1], shape[-1] // 16, 1))
    return (x.reshape(*shape[:-1], -1, 16) * magnitude).reshape(shape).astype(np.float32)


def _matrices():
    return jnp.asarray(np.random.default_rng(1).standard_normal((3, 8, 64), dtype=np.float32))


def test_every_code_has_its_value():
    values = np.asarray(e2m1.to_float(jnp.arange(16, dtype=jnp.uint8)))
    expected = np.array(ALL_VALUES, np.float32)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_every_value_keeps_its_code():
    codes = e2m1.round_to(jnp.array(ALL_VALUES, jnp.float32))
    np.testing.assert_array_equal(np.asarray(codes), np.arange(16))


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_the_even_code(sign):
    points = np.array(list(TIES), np.float32) * sign
    rounded = e2m1.to_float(e2m1.round_to(jnp.asarray(points)))
    np.testing.assert_array_equal(np.asarray(rounded), np.array(list(TIES.values())) * sign)


@pytest.mark.parametrize("direction", [-np.inf, np.inf])
def test_a_value_next_to_a_tie_goes_to_its_own_side(direction):
    points = np.nextafter(np.array(list(TIES), np.float32), np.float32(direction))
    expected = points.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(e2m1.round_to(jnp.asarray(points))), expected)


def test_elements_saturate_at_six():
    codes = e2m1.round_to(jnp.array([6.1, 1e30, -7, np.inf, -np.inf], jnp.float32))
    assert np.asarray(codes).tolist() == [7, 7, 15, 7, 15]


def test_the_even_element_is_in_the_low_nibble():
    assert np.asarray(e2m1.pack(jnp.array([1, 2, 15, 0], jnp.uint8))).tolist() == [0x21, 0x0F]


def test_unpacking_inverts_packing_on_every_byte():
    every_byte = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_array_equal(
        np.asarray(e2m1.pack(e2m1.unpack(every_byte))), np.asarray(every_byte)
    )


@both_ways
def test_bytes_equal_the_plain_encoder_over_many_magnitudes(transform):
    _assert_same_bytes(_many_magnitudes((256, 256)), transform)


def test_bytes_equal_the_plain_encoder_in_bfloat16():
    x = _many_magnitudes((256, 256)).astype(ml_dtypes.bfloat16)
    packed, scales = encode(jnp.asarray(x))
    expected = encode(jnp.asarray(x.astype(np.float32)))
    np.testing.assert_array_equal(np.asarray(packed), np.asarray(expected[0]))
    np.testing.assert_array_equal(
        np.asarray(scales).view(np.uint8), np.asarray(expected[1]).view(np.uint8)
    )


@pytest.mark.parametrize("outer", [2.0**-20, 64.0])
def test_bytes_equal_the_plain_encoder_with_a_power_of_two_as_outer_scale(outer):
    _assert_same_bytes(_many_magnitudes((256, 256)) * np.float32(outer), jax.jit, outer)


@pytest.mark.parametrize("outer", [0.37, 1e-4])
def test_any_outer_scale_changes_codes_only_within_a_rounding_of_a_tie(outer):
    x = _many_magnitudes((256, 256)) * np.float32(outer)
    packed, scales = encode(jnp.asarray(x), outer)
    codes, expected = _reference(x, outer)
    moved = _scales_moved_at_a_tie(x, outer, np.asarray(scales), expected)
    differs = (np.asarray(e2m1.unpack(packed)) != codes) & ~np.repeat(moved, 16, axis=1)
    steps = np.repeat(expected.astype(np.float32) * np.float32(outer), 16, axis=1)
    ratio = np.abs(x[differs] / steps[differs])[:, None]
    assert (np.abs(ratio / np.array(list(TIES)) - 1).min(1) < TIE_WIDTH).all()


def _scales_moved_at_a_tie(x, outer, scales, expected):
    """Which scales differ: on a CPU none, on a GPU those whose exact value lies at a tie."""
    moved = scales.view(np.uint8) != expected.view(np.uint8)
    assert ON_GPU or not moved.any()
    exact = np.abs(x.astype(np.float64)).reshape(*scales.shape, 16).max(-1) / 6 / outer
    tie = (scales.astype(np.float64) + expected.astype(np.float64)) / 2
    assert (np.abs(exact[moved] / tie[moved] - 1) < TIE_WIDTH).all()
    return moved


def test_an_outer_scale_that_the_compiler_knows_is_still_a_divisor():
    x = _many_magnitudes((256, 256))
    _, scales = jax.jit(lambda x: nvfp4.encode(x, 0.37))(jnp.asarray(x))
    np.testing.assert_array_equal(
        np.asarray(scales).view(np.uint8), _reference(x, 0.37)[1].view(np.uint8)
    )


@both_ways
@pytest.mark.parametrize("outer", [1.0, 2.0**-20])
def test_elements_next_to_every_tie_of_every_scale_equal_the_plain_encoder(transform, outer):
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    steps = (scales * np.float32(outer))[:, None]
    ties = np.array([*TIES, 0.0], np.float32) * steps
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))
    x = np.concatenate([ties, below, -above, np.repeat(6 * steps, 8, axis=1)], axis=1)
    _assert_same_bytes(x, transform, outer)


def test_encode_under_vmap_equals_encode():
    x = jnp.asarray(_many_magnitudes((8, 32)))
    one, many = encode(x), jax.jit(jax.vmap(nvfp4.encode))(x)
    np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(many[0]))


def test_every_code_times_every_scale_is_exact():
    scales = np.repeat(np.arange(127, dtype=np.uint8), 1)[:, None].view(ml_dtypes.float8_e4m3fn)
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    values = decode(jnp.asarray(packed), jnp.asarray(scales))
    np.testing.assert_array_equal(np.asarray(values), _reference_values(codes, scales))


def test_the_outer_scale_is_one_rounding():
    codes, scales = _reference(_many_magnitudes((64, 64)))
    packed = jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4)
    values = decode(packed, jnp.asarray(scales), 0.37)
    expected = _reference_values(codes, scales) * np.float32(0.37)
    np.testing.assert_array_equal(np.asarray(values), expected)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_group_is_all_zero_bytes(zero):
    """F85."""
    packed, scales = encode(jnp.full((2, 16), zero))
    assert not np.asarray(packed).any() and not np.asarray(scales).view(np.uint8).any()


def test_negative_zero_keeps_its_sign_in_a_non_zero_group():
    packed, _ = encode(jnp.array([6.0, -0.0] + [0.0] * 14))
    assert np.asarray(packed).tolist() == [0x87] + [0] * 7


def test_a_tiny_group_of_a_cache_becomes_zeros():
    """F85."""
    packed, scales = encode(jnp.full(32, 1e-8))
    assert not np.asarray(decode(packed, scales)).any()


def test_a_huge_value_of_a_cache_saturates_and_leaves_other_groups_alone():
    """F85."""
    x = np.full((2, 16), 1.5, np.float32)
    x[0, 3] = -1e30
    values = np.asarray(decode(*encode(jnp.asarray(x.ravel()))))
    assert values[3] == -2688.0
    np.testing.assert_array_equal(values[16:], x[1])


def test_a_nan_poisons_its_group_and_no_other():
    values = decode(*encode(jnp.ones(48).at[20].set(np.nan)))
    assert np.flatnonzero(np.isnan(np.asarray(values))).tolist() == list(range(16, 32))


def test_an_axis_that_is_no_multiple_of_16_is_refused():
    with pytest.raises(ValueError, match="last axis 40 is not a multiple of 16"):
        nvfp4.encode(jnp.zeros((2, 40)))


def test_codes_and_scales_that_do_not_match_are_refused():
    tensor = nvfp4.NVFP4Tensor(jnp.zeros((4, 16), jnp.uint8), jnp.zeros((4, 3)), jnp.ones(()))
    with pytest.raises(ValueError, match="16 bytes of codes need 2 scales, got 3"):
        tensor.dequantize()


def test_a_tensor_tells_the_shape_and_bytes_of_its_values():
    tensor = quantize(_matrices())
    assert tensor.shape == (3, 8, 64)
    assert tensor.nbytes == 3 * 8 * (32 + 4) + 3 * 4


def test_the_outer_scale_of_a_matrix_is_its_amax_over_2688():
    w = _matrices()
    expected = np.abs(np.asarray(w)).max((1, 2)) / np.float32(2688)
    np.testing.assert_array_equal(np.asarray(quantize(w).outer), expected)


def test_quantized_matrices_equal_the_plain_encoder():
    w = _matrices()
    tensor = quantize(w)
    for i in range(3):
        codes, scales = _reference(np.asarray(w[i]), np.asarray(tensor.outer[i]))
        expected = _reference_values(codes, scales) * np.asarray(tensor.outer[i])
        np.testing.assert_array_equal(np.asarray(dequantize(tensor)[i]), expected)


def test_an_all_zero_matrix_has_outer_scale_one_and_exact_zeros():
    """F85."""
    tensor = quantize(jnp.zeros((2, 4, 32)).at[1].set(2.0))
    assert np.asarray(tensor.outer).tolist() == [1.0, np.float32(2) / np.float32(2688)]
    assert not np.asarray(dequantize(tensor)[0]).any()


def test_a_huge_group_of_a_weight_erases_its_matrix_but_nothing_explodes():
    values = np.asarray(dequantize(quantize(jnp.ones((2, 16)).at[0, 0].set(1e30))))
    np.testing.assert_allclose(values[0, 0], 1e30, rtol=1e-6)
    assert not values[1].any()


@pytest.mark.parametrize("amax", [1e-8, 1e-30, 1e-37, 1e37])
def test_a_weight_of_any_magnitude_stays_within_its_bound(amax):
    w = np.random.default_rng(2).uniform(-1, 1, (4, 32)) * amax
    error = np.abs(np.asarray(dequantize(quantize(jnp.asarray(w, jnp.float32)))) - w).max()
    lost = 6 * 2.0**-10 * max(2.0**-100, amax / 2688)
    assert error <= max(amax / 3, lost)


def test_a_group_just_above_the_zero_bound_loses_at_most_a_third():
    faint = np.float32(2688) * 2.0**-9 / 448 * np.linspace(0.51, 3, 50, dtype=np.float32)
    w = np.zeros((51, 16), np.float32)
    w[0], w[1:] = 2688, faint[:, None]
    error = np.abs(np.asarray(dequantize(quantize(jnp.asarray(w)))) - w)[1:, 0]
    assert (error <= faint / 3).all()


def _saved(global_scale):
    w = quantize(_matrices())
    return w.codes, w.scales, jnp.asarray(global_scale, jnp.float32)


def test_both_conventions_of_the_same_power_of_two_are_equal():
    divided = nvfp4.from_encode_scale(*_saved([4.0, 0.5, 4096.0]))
    multiplied = nvfp4.from_decode_scale(*_saved([0.25, 2.0, 1 / 4096]))
    np.testing.assert_array_equal(
        np.asarray(dequantize(divided)), np.asarray(dequantize(multiplied))
    )


def test_both_conventions_of_any_number_are_within_two_roundings():
    scale = np.array([3584.0, 0.3, 2688 / 4.7], np.float32)
    divided = dequantize(nvfp4.from_encode_scale(*_saved(scale)))
    multiplied = dequantize(nvfp4.from_decode_scale(*_saved(1 / scale)))
    np.testing.assert_allclose(np.asarray(divided), np.asarray(multiplied), rtol=2 * 2.0**-23)


def test_an_encode_scale_divides_with_a_single_rounding():
    codes, scales, scale = _saved([3584.0, 0.3, 2688 / 4.7])
    tensor = nvfp4.from_encode_scale(codes, scales, scale)
    expected = np.asarray(decode(codes, scales)) / np.asarray(scale)[:, None, None]
    rtol = 2 * 2.0**-23 if ON_GPU else 0
    np.testing.assert_allclose(np.asarray(dequantize(tensor)), expected, rtol=rtol, atol=0)


def test_an_encode_scale_is_written_back_bit_for_bit():
    scale = np.random.default_rng(3).uniform(1, 4000, 5000).astype(np.float32)
    codes, scales = jnp.zeros((5000, 1, 8), jnp.uint8), jnp.zeros((5000, 1, 1))
    tensor = nvfp4.from_encode_scale(codes, scales, scale)
    np.testing.assert_array_equal(np.asarray(nvfp4.encode_scale(tensor)), scale)
    assert (1 / (1 / scale) != scale).any(), "two reciprocals would have done"


def test_a_quantized_tensor_survives_the_dividing_convention_within_two_roundings():
    tensor = quantize(_matrices())
    again = nvfp4.from_encode_scale(tensor.codes, tensor.scales, nvfp4.encode_scale(tensor))
    np.testing.assert_allclose(
        np.asarray(dequantize(again)), np.asarray(dequantize(tensor)), rtol=2 * 2.0**-23
    )


def test_the_multiplier_has_the_same_meaning_in_both_conventions():
    divided = nvfp4.from_encode_scale(*_saved([4.0, 0.5, 4096.0]))
    multiplied = nvfp4.from_decode_scale(*_saved([0.25, 2.0, 1 / 4096]))
    np.testing.assert_array_equal(np.asarray(divided.multiplier), [0.25, 2.0, 1 / 4096])
    np.testing.assert_array_equal(np.asarray(multiplied.multiplier), [0.25, 2.0, 1 / 4096])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_outer_scale_of_one_matrix_may_have_shape_1_or_none(shape):
    codes, scales, _ = _saved(1.0)
    tensor = nvfp4.from_encode_scale(codes[0], scales[0], np.full(shape, 2.0, np.float32))
    assert tensor.outer.shape == ()


def test_a_wrong_number_of_outer_scales_is_refused():
    with pytest.raises(ValueError, match=r"2 outer scales for matrices of shape \(3,\)"):
        nvfp4.from_decode_scale(*_saved([1.0, 2.0]))


def test_an_outer_scale_of_four_multiplies_one_expert_by_exactly_four():
    codes, scales, _ = _saved(1.0)
    plain = dequantize(nvfp4.from_decode_scale(codes, scales, jnp.ones(3)))
    scaled = dequantize(nvfp4.from_decode_scale(codes, scales, jnp.array([1.0, 4.0, 1.0])))
    expected = np.asarray(plain) * np.array([1, 4, 1], np.float32)[:, None, None]
    np.testing.assert_array_equal(np.asarray(scaled), expected)


def test_gate_and_up_keep_their_own_outer_scales():
    codes, scales, _ = _saved(1.0)
    fused = dequantize(nvfp4.from_encode_scale(codes[:2], scales[:2], jnp.array([1.0, 0.5])))
    for i, scale in enumerate([1.0, 0.5]):
        alone = dequantize(nvfp4.from_encode_scale(codes[i], scales[i], scale))
        np.testing.assert_array_equal(np.asarray(fused[i]), np.asarray(alone))


@pytest.mark.parametrize(
    ("byte", "kind"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0x80, "negative")]
)
def test_a_bad_scale_of_a_file_is_refused_with_its_position(byte, kind):
    scales = np.zeros((4, 5), np.uint8)
    scales[2, 3] = byte
    with pytest.raises(ValueError, match=rf"w1\[2, 3\] is {kind} \(byte {byte:#04x}\)"):
        nvfp4.refuse_nan_scales(scales.view(ml_dtypes.float8_e4m3fn), name="w1")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_bad_outer_scale_of_a_file_is_refused_with_its_position(value):
    with pytest.raises(ValueError, match=r"outer scale \[1\] is .*, not positive finite"):
        nvfp4.refuse_nan_scales(np.zeros((2, 1, 1), np.uint8), np.array([1.0, value]))


def test_good_scales_of_a_file_pass():
    nvfp4.refuse_nan_scales(np.arange(0x7F, dtype=np.uint8), np.float32(3584))
