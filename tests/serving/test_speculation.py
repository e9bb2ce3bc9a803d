"""Which drafts are tested: the best choice where it is promised, ties, and what may not count."""

import random
from itertools import product

import pytest

from serving.scheduling.speculation import best_budget, early_stop_widths, widths_within

RANDOM = random.Random(7)
NUM_CASES = 300


def survivals(num_sequences: int, num_drafts: int, levels: int = 1000) -> list[list[float]]:
    """Random falling survivals; few levels make ties, and some rows are shorter."""
    rows = []
    for _ in range(num_sequences):
        length = RANDOM.randint(0, num_drafts)
        rows.append(sorted(RANDOM.randint(0, levels) / levels for _ in range(length))[::-1])
    return rows


def convex_seconds(most: int):
    """A step whose further drafts never cost less than the ones before."""
    steps = sorted(RANDOM.random() for _ in range(most))
    base = RANDOM.uniform(0.05, 2.0)
    return [base + sum(steps[:k]) for k in range(most + 1)].__getitem__


def any_seconds(most: int):
    """A step of whatever cost."""
    return [RANDOM.uniform(0.5, 2.0) for _ in range(most + 1)].__getitem__


def rate(rows, widths, seconds) -> float:
    tokens = len(rows) + sum(sum(row[:width]) for row, width in zip(rows, widths, strict=True))
    return tokens / seconds(sum(widths))


def best_rate(rows, seconds) -> float:
    """Of all widths there are."""
    return max(
        rate(rows, widths, seconds) for widths in product(*(range(len(row) + 1) for row in rows))
    )


def test_a_budget_and_the_widths_within_it_are_the_best_of_all_widths():
    for case in range(NUM_CASES):
        rows = survivals(1 + case % 3, 3)
        seconds = any_seconds(9)
        budget, promised = best_budget(rows, seconds)
        widths = widths_within(rows, budget)
        assert rate(rows, widths, seconds) == pytest.approx(promised, rel=1e-12)
        assert promised == pytest.approx(best_rate(rows, seconds), rel=1e-12)


def test_an_early_stop_is_the_best_of_all_widths_where_costs_are_convex():
    stopped = 0
    for case in range(NUM_CASES):
        rows = survivals(1 + case % 3, 3)
        seconds = convex_seconds(9)
        widths = early_stop_widths(rows, seconds)
        stopped += 0 < sum(widths) < sum(len(row) for row in rows)
        found = rate(rows, widths, seconds)
        assert found == pytest.approx(best_rate(rows, seconds), rel=1e-12)
    assert stopped > NUM_CASES / 10, "hardly any case stops in the middle"


def test_on_a_staircase_the_early_stop_ends_before_a_step_that_pays_and_the_budget_does_not():
    rows = [[0.9, 0.8, 0.7]]
    staircase = {0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0}.__getitem__
    assert early_stop_widths(rows, staircase) == [0]
    assert best_budget(rows, staircase) == (3, pytest.approx(1.7))


def test_what_is_padded_for_is_tested_for_free():
    rows = [[0.3, 0.2, 0.1], [0.3, 0.1, 0.05]]
    padded = {0: 1.0, 1: 1.1, 2: 1.1, 3: 1.1, 4: 1.1, 5: 2.0, 6: 2.0}.__getitem__
    assert best_budget(rows, padded)[0] == 4
    assert early_stop_widths(rows, padded) == [2, 2]


def test_budget_and_early_stop_agree_while_confidences_do_not_change():
    for case in range(NUM_CASES):
        rows = survivals(1 + case % 5, 7)
        seconds = convex_seconds(35)
        budget, _ = best_budget(rows, seconds)
        assert widths_within(rows, budget) == early_stop_widths(rows, seconds)


def test_no_draft_that_is_likelier_stays_behind_a_tested_one():
    for case in range(NUM_CASES):
        rows = survivals(1 + case % 4, 7, levels=5)
        budget = RANDOM.randint(0, 20)
        widths = widths_within(rows, budget)
        alive = sum(x > 0 for row in rows for x in row)
        assert sum(widths) == min(budget, alive)
        tested = [x for row, width in zip(rows, widths, strict=True) for x in row[:width]]
        others = [x for row, width in zip(rows, widths, strict=True) for x in row[width:]]
        assert min(tested, default=1) >= max(others, default=0)


