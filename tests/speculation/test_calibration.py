"""Sequential temperature scaling: what it finds, what it refuses, and its file."""

import json
from dataclasses import replace

import numpy as np
import pytest

from minimax_jax.speculative.calibration import (
    FILE,
    TEMPERATURES,
    Calibration,
    calibration_error,
    fit,
    read_calibration,
    write_calibration,
)

WRONG_BY = np.array([TEMPERATURES[26], TEMPERATURES[20], TEMPERATURES[12]])  # 2.0, 1.0, 0.4


def records(count: int, wrong_by: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `wrong_by` times as sure as they should be, and how many were accepted."""
    rng = np.random.default_rng(seed)
    true_logits = rng.normal(1.0, 1.5, (count, len(wrong_by)))
    kept = rng.random(true_logits.shape) < 1 / (1 + np.exp(-true_logits))
    return true_logits * wrong_by, np.cumprod(kept, axis=1).sum(axis=1)


def test_the_temperatures_that_made_the_logits_wrong_are_found():
    found = fit(*records(60_000, WRONG_BY))
    steps = np.log(np.array(found.temperatures) / WRONG_BY) / np.log(
        TEMPERATURES[1] / TEMPERATURES[0]
    )
    assert np.abs(steps).max() < 2.5, f"{found.temperatures} for {WRONG_BY}"
    assert found.num_steps == 60_000


def test_calibrated_survivals_say_how_often_drafts_are_accepted():
    found = fit(*records(50_000, WRONG_BY))
    assert found.error and found.raw_error
    assert found.raw_error[0] > 0.05 > 0.01 > max(found.error)
    logits, accepted = records(50_000, WRONG_BY, seed=1)  # held out
    survival = np.cumprod(1 / (1 + np.exp(-logits / np.array(found.temperatures))), axis=1)
    for place, column in enumerate(survival.T):
        assert calibration_error(column, accepted > place) < 0.015


def test_places_are_fitted_in_turn_each_with_the_ones_before_it_frozen():
    logits, accepted = records(5_000, WRONG_BY)
    whole = fit(logits, accepted)
    for width in (1, 2):
        part = fit(logits[:, :width], np.minimum(accepted, width))
        assert part.temperatures == whole.temperatures[:width]


def test_of_equally_good_temperatures_the_first_is_taken():
    found = fit(np.zeros((100, 2)), np.repeat([0, 1, 2, 2], 25))  # sigmoid(0) whatever T is
    assert found.temperatures == (TEMPERATURES[0],) * 2


def test_the_calibration_error_by_hand():
    chances = np.array([0.1, 0.15, 0.9, 1.0, 0.5])
    happened = np.array([False, True, True, True, False])
    # Bins of a half: the first holds 0.1 and 0.15, the last of them from 0.5 on.
    wanted = (abs(0.25 - 1) + abs(2.4 - 2)) / 5
    assert calibration_error(chances, happened, bins=2) == pytest.approx(wanted)
    assert calibration_error(np.array([0.0, 1.0]), np.array([False, True])) == 0
    in_the_last = calibration_error(np.array([0.95, 1.0]), np.array([True, False]))
    assert in_the_last == pytest.approx(0.475)


@pytest.mark.parametrize(
    ("logits", "accepted", "complaint"),
    [
        (np.zeros((0, 7)), np.zeros(0, int), "logits (0, 7) and accepted (0,) are not records"),
        (np.full((2, 7), np.nan), np.zeros(2, int), "14 of the logits are not finite"),
        (np.zeros((2, 7)), np.array([3, 8]), "accepted counts 3 to 8 are not 0 to 7"),
        (np.zeros((2, 7)), np.array([-1, 7]), "accepted counts -1 to 7 are not 0 to 7"),
    ],
)
def test_records_that_are_none_are_refused(logits, accepted, complaint):
    with pytest.raises(ValueError) as error:
        fit(logits, accepted)
    assert complaint in str(error.value)


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    found = fit(*records(1000, WRONG_BY))
    write_calibration(tmp_path, found)
    assert read_calibration(tmp_path, 3) == found


def test_a_drafter_without_the_file_is_taken_at_its_word(tmp_path):
    assert read_calibration(tmp_path, 7) == Calibration(temperatures=(1.0,) * 7)


def test_a_calibration_of_another_number_of_drafts_is_refused(tmp_path):
    write_calibration(tmp_path, Calibration.none(5))
    with pytest.raises(ValueError) as error:
        read_calibration(tmp_path, 7)
    assert str(error.value) == f"{tmp_path / FILE}: 5 temperatures are not one for each of 7 drafts"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([1.0], "it is not an object of"),
        ({}, "it is not an object of"),
        ({"temperatures": [1.0, 1.0], "unit": 3}, "it is not an object of"),
        ({"temperatures": 2.0}, "temperatures=2.0 is no list of numbers"),
        ({"temperatures": [1, "2"]}, "temperatures=[1, '2'] is no list of numbers"),
        ({"temperatures": []}, "temperatures=[] are not positive numbers"),
        ({"temperatures": [1, 0]}, "temperatures=[1.0, 0.0] are not positive numbers"),
        ({"temperatures": [1.0, float("nan")]}, "temperatures=[1.0, nan] are not positive numbers"),
        ({"temperatures": [1.0, 1.0], "num_steps": 0.5}, "num_steps=0.5 is no whole number"),
        ({"temperatures": [1.0, 1.0], "num_steps": -1}, "num_steps=-1 is negative"),
        ({"temperatures": [1.0, 1.0], "error": [0.1]}, "error=[0.1] are not 2, one a draft"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_with_its_name(tmp_path, content, complaint):
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        read_calibration(tmp_path, 2)
    assert str(error.value).startswith(f"{tmp_path / FILE}: ") and complaint in str(error.value)


def test_a_calibration_that_was_made_by_hand_has_no_errors_to_show():
    by_hand = replace(Calibration.none(2), temperatures=(1.5, 2.0))
    assert by_hand.error is by_hand.raw_error is None and by_hand.num_steps == 0
