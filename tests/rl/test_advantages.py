"""Advantages against hand numbers, and the groups that teach nothing."""

import numpy as np
import pytest

from rl.advantages import ADVANTAGES, has_spread, leave_one_out, standardised

ALL = np.ones((1, 4), bool)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # mean 0.25, deviations 0.75 and -0.25 (three times), sample deviation 0.5
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_hit_of_four(estimator, expected):
    found = ADVANTAGES[estimator](np.array([[1.0, 0, 0, 0]]), ALL)
    np.testing.assert_allclose(found, [expected], atol=4e-6)


def test_both_conventions_of_the_reward_give_the_same_standardised_advantage():
    hits = np.array([[1.0, 0, 1, 1]])
    np.testing.assert_allclose(standardised(hits, ALL), standardised(2 * hits - 1, ALL), atol=3e-6)


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_equal_rewards_give_zero_whatever_their_rounding(estimator):
    """F155, F156: the deviation of equal rewards may be 1e-17 rather than 0."""
    rewards = np.array([[0.35] * 8, [0.1 + 0.2] * 7 + [0.3]])
    found = ADVANTAGES[estimator](rewards, np.ones((2, 8), bool))
    np.testing.assert_array_equal(found, 0.0)
    assert not has_spread(rewards, np.ones((2, 8), bool)).any()


def test_one_of_eight_is_at_most_root_seven():
    """F155; with the divisor G - 1 it is (G - 1) / root G."""
    found = standardised(np.array([[0.35] * 7 + [0.0]]), np.ones((1, 8), bool))
    np.testing.assert_allclose(found[0, -1], -7 / np.sqrt(8), rtol=1e-4)


def test_statistics_are_of_the_group_and_not_of_the_batch():
    """F156."""
    found = standardised(np.array([[1.0, 1, 1, 1], [0, 1, 0, 1]]), np.ones((2, 4), bool))
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(np.abs(found[1]), np.sqrt(3) / 2, rtol=1e-5)


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_a_sample_without_a_reward_takes_no_part(estimator):
    advantages = ADVANTAGES[estimator]
    valid = np.array([[True, True, True, False]])
    found = advantages(np.array([[1.0, 0, 0, np.nan]]), valid)
    three = advantages(np.array([[1.0, 0, 0]]), np.ones((1, 3), bool))
    np.testing.assert_allclose(found, [[*three[0], 0.0]])


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_a_group_of_one_teaches_nothing(estimator):
    valid = np.array([[True, False]])
    assert not ADVANTAGES[estimator](np.array([[5.0, 1.0]]), valid).any()


def test_leaving_one_out_is_the_reward_less_the_mean_of_the_others():
    rewards = np.array([[3.0, 1, 0, -2]])
    others = [rewards[0, i] - np.delete(rewards[0], i).mean() for i in range(4)]
    np.testing.assert_allclose(leave_one_out(rewards, ALL)[0], others)