@pytest.mark.parametrize(
    ("rows", "budget", "widths"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], 1, [1, 0]),  # the earlier sequence
        ([[0.5, 0.5], [0.5, 0.5]], 2, [1, 1]),  # the lower place before the earlier sequence
        ([[0.5, 0.5], [0.5, 0.5]], 3, [2, 1]),
        ([[1.0, 1.0, 1.0], [0.9]], 2, [2, 0]),  # saturated survivals keep their order
        ([[1.0, 0.0], [0.2, 0.0]], 4, [1, 1]),  # what cannot survive is not tested
        ([[], [0.5]], 5, [0, 1]),
        ([[0.5]], 0, [0]),
        ([], 3, []),
    ],
)
def test_ties_go_to_the_lower_place_then_to_the_earlier_sequence(rows, budget, widths):
    assert widths_within(rows, budget) == widths


def test_of_equally_fast_budgets_the_smallest_is_taken():
    proportional = {0: 1.0, 1: 2.0, 2: 3.0}.__getitem__
    assert best_budget([[1.0, 1.0]], proportional) == (0, 1.0)
    assert early_stop_widths([[1.0, 1.0]], proportional) == [0]


def test_a_budget_is_bounded_by_what_is_there_and_by_what_is_allowed():
    rows = [[0.9, 0.8], [0.7]]
    assert best_budget(rows, lambda _: 1.0) == (3, pytest.approx(4.4))
    assert best_budget(rows, lambda _: 1.0, most=2) == (2, pytest.approx(3.7))
    assert best_budget(rows, lambda _: 1.0, most=0) == (0, pytest.approx(2.0))


def test_nothing_runs_and_nothing_is_tested():
    assert best_budget([], lambda _: 0.0) == (0, 0.0)
    assert early_stop_widths([], lambda _: 0.0) == []


@pytest.mark.parametrize("way", ["early stop", "budget"])
def test_whether_a_draft_is_tested_does_not_depend_on_later_ones_of_its_sequence(way):
    changed = 0
    for case in range(NUM_CASES):
        rows = survivals(1 + case % 4, 7, levels=8)
        seconds, budget = any_seconds(28), RANDOM.randint(0, 12)

        def widths_of(rows, seconds=seconds, budget=budget):
            return (
                early_stop_widths(rows, seconds)
                if way == "early stop"
                else widths_within(rows, budget)
            )

        before = widths_of(rows)
        for sequence, row in enumerate(rows):
            for place in range(1, len(row)):  # drafts up to `place` stay as they are
                later = [RANDOM.uniform(0, row[place - 1]) for _ in row[place:]]
                later = sorted(later, reverse=True)
                if RANDOM.random() < 0.3:
                    later[0] = row[place - 1]  # saturated
                other = [*rows[:sequence], row[:place] + later, *rows[sequence + 1 :]]
                after = widths_of(other)[sequence]
                assert min(after, place) == min(before[sequence], place), (rows, other)
                changed += after != before[sequence]
    assert changed > 50, "later drafts hardly change anything, so nothing was tested"


@pytest.mark.parametrize(
    "row", [[1.1], [-0.1], [0.5, 0.6], [float("nan")], [0.9, float("nan"), 0.1]]
)
@pytest.mark.parametrize(
    "choose",
    [
        lambda rows: early_stop_widths(rows, lambda _: 1.0),
        lambda rows: best_budget(rows, lambda _: 1.0),
        lambda rows: widths_within(rows, 1),
    ],
    ids=["early_stop_widths", "best_budget", "widths_within"],
)
def test_survivals_that_are_none_are_refused(choose, row):
    with pytest.raises(ValueError, match="of sequence 1 do not fall between 1 and 0"):
        choose([[0.5], row])


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="a budget of -1 drafts is negative"):
        widths_within([[0.5]], -1)
