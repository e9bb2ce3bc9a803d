"""Histories: counted like the reference's, lengthened by tokens, and absent where nobody asks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.sampling import History, SamplingParams, SamplingState, is_stop, processed, sample

V = 12
PARAMS = [
    SamplingParams(presence_penalty=1.0),
    SamplingParams(bad_words=((1, 2, 3),)),
    SamplingParams(),
]
PROMPTS = [[1, 2, 2], [3], [4, 5]]


def state(params=PARAMS) -> SamplingState:
    return SamplingState.of(params, [len(prompt) for prompt in PROMPTS], V)


def of(outputs) -> History:
    return History.of(state(), PROMPTS, outputs, V)


def assert_equal(one: History, other: History) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_counts_by_hand():
    history = of([[7, 7, 1], [], [0]])
    assert history.counts is not None and history.prompt is not None
    assert history.counts.tolist()[0] == [0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert np.flatnonzero(history.prompt[0]).tolist() == [1, 2]
    assert history.recent is not None
    assert history.recent.tolist() == [[7, 7, 1], [-1, -1, -1], [-1, -1, 0]]


def test_tokens_lengthen_a_history_as_if_it_had_begun_with_them():
    """Ragged: -1 are none. Five tokens at once push out all recent ones."""
    outputs, new = [[7], [8, 9], []], [[1, 1, 0, 4, 5], [3], []]
    padded = jnp.array([row + [-1] * (5 - len(row)) for row in new])
    found = of(outputs).then(padded)
    assert_equal(found, of([a + b for a, b in zip(outputs, new, strict=True)]))


def test_one_token_at_a_time_is_all_at_once():
    tokens, step = np.array([[1, 2, 2, 3], [5, 5, 6, 7], [0, 1, 2, 3]]), of([[], [], []])
    for column in tokens.T:
        step = step.then(jnp.asarray(column)[:, None])
    assert_equal(step, of(tokens.tolist()))


def test_without_options_there_is_no_history_and_no_work():
    plain = SamplingState.of([SamplingParams(temperature=0.7, top_p=0.9)] * 3)
    assert plain.edits is None and plain.penalties is None
    assert not jax.tree.leaves(History.of(plain, PROMPTS, [[]] * 3, V))
    logits = jnp.zeros((3, V))
    assert processed(logits, plain, jnp.arange(3), None) is logits


def test_only_what_is_asked_for_is_kept():
    penalised = SamplingState.of([SamplingParams(frequency_penalty=1.0)] * 3)
    history = History.of(penalised, PROMPTS, [[]] * 3, V)
    assert history.recent is None and history.counts is not None
    edited = SamplingState.of([SamplingParams(logit_bias={1: 1.0})] * 3, [3, 1, 2], V)
    history = History.of(edited, PROMPTS, [[]] * 3, V)
    assert history.counts is None and history.recent is not None


def test_there_are_four_programs_whatever_is_asked_for():
    """Options within the least sizes share a program."""
    asked = [
        SamplingParams(temperature=0.3, top_k=3),
        SamplingParams(logit_bias={t: 1.0 for t in range(10)}, stop_token_ids=(1, 2)),
        SamplingParams(min_tokens=3, stop_token_ids=(4,)),
        SamplingParams(bad_words=((1,), (1, 2, 3, 4)), allowed_token_ids=(1, 2, 3)),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(presence_penalty=1.0, min_tokens=2),
    ]
    shapes = set()
    for one in asked:
        made = SamplingState.of([one] * 3, [3, 1, 2], V)
        leaves, structure = jax.tree.flatten((made, History.of(made, PROMPTS, [[]] * 3, V)))
        shapes.add((structure, *(leaf.shape for leaf in leaves)))
    assert len(shapes) == 4


def test_options_that_need_lengths_are_refused_without_them():
    with pytest.raises(ValueError, match="need to know the lengths of the prompts"):
        SamplingState.of([SamplingParams(min_tokens=3)])


def test_stop_ids_are_each_rows_own():
    made = SamplingState.of([SamplingParams(stop_token_ids=ids) for ids in ((3, 4), (5,), ())])
    assert is_stop(jnp.array([4, 4, 4]), made.stop_ids).tolist() == [True, False, False]
    several = is_stop(jnp.array([[3, -1], [5, 3], [0, 5]]), made.stop_ids)
    assert several.tolist() == [[True, False], [True, False], [False, False]]


def test_a_row_draws_the_same_alone_and_beside_penalised_rows():
    """F114: whatever the neighbours are, at whatever row."""
    rng = np.random.default_rng(0)
    logits, one = rng.normal(size=(1, V)), SamplingParams(seed=42, temperature=0.8)
    alone = [int(sample(jnp.asarray(logits), SamplingState.of([one]), jnp.array([9]))[0])]
    for row in range(3):
        params = [*PARAMS]
        params[row] = one
        made = state(params)
        history = History.of(made, PROMPTS, [[1], [1, 2], [3]], V)
        mixed = rng.normal(size=(3, V))
        mixed[row] = logits[0]
        positions = jnp.array([4, 5, 6]).at[row].set(9)
        done = processed(jnp.asarray(mixed), made, positions, history)
        alone.append(int(sample(done, made, positions)[row]))
    assert len(set(alone)) == 1
