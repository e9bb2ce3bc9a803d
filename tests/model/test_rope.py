"""Angles of partial rotary positions, and the rotation they stand for, against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.presets import m3_1_flash, tiny
from minimax_jax.rope import rope_angles
from pallas_kernels.kv_insert import norm_rope
from tests.numerics import assert_close
from tests.ops.oracles import rotate

FULL = m3_1_flash().attention
SMALL = tiny().attention


def _angles(positions, config):
    return jax.jit(rope_angles, static_argnums=1)(jnp.asarray(positions), config)


def _rotation_alone(x_THd, positions, config):
    """norm_rope of rows whose norm is 1, with weight 0: the rotation is all that is left."""
    cos, sin = _angles(positions, config)
    return np.asarray(norm_rope(jnp.asarray(x_THd), jnp.zeros(x_THd.shape[-1]), cos, sin, 0.0))


def _unit_rows(positions, width):
    x = np.random.default_rng(0).standard_normal((len(positions), 2, width), dtype=np.float32)
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


@pytest.mark.parametrize("config", [FULL, SMALL], ids=["full", "tiny"])
def test_the_first_dimensions_turn_in_pairs_half_the_rotary_width_apart(config):
    positions = np.array([0, 1, 2, 17, 1000])
    x = _unit_rows(positions, config.head_dim)
    expected = np.array(
        [[rotate(row, p, config.rotary_dim, config.rope_theta) for row in rows]
         for rows, p in zip(x, positions, strict=True)]
    )  # fmt: skip
    assert_close(_rotation_alone(x, positions, config), expected, "f32")


@pytest.mark.parametrize("config", [FULL, SMALL], ids=["full", "tiny"])
def test_the_other_dimensions_pass_through(config):
    positions = np.array([3, 50])
    x = _unit_rows(positions, config.head_dim)
    found = _rotation_alone(x, positions, config)
    assert_close(found[..., config.rotary_dim :], x[..., config.rotary_dim :], "f32")


def test_position_zero_changes_nothing():
    x = _unit_rows([0], FULL.head_dim)
    assert_close(_rotation_alone(x, np.array([0]), FULL), x, "f32")


def test_scores_depend_on_the_distance_of_positions_only():
    x = np.repeat(_unit_rows([0], SMALL.head_dim), 4, axis=0)
    found = _rotation_alone(x, np.array([5, 9, 105, 109]), SMALL)
    near, far = ((found[i] * found[i + 1]).sum(-1) for i in (0, 2))
    assert_close(near, far, "f32")


def test_angles_are_float32_of_the_leading_shape():
    cos, sin = _angles(np.zeros((2, 3), np.int32), FULL)
    assert cos.shape == sin.shape == (2, 3, 32) and cos.dtype == sin.dtype == jnp.float32


def test_a_million_positions_on_each_frequency_is_its_float32_neighbour_of_the_exact_one():
    # 2^19 x a float32 frequency is exact, so that only the frequency's own rounding is left
    position = 2**19
    cos, sin = _angles(np.array([position]), FULL)
    exact = FULL.rope_theta ** (-np.arange(32) / 32)
    angles = position * exact.astype(np.float32).astype(np.float64)
    assert np.abs(np.asarray(cos[0]) - np.cos(angles)).max() < 1e-6
    assert np.abs(np.asarray(sin[0]) - np.sin(angles)).max() < 1e-6


def test_no_rotary_dimensions_is_no_rotation():
    config = replace(SMALL, rotary_dim=0)
    x = _unit_rows([4], SMALL.head_dim)
    assert_close(_rotation_alone(x, np.array([4]), config), x, "f32")
