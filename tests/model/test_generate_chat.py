"""generate over chats: messages, tools, deltas, and turns that go on from their own ids."""

from dataclasses import replace

import pytest

from minimax_jax import generate
from minimax_jax.chat import Chat, TurnMemory
from minimax_jax.generate import read_prompt
from minimax_jax.loaded import LoadedModel
from tests.chat.chats import HI, LOOK_UP, NS
from tests.model.models import random_loaded, small

OPTIONS = {"max_tokens": 40, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_loaded(small(2, num_tokens=501))


def without_time(completion):
    return replace(completion, seconds=0.0)


def test_streamed_chats_join_to_their_messages(loaded):
    chats = [HI, [{"role": "system", "content": "S"}, *HI]]
    options = {**OPTIONS, "tools": [LOOK_UP], "template_options": {"thinking_mode": "adaptive"}}
    whole = generate(loaded, chats, **options)
    deltas = list(generate(loaded, chats, stream=True, **options))
    for index, completion in enumerate(whole):
        mine = [delta for delta in deltas if delta.index == index]
        assert without_time(mine[-1].completion) == without_time(completion)
        message = completion.message
        assert message.content == ("".join(d.message.content or "" for d in mine) or None)
        thoughts = [d.message.reasoning for d in mine if d.message.reasoning is not None]
        assert message.reasoning == ("".join(thoughts) if thoughts else None)
        assert mine[0].message.role == "assistant"
        assert completion.text == (message.content or "")


def test_plain_prompts_have_no_message(loaded):
    delta, *_ = generate(loaded, "12", stream=True, max_tokens=2, temperature=0.0)
    assert delta.message is None and delta.completion.message is None


def test_tools_reach_template_and_parser(loaded):
    (completion,) = generate(loaded, HI, tools=[LOOK_UP], **OPTIONS)
    text = loaded.template.render(HI, tools=[LOOK_UP])
    assert completion.prompt_tokens == len(loaded.tokenizer.encode(text))


def test_marker_that_a_user_spells_is_text_unless_asked_otherwise(loaded):
    chat = [{"role": "user", "content": f"What is {NS}?"}]
    options = {"max_tokens": 1, "temperature": 0.0}
    (safe,) = generate(loaded, chat, **options)
    (unsafe,) = generate(loaded, chat, safe=False, **options)
    text = loaded.template.render(chat)
    assert unsafe.prompt_tokens == len(loaded.tokenizer.encode(text)) < safe.prompt_tokens


def test_next_turn_goes_on_from_the_generated_ids(loaded):
    """F17: the ids of a random model are none that encoding its text would give."""
    turns, chat, so_far = TurnMemory(), list(HI), []
    for turn in range(3):
        asked = read_prompt(loaded, chat, Chat(messages=()), turns).ids
        assert asked[: len(so_far)] == so_far
        (completion,) = generate(loaded, chat, **{**OPTIONS, "seed": turn}, turns=turns)
        assert completion.prompt_tokens == len(asked)
        so_far = [*asked, *completion.token_ids]
        chat += [completion.message.to_dict(), {"role": "user", "content": "more"}]
    encoded = loaded.tokenizer.encode(loaded.template.render(chat))
    assert len(turns) == 3 and encoded[: len(so_far)] != so_far


def test_answer_cut_by_a_stop_string_is_not_remembered(loaded):
    turns = TurnMemory()
    (whole,) = generate(loaded, HI, **OPTIONS)
    stop = loaded.tokenizer.decode(whole.token_ids[:9]).strip()[-1]
    (cut,) = generate(loaded, HI, **OPTIONS, stop=stop, turns=turns)
    assert cut.stop == stop and len(turns) == 0
    generate(loaded, HI, **OPTIONS, turns=turns)
    assert len(turns) == 1
