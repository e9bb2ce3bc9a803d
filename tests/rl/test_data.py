"""Generated problems: right answers, honest thoughts, token budgets, disjoint splits."""

import re

import pytest

from minimax_jax.chat import ChatTemplate, Tokenizer
from rl import worked
from rl.data import (
    FAMILIES,
    HELD_OUT,
    LEDGERS,
    NARROW,
    SHORT,
    SPLITS,
    TRAIN,
    Problem,
    dialogue_at,
    exact_match,
    messages,
    problem_at,
    problems,
    prompt_messages,
    split_of,
)
from tests.chat.folders import TINY

SHORT_COUNT, LEDGER_COUNT = 1000, 60
PROMPT_AND_ANSWER_TOKENS, THOUGHT_AND_ANSWER_TOKENS, LONG_TOKENS = 128, 48, 1950


def some_of(family, split=TRAIN):
    count = LEDGER_COUNT if family in LEDGERS else SHORT_COUNT
    return problems(split, count=count, seed=3, families=(family,))


def rendered(template, problem):
    """The prompt, and the generated part up to and with the end of the turn."""
    prompt = template.render(prompt_messages(problem))
    whole = template.render(messages(problem), add_generation_prompt=False)
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix("\n")


@pytest.mark.parametrize(
    ("thought", "expected"),
    [
        (worked.worked_sum(47, 85), "47+85: 7+5=12, 4+8+1=13"),
        (worked.worked_sum(347, 85), "347+85: 7+5=12, 4+8+1=13, 3+1=4"),
        (worked.worked_sum(50, 2), "50+2: 0+2=2, 5"),
        (worked.worked_difference(432, 85), "432-85: 12-5=7, 13-8-1=4, 4-1=3"),
        (worked.worked_difference(105, 98), "105-98: 15-8=7, 10-9-1=0, 1-1=0"),
        (worked.worked_product(7, 8), "8*7=56"),
        (worked.worked_product(5, 47), "47*5: 7*5=35, 4*5+3=23"),
        (worked.worked_product(47, 85), "85*7=595, 85*4=340, 5, 9+0=9, 5+4=9, 3"),
        (worked.worked_product(98, 97), "98*7=686, 98*9=882, 6, 8+2=10, 6+8+1=15, 8+1=9"),
    ],
)
def test_worked_steps_by_hand(thought, expected):
    assert thought == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_a_thought_is_true(family):
    for problem in some_of(family):
        for left, right in re.findall(r"([\d+*-]+)=(\d+)", problem.thought):
            assert eval(left) == int(right), problem


def digits_read_off(problem):
    """The answer as the column steps give it: last digits backwards, the last step whole."""
    steps = problem.thought.split("\n")[-1].split(": ")[-1].split(", ")
    results = [step.split("=")[-1] for step in steps]
    return int(results[-1] + "".join(result[-1] for result in reversed(results[:-1])))


@pytest.mark.parametrize("family", ["sum", "difference"])
def test_answer_is_read_off_the_column_steps(family):
    for problem in some_of(family):
        assert digits_read_off(problem) == int(problem.answer), problem


@pytest.mark.parametrize("family", ["sum", "difference", "product", "chain", *NARROW])
def test_answer_is_what_the_operands_give(family):
    for problem in some_of(family):
        assert eval(problem.key) == int(problem.answer), problem


@pytest.mark.parametrize(
    ("family", "key"),
    [("digit_product", r"[1-9]\*[1-9]\d?"), ("two_products", r"[2-9]\*[2-9][+-][2-9]\*[2-9]")],
)
def test_a_narrow_family_is_one_kind_of_its_family(family, key):
    assert all(re.fullmatch(key, problem.key) for problem in some_of(family))


@pytest.mark.parametrize("family", LEDGERS)
def test_ledger_holds_each_needed_line_once(family):
    for problem in some_of(family):
        lines = problem.question.split("\n")
        needed = [line for line in problem.thought.split("\n") if line.startswith("- ")]
        assert needed and all(lines.count(line) == 1 for line in needed), problem
        owners = [line.split(":")[0] for line in lines if line.startswith("- ")]
        assert len(set(owners)) == len(owners), problem


