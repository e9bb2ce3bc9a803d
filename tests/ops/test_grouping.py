"""Groups of rows for the experts' kernels: each pair is in one place of a group of its expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouping

X = 4


@pytest.mark.parametrize(
    ("tokens", "experts"), [(1, 8), (5, 8), (40, 8), (300, 16), (700, 128), (500, 2)]
)
def test_every_pair_has_a_place_in_a_group_of_its_expert(tokens, experts):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-1, experts + 1, (tokens, X))  # some experts are elsewhere
    made = jax.jit(grouping.make, static_argnums=1)(jnp.asarray(ids), experts)
    flat, place = ids.reshape(-1), np.asarray(made.place)
    is_here = (flat >= 0) & (flat < experts)
    assert np.array_equal(place < len(made.token), is_here)
    tokens_at = np.full(len(made.token), -1)
    tokens_at[place[is_here]] = np.flatnonzero(is_here) // X
    assert np.array_equal(made.token, tokens_at)
    expert_at = {}
    for group in range(int(made.num_groups[0])):
        first, count = 8 * int(made.first[group]), int(made.count[group])
        assert 0 < count <= made.widths[-1]
        expert_at |= dict.fromkeys(range(first, first + count), int(made.expert[group]))
    assert expert_at == dict(zip(place[is_here], flat[is_here], strict=True))
    for expert in range(experts):
        assert (np.diff(place[flat == expert]) > 0).all(), "tokens keep their order"


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [(1, (8,)), (128, (8,)), (512, (24,)), (4096, (128, 136, 152)), (16384, (128, 136, 144))],
)
def test_groups_have_room_for_the_mean_and_its_spread(tokens, widths):
    assert grouping.group_widths(4 * tokens, 128) == widths
