"""Packs are numbered: one number, one pack, whoever makes it."""

import jax
import numpy as np

from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.loaded import ASSETS
from rl.data import TRAIN, dialogue_at
from rl.pack_stream import PackRecipe, encode_example, make_pack, packs

TEXT = ASSETS / "tiny"
RECIPE = PackRecipe(
    folder=str(TEXT),
    split=TRAIN,
    seed=0,
    tiles=160,
    block_size=16,
    max_context=2048,
    list_steps=1,
    long_steps=2,
    long_fraction=0.25,
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


def test_lists_come_first_then_long_packs_and_then_evenly():
    kinds = [RECIPE.kind(number) for number in range(10)]
    short, rare = ["short"] * 3, ["long"]
    assert kinds == ["list", *rare, *rare, *rare, *short, *rare, *short[:2]]


def test_each_kind_of_pack_has_one_shape():
    shapes = {RECIPE.kind(n): make_pack(RECIPE, n).block_table.shape for n in range(6)}
    assert shapes == {"list": (160, 22), "long": (160, 128), "short": (160, 8)}


def test_an_example_is_asked_as_it_is_trained():
    tokenizer, template = Tokenizer.load(TEXT), ChatTemplate.load(TEXT)
    for number in range(20):
        turns = dialogue_at(number, families=("sum", "story", "list", "ledger"))
        example = encode_example(turns, tokenizer, template)
        rest, chat = tokenizer.decode(example.tokens.tolist()), []
        for problem in turns:
            chat.append({"role": "user", "content": problem.question})
            answer = f"{problem.thought}</mm:think>{problem.answer}[e~["
            assert rest.startswith(template.render(chat) + answer, 0)
            chat.append(
                {"role": "assistant", "reasoning": problem.thought, "content": problem.answer}
            )
        assert rest == template.render(chat, add_generation_prompt=False).removesuffix("\n")
        learned = tokenizer.decode(example.tokens[example.learned].tolist())
        assert learned == "".join(f"{p.thought}</mm:think>{p.answer}[e~[" for p in turns)