@pytest.mark.parametrize("family", LEDGERS)
def test_a_dialogue_asks_on_about_one_ledger_and_no_line_twice(family):
    numbers = []
    for index in range(LEDGER_COUNT):
        turns = dialogue_at(index, HELD_OUT, families=(family,))
        numbers.append(len(turns))
        ledger = [line for line in turns[0].question.split("\n") if line[0] in "-#"]
        copied = [line for turn in turns for line in turn.thought.split("\n") if line[0] == "-"]
        assert len(set(copied)) == len(copied) and set(copied) <= set(ledger)
        assert all(turn.question.count("\n") == 0 for turn in turns[1:])
        assert all(split_of(turn.key) == HELD_OUT for turn in turns)
    assert min(numbers) == 1 and max(numbers) > 2


def test_a_short_dialogue_is_a_single_problem():
    assert dialogue_at(5) == [problem_at(5)]


def test_long_question_stands_at_the_end_and_sometimes_at_the_start():
    first = [problem.question.startswith("How") for problem in some_of("ledger")]
    last = [problem.question.endswith("?") for problem in some_of("ledger")]
    assert 0.05 < sum(first) / len(first) < 0.4
    assert all(a != b for a, b in zip(first, last, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_keep_their_token_budget(family):
    template, tokenizer = ChatTemplate.load(TINY), Tokenizer.load(TINY)
    limit = LONG_TOKENS if family in LEDGERS else PROMPT_AND_ANSWER_TOKENS
    for problem in some_of(family):
        prompt, answer = (len(tokenizer.encode(text)) for text in rendered(template, problem))
        assert answer <= THOUGHT_AND_ANSWER_TOKENS, problem
        assert prompt + answer <= limit, problem


def test_prompt_and_answer_encode_apart_as_together():
    template, tokenizer = ChatTemplate.load(TINY), Tokenizer.load(TINY)
    for problem in problems(count=500):
        prompt, answer = rendered(template, problem)
        assert tokenizer.encode(prompt) + tokenizer.encode(answer) == tokenizer.encode(
            prompt + answer
        )


def test_needed_numbers_lie_far_back():
    template, tokenizer = ChatTemplate.load(TINY), Tokenizer.load(TINY)
    lengths = [len(tokenizer.encode(rendered(template, problem)[0])) for problem in some_of("long")]
    assert max(lengths) > 1500 and min(lengths) > 250


@pytest.mark.parametrize("family", FAMILIES)
def test_train_and_held_out_share_no_operands(family):
    keys = {split: {problem.key for problem in some_of(family, split)} for split in SPLITS}
    assert keys[TRAIN] and keys[HELD_OUT]
    assert keys[TRAIN].isdisjoint(keys[HELD_OUT])


def test_split_ignores_the_order_of_a_sum_and_its_wording():
    seen = {}
    for family in ("sum", "story", "ledger"):
        for problem in some_of(family):
            if re.fullmatch(r"\d+\+\d+", problem.key):
                a, b = problem.key.split("+")
                assert int(a) <= int(b)
                seen[problem.key] = seen.get(problem.key, 0) + 1
    assert max(seen.values()) > 1


def test_one_problem_in_ten_is_held_out():
    held_out = sum(split_of(f"{a}+{b}") == HELD_OUT for a in range(100) for b in range(a, 100))
    assert 0.08 < held_out / 5050 < 0.12


def test_split_is_stable_for_ever():
    assert [split_of(f"3+{b}") for b in range(3, 33)].count(HELD_OUT) == 4


def test_any_position_is_reached_directly():
    whole = list(problems(count=40, seed=7, families=SHORT + LEDGERS))
    resumed = list(problems(count=20, start=20, seed=7, families=SHORT + LEDGERS))
    assert whole[20:] == resumed
    assert problem_at(33, seed=7, families=SHORT + LEDGERS) == whole[33]


def test_seed_index_and_split_each_change_the_problem():
    texts = {
        problem_at(index, split, seed=seed).question
        for index in (0, 1)
        for split in SPLITS
        for seed in (0, 1)
    }
    assert len(texts) == 8


def test_families_are_drawn_evenly():
    names = [problem.family for problem in problems(count=2000)]
    assert all(0.15 < names.count(family) / 2000 < 0.25 for family in SHORT)


def test_exact_match_forgives_white_space_only():
    problem = Problem(question="2+3=?", thought="", answer="5", family="sum", key="2+3")
    assert exact_match(problem, " 5\n")
    for wrong in ("", None, "05", "5.", "15", "5 5", "five"):
        assert not exact_match(problem, wrong)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"index": -1}, "at least 0"),
        ({"index": 0, "split": "test"}, "unknown split 'test'"),
        ({"index": 0, "families": ("sums",)}, r"unknown families \['sums'\]"),
        ({"index": 0, "families": ()}, "unknown families"),
    ],
)
def test_impossible_requests_are_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        problem_at(**arguments)
