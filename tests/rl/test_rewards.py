"""What is right, what is not, and what a reward that goes wrong is counted as."""

import math
import threading

import pytest

from rl.grading import Grader
from rl.math_answers import final_answer, same_answer
from rl.questions import Question
from rl.rewards import Answer, Shaping, arithmetic, mathematics
from tests.rl import reward_functions

SHAPING = Shaping(
    plus_minus_one=True,
    format_score=0.0,
    overlong_tokens=0,
    overlong_penalty=1.0,
    max_tokens=100,
)


def question(answer="42"):
    return Question(messages=(), answer=answer, source="set")


def answer(text, *, finished=True, thought="so", num_tokens=10):
    return Answer(text=text, thought=thought, num_tokens=num_tokens, finished=finished)


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [("42", True, 1), (" 42\n", True, 1), ("42", False, 0), ("", True, 0), ("4 2", True, 0)],
)
def test_arithmetic_is_an_exact_match_of_a_finished_answer(text, finished, expected):
    assert arithmetic(question(), answer(text, finished=finished)) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} and so \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7} but \\boxed{12", "7"),  # the last box does not close
        ("Answer: 1\nAnswer: $5$.", "5"),
        ("**Answer:** 12", "12"),
        ("The final answer is: 3", "3"),
        ("Answer: 9 \\boxed{8}", "8"),
        ("\\boxed{10\\text{ cm}}", "10 cm"),
        ("it is 42", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_box_or_the_last_line(text, found):
    assert final_answer(text) == found


@pytest.mark.parametrize(
    ("found", "right", "same"),
    [
        ("33", "033", True),
        ("1,000", "1000", True),
        ("-3", "-3", True),
        ("3", "-3", False),
        ("9" * 60, "9" * 59 + "8", False),
        ("\\frac{1}{2}", "0.5", True),
        ("x=2", "2", True),
        ("1, 2, 3", "2", False),  # a list of guesses is no answer
        ("\u0664\u0662", "42", False),  # digits of another script
        ("}", "2", False),
        ("", "2", False),
    ],
)
def test_same_answers(found, right, same):
    assert same_answer(found, right) is same


def test_a_right_answer_is_right_from_a_thread_that_is_not_the_main_one():
    """F172: limits by signals raise there."""
    found = []

    def grade():
        found.append(mathematics(question("\\frac{1}{2}"), answer("\\boxed{0.5}")))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert found == [1.0]


def test_what_was_cut_off_is_wrong():
    assert mathematics(question(), answer("\\boxed{42}", finished=False)) == 0.0


@pytest.mark.parametrize(("num_tokens", "score"), [(10, 1.0), (80, 1.0), (90, 0.5), (100, 0.0)])
def test_the_overlong_penalty_is_linear_over_the_last_tokens(num_tokens, score):
    shaping = Shaping(**{**vars(SHAPING), "overlong_tokens": 20})
    assert shaping.score(1.0, answer("42", num_tokens=num_tokens)) == pytest.approx(score)


def test_conventions_and_form():
    assert SHAPING.score(0.0, answer("1")) == -1.0
    zero_one = Shaping(**{**vars(SHAPING), "plus_minus_one": False, "format_score": 0.25})
    assert zero_one.score(0.0, answer("1")) == 0.25
    assert zero_one.score(1.0, answer("1", thought=None)) == 1.0
    assert zero_one.score(1.0, answer("1", finished=False)) == 1.0


def graded(reward, texts, workers=0, seconds=30.0):
    with Grader(reward, workers, seconds) as grader:
        return grader.grade([(question(), answer(text)) for text in texts])


def test_a_reward_that_raises_is_counted_and_gives_no_reward():
    found = graded(reward_functions.raises, ["a", "b"])
    assert all(math.isnan(reward) for reward in found.rewards)
    assert found.faults == {"error": 2}
    assert "KeyError: 'gold'" in found.examples["error"]


def test_a_reward_that_is_no_number_is_counted():
    found = graded(reward_functions.no_number, ["nan", "text"])
    assert found.faults == {"error": 2}


def test_a_users_function_is_called_for_each_answer():
    found = graded(reward_functions.length, ["a", "b"])
    assert found.rewards == [10.0, 10.0] and not found.faults


def test_workers_are_killed_at_the_time_limit_and_the_others_go_on():
    found = graded(reward_functions.hangs, ["a", "hang", "b"], workers=1, seconds=3.0)
    assert found.rewards[::2] == [1.0, 1.0] and math.isnan(found.rewards[1])
    assert found.faults == {"timeout": 1}


@pytest.mark.slow
def test_an_expression_that_explodes_ends_at_the_time_limit():
    texts = ["\\boxed{9^{9^{9^9}}}", "\\boxed{42}"]
    found = graded(mathematics, texts, workers=1, seconds=10.0)
    assert found.rewards[1] == 1.0 and found.faults.keys() <= {"timeout"}


@pytest.mark.slow
def test_a_worker_that_dies_is_counted():
    found = graded(reward_functions.dies, ["a"], workers=1)
    assert found.faults == {"error": 1} and "ProcessExpired" in found.examples["error"]
