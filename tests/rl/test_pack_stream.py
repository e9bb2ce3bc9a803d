"""Packs are numbered: one number, one pack, whoever makes it."""

import jax
import numpy as np

from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.loaded import ASSETS
from rl.data import TRAIN, problem_at
from rl.pack_stream import PackRecipe, encode_example, make_pack, packs

TEXT = ASSETS / "tiny"
RECIPE = PackRecipe(
    folder=str(TEXT),
    split=TRAIN,
    seed=0,
    tiles=160,
    block_size=16,
    max_context=2048,
    long_fraction=0.25,
    long_steps=2,
)


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_pack_depends_on_its_number_alone():
    from_start = list(packs(RECIPE, 0, 4, workers=0))
    assert_same(list(packs(RECIPE, 2, 4, workers=0)), from_start[2:])
    assert not np.array_equal(from_start[2].tokens, from_start[3].tokens)


def test_workers_change_nothing():
    assert_same(list(packs(RECIPE, 0, 3, workers=1)), list(packs(RECIPE, 0, 3, workers=0)))


def test_long_packs_come_first_and_then_evenly():
    kinds = [RECIPE.is_long(number) for number in range(10)]
    assert kinds == [True, True, False, True, False, False, False, True, False, False]


def test_the_two_kinds_of_pack_have_one_shape_each():
    widths = {make_pack(RECIPE, number).block_table.shape for number in range(6)}
    assert widths == {(160, 128), (160, 8)}


def test_an_example_is_asked_as_it_is_trained():
    tokenizer, template = Tokenizer.load(TEXT), ChatTemplate.load(TEXT)
    for number in range(20):
        problem = problem_at(number, families=("sum", "story", "ledger"))
        example = encode_example(problem, tokenizer, template)
        prompt = tokenizer.decode(example.tokens[: example.prompt_length].tolist())
        answer = tokenizer.decode(example.tokens[example.prompt_length :].tolist())
        assert prompt == template.render([{"role": "user", "content": problem.question}])
        assert answer == f"{problem.thought}</mm:think>{problem.answer}[e~["
