"""Packs have one shape whatever they hold, and know of each place what follows and if it counts."""

import numpy as np
import pytest

from minimax_jax.batch import pack as pack_ragged
from rl.packing import Example, PackShape, pack_examples

SHAPE = PackShape(tiles=8, tile_tokens=4, blocks=3)


def example(length: int, prompt_length: int, first: int = 1) -> Example:
    learned = np.arange(length) >= prompt_length
    return Example(np.arange(first, first + length, dtype=np.int32), learned)


def test_a_pack_is_what_the_model_packs_itself():
    examples = [example(5, 2), example(4, 1, 50), example(9, 3, 100)]
    ours = pack_examples([examples], PackShape(tiles=6, tile_tokens=4, blocks=3))
    tokens = np.concatenate([one.tokens for one in examples])
    segments = np.repeat([0, 1, 2], [5, 4, 9])
    theirs, _ = pack_ragged(tokens, segments, 4)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.positions, theirs.positions)
    np.testing.assert_array_equal(ours.block_table, theirs.block_table)


def test_the_loss_counts_thought_answer_and_end_alone():
    pack = pack_examples([[example(7, 3)]], SHAPE)
    counted = pack.targets[pack.weights == 1.0]
    assert counted.tolist() == [4, 5, 6, 7]
    assert pack.tokens[pack.weights == 1.0].tolist() == [3, 4, 5, 6]


def test_the_questions_between_two_answers_do_not_count():
    learned = np.array([False, False, True, False, False, True, True])
    pack = pack_examples([[Example(np.arange(1, 8, dtype=np.int32), learned)]], SHAPE)
    assert pack.targets[pack.weights == 1.0].tolist() == [3, 6, 7]


def test_the_rest_of_a_pack_is_padding():
    pack = pack_examples([[example(5, 2)]], SHAPE)
    assert pack.tokens.shape == (8, 4)
    assert pack.block_table.shape == (8, 3)
    assert (pack.positions[2:] == -1).all()
    assert (pack.block_table[2:] == -1).all()
    assert pack.weights[2:].sum() == 0


def test_a_stream_ends_at_its_first_example_that_does_not_fit():
    long = [example(12, 1), example(12, 1), example(12, 1), example(4, 1, 90)]
    short = [example(4, 1, 70), example(4, 1, 80), example(4, 1, 90)]
    pack = pack_examples([long, short], SHAPE)
    assert pack.tokens[6:].ravel().tolist() == [*range(70, 74), *range(80, 84)]


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (example(13, 2), "an example of 13 tokens needs 4 blocks, more than the 3 of a pack"),
        (example(5, 5), "of an example of 5 tokens none is to be learned"),
        (example(5, 0), "of an example of 5 tokens the first is to be learned"),
    ],
)
def test_an_impossible_example_is_refused(one, sentence):
    with pytest.raises(ValueError, match=sentence):
        pack_examples([[one]], SHAPE)
