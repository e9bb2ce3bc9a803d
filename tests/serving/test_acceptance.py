"""The estimate of acceptance from what became of drafts."""

import random

import pytest

from serving.scheduling.acceptance import AcceptanceEstimator


def test_a_new_estimator_expects_every_draft_to_be_accepted():
    assert AcceptanceEstimator(3).survival == (1.0, 1.0, 1.0)


def test_an_estimate_is_the_share_of_those_that_were_tried():
    estimator = AcceptanceEstimator(3, discount=1 - 1e-9, prior=1e-9)
    # Tried at place 1: 4 times, of which 3 accepted; at 2: 3, of which 1; at 3: 1, of which none.
    estimator.observe([(3, 0), (3, 1), (2, 1)])
    estimator.observe([(3, 2)])
    assert estimator.conditional == pytest.approx((3 / 4, 1 / 3, 0), abs=1e-6)
    assert estimator.survival == pytest.approx((3 / 4, 1 / 4, 0), abs=1e-6)


def test_drafts_that_were_not_tested_say_nothing():
    estimator = AcceptanceEstimator(2, prior=1e-9)
    estimator.observe([(1, 1)] * 10 + [(1, 0)] * 10)  # all that were tested were accepted, or not
    assert estimator.conditional == pytest.approx((0.5, 0.5), abs=1e-6)


def test_estimates_find_the_chances_of_a_sequence_of_coins():
    chances, coin = (0.9, 0.5, 0.8), random.Random(1)
    estimator = AcceptanceEstimator(3, discount=0.999)
    for _ in range(4000):
        accepted = 0
        while accepted < 3 and coin.random() < chances[accepted]:
            accepted += 1
        estimator.observe([(3, accepted)])
    assert estimator.conditional == pytest.approx(chances, abs=0.05)


def test_old_outcomes_fade_so_that_an_estimate_follows_the_text():
    estimator = AcceptanceEstimator(1)
    for outcome, low, high in (((1, 0), 0.0, 0.02), ((1, 1), 0.98, 1.0)):
        for _ in range(500):
            estimator.observe([outcome])
        assert low <= estimator.survival[0] <= high


def test_an_estimator_without_tests_comes_back_to_testing():
    estimator = AcceptanceEstimator(2)
    for _ in range(100):
        estimator.observe([(2, 0)])
    before = estimator.survival
    for _ in range(1000):
        estimator.observe([])
    assert before[0] < 0.02 and min(estimator.survival) > 0.9


def test_a_place_that_was_never_reached_is_taken_to_be_like_the_one_before():
    estimator = AcceptanceEstimator(3)
    for _ in range(300):
        estimator.observe([(1, 1), (1, 0)])
    first, second, third = estimator.conditional
    assert first == pytest.approx(0.5, abs=0.01) and second == third == first


def test_the_order_of_a_steps_outcomes_does_not_matter():
    one, other = AcceptanceEstimator(2), AcceptanceEstimator(2)
    one.observe([(2, 1), (2, 2)])
    other.observe([(2, 2), (2, 1)])
    assert one.survival == other.survival


@pytest.mark.parametrize("outcome", [(1, 2), (3, 1), (0, -1)])
def test_an_impossible_outcome_is_refused_and_nothing_counted(outcome):
    estimator = AcceptanceEstimator(2)
    with pytest.raises(ValueError, match="not 0 <= accepted <= tested <= 2"):
        estimator.observe([(2, 0), outcome])
    assert estimator.survival == (1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_drafts": 0}, "num_drafts=0 is not at least 1"),
        ({"num_drafts": 1, "discount": 1.0}, "discount=1.0 is not between 0 and 1"),
        ({"num_drafts": 1, "prior": 0.0}, "prior=0.0 trials are not positive"),
    ],
)
def test_an_estimator_of_nothing_is_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        AcceptanceEstimator(**arguments)
