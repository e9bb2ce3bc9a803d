"""Tokens on their way to a reader, with their log-probabilities."""

import pytest

from serving.engine.token_run import PromptScores, TokenRun
from tests.serving.fake_engine_device import logprobs_of


def test_the_first_tokens_leave_with_what_belongs_to_them():
    run = TokenRun(2)
    run.add([5, 6, 7], logprobs_of([5, 6, 7], range(3)))
    taken = run.take(2)
    assert (taken.ids, run.ids) == ([5, 6], [7])
    assert (taken.values, run.values) == ([0, -1 / 8], [-2 / 8])
    assert (taken.top_ids, run.top_ids) == ([[5, 6], [6, 7]], [[7, 8]])


def test_tokens_that_were_cut_take_no_log_probabilities():
    run = TokenRun(0)
    run.add([5], logprobs_of([5, 6, 7], range(3)))
    given = run.logprobs()
    assert given is not None and (given.values, given.top_ids) == ([0], [[]])


def test_a_run_without_them_has_none():
    run = TokenRun(None)
    run.add([5], None)
    run.add_run(run.take(1))
    assert (run.ids, run.logprobs()) == ([5], None)


def test_a_chunk_that_is_computed_again_replaces_what_it_gave():
    prompt, scores = list(range(10)), PromptScores(1)
    wrong = logprobs_of([90 + token for token in prompt], range(1, 9))
    scores.add(0, wrong)
    for start, end in ((0, 4), (4, 9)):
        scores.add(start, logprobs_of(prompt, range(start + 1, end + 1)))
    assert scores.count == 9
    assert list(scores.of(prompt).top_ids) == [[], *([p] for p in range(1, 10))]
    assert list(scores.of(prompt).values) == [None, *(-p / 8 for p in range(1, 10))]


def test_a_chunk_that_is_missing_is_noticed():
    with pytest.raises(AssertionError, match="left out"):
        PromptScores(1).add(4, logprobs_of(list(range(9)), range(5, 8)))
