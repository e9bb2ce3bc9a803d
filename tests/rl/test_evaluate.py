"""Exact match counts finished, right answers, and its interval is Wilson's."""

import json

import pytest

from minimax_jax.completion import Completion
from rl.__main__ import main
from rl.data import SHORT
from rl.evaluate import Score, held_out, score_answers, total


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        (50, 100, 0.40383, 0.59617),  # by hand: (50 + 1.9207 -+ 1.96 sqrt(25 + 0.9604)) / 103.8415
        (0, 20, 0.0, 0.16113),
        (20, 20, 0.83887, 1.0),
        (1, 10, 0.01788, 0.40415),  # Wilson 1927, table of Newcombe 1998
    ],
)
def test_the_interval_is_wilsons(hits, n, low, high):
    assert Score(hits=hits, total=n).interval == pytest.approx((low, high), abs=2e-5)


def answered(text, reason="stop"):
    return Completion(text=text, token_ids=(1,), finish_reason=reason, prompt_tokens=1)


def test_an_unfinished_or_wrong_answer_is_no_hit():
    asked = held_out(4, ("sum",))
    answers = [
        answered(asked[0].answer),
        answered(f" {asked[1].answer}\n"),
        answered(asked[2].answer, "length"),
        answered(asked[3].answer + "0"),
    ]
    assert score_answers(asked, answers) == {"sum": Score(hits=2, total=4)}


def test_families_add_up():
    assert total([Score(hits=1, total=4), Score(hits=2, total=2)]) == Score(hits=3, total=6)


def test_held_out_problems_do_not_change_with_their_number():
    assert held_out(5, SHORT)[:3] == held_out(3, SHORT)


@pytest.mark.slow
def test_the_command_says_what_speculation_came_to(capsys):
    main(["eval", "--n", "4", "--speculative", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["all"]["n"] == 4
    assert record["speculation"]["acceptance_length"] > 3
    assert len(record["speculation"]["per_position"]) == 7
    assert record["speculation_by_prompt_tokens"] == {"0+": record["speculation"]}
