"""The law of sampling: cuts, ties, seeds, and the distribution drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.sampling import SamplingParams, SamplingState, probabilities, sample


def rows(logits, **params) -> tuple[jax.Array, SamplingState]:
    """One row of logits with these settings."""
    return jnp.asarray([logits], jnp.float32), SamplingState.of([SamplingParams(**params)])


def kept(logits, **params) -> list[int]:
    return np.flatnonzero(np.asarray(probabilities(*rows(logits, **params)))[0]).tolist()


def draws(logits, count: int, **params) -> np.ndarray:
    """Tokens of `count` positions of one sequence."""
    state = SamplingState.of([SamplingParams(**params)] * count)
    batch = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    return np.asarray(jax.jit(sample)(batch, state, jnp.arange(count)))


LAW = np.log([0.9, 0.09, 0.01])


def test_min_p_keeps_what_is_likely_enough_beside_the_best():
    assert kept(LAW, min_p=0.2) == [0]
    assert kept(LAW, min_p=0.09) == [0, 1]


def test_top_k_keeps_the_k_best():
    assert kept(np.log([0.1, 0.2, 0.3, 0.4]), top_k=2) == [2, 3]


def test_top_p_keeps_the_fewest_that_reach_the_mass():
    assert kept(np.log([0.1, 0.2, 0.3, 0.4]), top_p=0.5) == [2, 3]
    assert kept(np.log([0.1, 0.2, 0.3, 0.4]), top_p=0.39) == [3]


def test_top_p_counts_the_mass_that_top_k_left():
    assert kept(np.log([0.1, 0.2, 0.3, 0.4]), top_k=2, top_p=0.55) == [3]


def test_equal_logits_are_cut_from_the_higher_id():
    assert kept([0.0, 0.0, 0.0, 0.0], top_k=2) == [0, 1]


def test_switched_off_cuts_leave_the_softmax():
    probs = probabilities(*rows(LAW, temperature=0.5))
    expected = np.exp(2 * LAW) / np.exp(2 * LAW).sum()
    np.testing.assert_allclose(probs[0], expected, rtol=1e-6)


def test_greedy_takes_the_lower_id_of_equals():
    logits, state = rows([1.0, 3.0, 3.0], temperature=0.0)
    assert int(sample(logits, state, jnp.array([5]))[0]) == 1


def test_greedy_ignores_the_seed():
    assert set(draws(LAW, 50, temperature=0.0, seed=3)) == {0}


def test_draws_follow_the_law():
    expected = np.array([0.5, 0.25, 0.15, 0.1])
    count = 20_000
    observed = np.bincount(draws(np.log(expected), count, seed=7), minlength=4)
    chi_square = ((observed - count * expected) ** 2 / (count * expected)).sum()
    assert chi_square < 16.27  # p = 0.001 at 3 degrees of freedom


def test_draws_never_leave_the_support():
    """F118."""
    logits = np.full(384, -np.inf)
    logits[:300] = 0.0
    assert draws(logits, 10_000, seed=1).max() < 300


def test_a_certain_token_is_always_drawn():
    """F118."""
    logits = np.full(64, -np.inf)
    logits[63] = 2.0
    assert set(draws(logits, 1000, seed=2)) == {63}


def test_a_row_draws_the_same_alone_and_beside_others():
    logits = jax.random.normal(jax.random.key(0), (3, 64))
    params = [SamplingParams(seed=s) for s in (5, 6, 42)]
    together = sample(logits, SamplingState.of(params), jnp.array([9, 10, 11]))
    alone = sample(logits[2:], SamplingState.of(params[2:]), jnp.array([11]))
    assert int(together[2]) == int(alone[0])


def test_seeds_differ_and_repeat():
    flat = np.zeros(512)
    first = [tuple(draws(flat, 8, seed=seed)) for seed in range(20)]
    again = [tuple(draws(flat, 8, seed=seed)) for seed in range(20)]
    assert first == again and len(set(first)) == 20


def test_seeds_beyond_32_bits_are_distinct():
    flat = np.zeros(512)
    assert tuple(draws(flat, 8, seed=1)) != tuple(draws(flat, 8, seed=2**32 + 1))


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_sentence(params, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**params)


def test_the_smallest_temperature_and_top_p_still_draw_the_best():
    assert set(draws(LAW, 20, temperature=2e-38, seed=1)) == {0}
    assert set(draws(LAW, 20, top_p=1e-50, seed=1)) == {0}
