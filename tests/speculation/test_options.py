"""Sampling options under speculation: the same tokens as plain decoding, and no trace of drafts
that were rejected.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.sampling import History, SamplingParams, packed_mask
from minimax_jax.speculative.steps import SpeculationOptions
from tests.model.models import tokens
from tests.speculation.runs import Run, proposing

LENGTHS = (1, 15, 16, 17, 30, 45)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
B, T, COUNT = len(PROMPTS), 7, 20
RECTANGLE, PACKED = (SpeculationOptions(rows=rows) for rows in (B * (T + 1), 20))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def run() -> Run:
    """Options that each change what greedy decoding says, which is asked first."""
    greedy = Run.of(PROMPTS, [GREEDY] * B).plain(COUNT).tokens
    said = [column.tolist() for column in greedy.T]
    params = [
        replace(GREEDY, repetition_penalty=1.8),
        replace(GREEDY, frequency_penalty=2.0, presence_penalty=1.0),
        replace(GREEDY, logit_bias={said[2][0]: -100.0, 3: 1.0}),
        replace(GREEDY, bad_words=[said[3][2:4], said[3][4:5]], presence_penalty=0.5),
        replace(GREEDY, min_tokens=6, stop_token_ids=(said[4][1], said[4][3])),
        replace(GREEDY, allowed_token_ids=range(100), frequency_penalty=0.3),
    ]
    return Run.of(PROMPTS, params)


@pytest.fixture(scope="module")
def plain(run) -> np.ndarray:
    return run.plain(COUNT).tokens


def test_the_options_do_something(run, plain):
    greedy = Run.of(PROMPTS, [GREEDY] * B).plain(COUNT).tokens
    assert (plain != greedy).any(axis=0).all()


def test_plain_decoding_holds_to_the_options(run, plain):
    said = [[int(t) for t in column if t >= 0] for column in plain.T]
    assert next(iter(run.params[2].logit_bias)) not in said[2]
    for word in run.params[3].bad_words:
        pairs = zip(*(said[3][k:] for k in range(len(word))), strict=False)
        assert tuple(word) not in set(pairs)
    assert not set(said[4][:6]) & set(run.params[4].stop_token_ids)
    assert max(said[5]) < 100


@pytest.mark.parametrize(
    ("options", "widths"),
    [(RECTANGLE, 7), (PACKED, lambda step: (np.arange(B) + 3 * step) % 8)],
    ids=["rectangle", "packed"],
)
def test_greedy_speculation_with_options_is_greedy_decoding(run, plain, options, widths):
    """F112: with the same raw log-probabilities, whatever the options did."""
    found, logprobs = run.speculative(COUNT, widths, options)
    assert found == [[int(t) for t in column if t >= 0] for column in plain.T]
    wanted = run.plain(COUNT).logprobs
    for row, some in enumerate(logprobs):
        np.testing.assert_allclose(some, wanted[: len(some), row], atol=1e-4)


def right_drafts(plain, right) -> np.ndarray:
    """Drafts that go on as plain decoding does for `right[b]` tokens, and are wrong then."""
    drafts = np.maximum(plain[1 : T + 1].T, 0)
    for row, count in enumerate(right):
        drafts[row, count:] = (drafts[row, count:] + 1) % 400
    return drafts


def test_a_row_sees_the_drafts_before_it_and_rejected_ones_leave_no_trace(run, plain):
    """Right drafts are kept through the options; the history then is that of the committed tokens,
    to the last count.
    """
    right = np.array([7, 3, 0, 5, 2, 6])
    cache, state, first = run.started(COUNT, RECTANGLE)
    state = proposing(state, right_drafts(plain, right))
    cache, state, done = run.step(cache, state, 7, RECTANGLE)
    assert done.accepted.tolist() == right.tolist()
    committed = np.concatenate([first.tokens[None], done.generated.tokens]).T
    outputs = [[int(token) for token in row if token >= 0] for row in committed]
    for row, output in enumerate(outputs):
        assert output == plain[: len(output), row].tolist()
    wanted = History.of(run.sampling, run.prompts, outputs, run.config.vocab_size)
    for found, expected in zip(
        jax.tree.leaves(state.history), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_without_drafts_sampling_with_options_is_plain_sampling():
    """F112, for sampled sequences: the same tokens and raw log-probabilities."""
    params = [
        SamplingParams(temperature=0.5, presence_penalty=1.0, seed=i, logit_bias={5: 3.0})
        for i in range(B)
    ]
    sampled = Run.of(PROMPTS, params)
    tokens_, logprobs = sampled.speculative(8, 0, SpeculationOptions(rows=B))
    wanted = sampled.plain(8)
    assert tokens_ == wanted.tokens.T.tolist()
    np.testing.assert_allclose(np.array(logprobs).T, wanted.logprobs, atol=1e-4)


def test_where_nothing_is_allowed_the_sequence_ends_broken(run):
    """Of one sequence; the mask of the others allows everything."""
    cache, state, _ = run.started(COUNT, RECTANGLE)
    allowed = np.ones((B, T + 1, run.config.vocab_size), bool)
    allowed[1, 0] = False
    bits = jnp.asarray(packed_mask(allowed))
    _, state, done = run.step(cache, state, 7, RECTANGLE, bits)
    assert done.generated.broken[0].tolist() == [row == 1 for row in range(B)]
    assert not state.anchors.running[1]
