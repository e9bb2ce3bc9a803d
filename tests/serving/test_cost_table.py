"""Cost tables: what lies between their sizes, their files, and how they are measured."""

import json
from itertools import pairwise

import pytest

from serving.scheduling.cost_table import CostTable, StepCosts, profile, read_costs, write_costs

VERIFY = CostTable(tokens=(1, 8, 16, 64), steps_per_sec=(100.0, 50.0, 25.0, 10.0), padded_up_to=16)
DRAFT = CostTable(tokens=(7, 14), steps_per_sec=(1000.0, 500.0))


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [
        (0, 0.0),
        (1, 0.01),
        (2, 0.02),  # compiled sizes: padded to 8
        (8, 0.02),
        (9, 0.04),
        (16, 0.04),
        (40, 0.07),  # between 16 and 64
        (64, 0.1),
        (112, 0.16),  # beyond
    ],
)
def test_a_step_is_padded_up_to_the_largest_program_and_interpolated_from_there(
    num_tokens, seconds
):
    assert VERIFY.seconds(num_tokens) == pytest.approx(seconds, rel=1e-12)


def test_without_padding_all_is_interpolated_and_nothing_is_below_the_first():
    assert DRAFT.seconds(1) == DRAFT.seconds(7) == pytest.approx(0.001)
    assert DRAFT.seconds(10) == pytest.approx(0.001 + 0.001 * 3 / 7)


def test_a_larger_step_is_never_cheaper_whatever_was_measured():
    noisy = CostTable(tokens=(1, 2, 4, 8, 16), steps_per_sec=(90.0, 100.0, 80.0, 85.0, 40.0))
    times = [noisy.seconds(n) for n in range(1, 40)]
    assert all(a <= b for a, b in pairwise(times))
    assert noisy.seconds(2) == 1 / 90 and noisy.seconds(8) == 1 / 80


def test_costs_are_read_as_they_were_written(tmp_path):
    costs = StepCosts(verify=VERIFY, draft=DRAFT)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs
    assert json.loads((tmp_path / "costs.json").read_text())["draft"]["tokens"] == [7, 14]


GOOD = {"tokens": [1, 2], "steps_per_sec": [2.0, 1.0]}


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"tokens": [1, 2]}, "steps_per_sec is missing"),
        (GOOD | {"unit": "ms"}, "unit is not known here"),
        (GOOD | {"tokens": 3}, "tokens is 3 and no list"),
        (GOOD | {"tokens": [1, 2, 3]}, "3 tokens and 2 steps_per_sec are not as many"),
        ({"tokens": [1], "steps_per_sec": [2.0]}, "tokens=[1] are too few"),
        (GOOD | {"tokens": [0, 2]}, "tokens=[0, 2] are not positive whole numbers"),
        (GOOD | {"tokens": [1.5, 2]}, "tokens=[1.5, 2] are not positive whole numbers"),
        (GOOD | {"tokens": [2, 2]}, "tokens=[2, 2] do not increase strictly"),
        (GOOD | {"steps_per_sec": [1.0, 0.0]}, "steps_per_sec=[1.0, 0.0] are not positive"),
        (GOOD | {"steps_per_sec": [1.0, None]}, "steps_per_sec=[1.0, None] are not positive"),
        (GOOD | {"steps_per_sec": [float("inf"), 1.0]}, "steps_per_sec=[inf, 1.0] are not"),
        (GOOD | {"padded_up_to": 3}, "padded_up_to=3 is none of tokens=[1, 2]"),
        ([1, 2], "list is not an object"),
    ],
)
def test_a_wrong_table_is_refused_with_the_file_the_part_and_the_values(tmp_path, table, complaint):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"verify": GOOD, "draft": table}))
    with pytest.raises(ValueError) as error:
        read_costs(path)
    assert str(error.value).startswith(f"{path}: draft: ") and complaint in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "Expecting"), ("{}", "draft, verify is missing"), ("3", "int is not an object")],
)
def test_a_file_that_holds_no_costs_is_refused(tmp_path, text, complaint):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_costs(path)


def test_a_profile_is_the_median_after_warm_up_with_sizes_taking_turns():
    runs: list[int] = []

    def step(num_tokens: int) -> float:
        runs.append(num_tokens)
        turn = runs.count(num_tokens)
        if turn <= 2:
            return 100.0  # compiling
        return num_tokens * (9.0 if turn == 4 else 1.0)  # one outlier

    table = profile(step, [1, 4, 8], repeats=3, warmups=2, padded_up_to=4)
    assert table == CostTable(tokens=(1, 4, 8), steps_per_sec=(1.0, 0.25, 0.125), padded_up_to=4)
    assert runs == [1, 4, 8] * 5


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_that_takes_no_time_is_no_measurement(seconds):
    with pytest.raises(ValueError, match=f"a step of 1 tokens took {seconds} seconds"):
        profile(lambda _: seconds, [1, 2])


def test_a_profile_needs_a_run():
    with pytest.raises(ValueError, match="repeats=0, warmups=2"):
        profile(lambda _: 1.0, [1, 2], repeats=0)
