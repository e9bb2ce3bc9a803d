"""A template of M3's structure, rendered and encoded, against the structure written out in Python.

The field cases of tokenizer and chat template (F13 to F19) that need no generation.
"""

import json
from pathlib import Path

import pytest

from minimax_jax.chat import Chat, ChatFormat, ChatTemplate, Tokenizer
from tests.chat.chats import HI, LOOK_UP, call, matrix, written_out
from tests.chat.folders import TINY

SPECIAL = {"bos_token": "]~!b[", "eos_token": "[e~["}


@pytest.fixture(scope="module")
def m3():
    source = (Path(__file__).parent / "m3_structure.jinja").read_text("utf-8")
    return ChatFormat(template=ChatTemplate(source, SPECIAL), tokenizer=Tokenizer.load(TINY))


def text_of(m3, messages, tools=(), **options):
    return m3.prompt(Chat(messages=messages, tools=tools, options=options)).text


def ids_of(m3, messages, tools=(), **options):
    return m3.prompt(Chat(messages=messages, tools=tools, options=options)).ids


def test_ids_are_those_of_the_structure_in_every_cell(m3):
    """F13: {root?} x {system?} x {tools?} x {thinking modes} x {tool round trip}."""
    cells = 0
    for messages, tools, options in matrix():
        expected = written_out(messages, tools, options.get("thinking_mode"))
        prompt = m3.prompt(Chat(messages=messages, tools=tools, options=options))
        assert prompt.text == expected
        assert prompt.ids == m3.tokenizer.encode(expected)
        cells += 1
    assert cells == 64


def test_enable_thinking_is_an_alias_that_an_explicit_mode_overrides(m3):
    """F14: true, false, absent, both keys; adaptive is no boolean."""
    enabled, disabled, adaptive = (
        ids_of(m3, HI, thinking_mode=mode) for mode in ("enabled", "disabled", "adaptive")
    )
    assert len({tuple(ids) for ids in (enabled, disabled, adaptive)}) == 3
    assert ids_of(m3, HI, enable_thinking=True) == enabled
    assert ids_of(m3, HI, enable_thinking=False) == disabled
    assert ids_of(m3, HI) == ids_of(m3, HI, enable_thinking=None) == adaptive
    assert ids_of(m3, HI, enable_thinking=True, thinking_mode="disabled") == disabled
    assert ids_of(m3, HI, enable_thinking=False, thinking_mode="adaptive") == adaptive


def test_thought_before_a_tool_call_stays_under_each_of_its_names(m3):
    """F16: `reasoning`, `reasoning_content`, inline and Anthropic's block give the same ids."""
    turn = {"role": "assistant", "tool_calls": [call()]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "a letter"}
    thought = {"type": "thinking", "thinking": "Look.", "signature": "s"}
    text = {"type": "text", "text": "So."}
    forms = [
        {"content": "So.", "reasoning_content": "Look."},
        {"content": "So.", "reasoning": "Look."},
        {"content": "<mm:think>Look.</mm:think>So."},
        {"content": [{"type": "text", "text": "<mm:think>Look.</mm:think>So."}]},
        {"content": [thought, text]},
    ]
    first, *others = (ids_of(m3, [*HI, {**turn, **form}, result]) for form in forms)
    rendered = m3.tokenizer.decode(first)
    assert "]~b]ai\n<mm:think>Look.</mm:think>So.]<]minimax[>[<tool_call>\n" in rendered
    assert all(other == first for other in others)


def test_document_start_is_there_once_whichever_door_was_taken(m3):
    """F19: the chat, its text tokenised, and the text that a trainer renders."""
    start = m3.tokenizer.token_id("]~!b[")
    for messages, tools, options in matrix():
        ids = ids_of(m3, messages, tools, **options)
        text = m3.template.render(messages, tools=tools, **options)
        assert text == text_of(m3, messages, tools, **options)
        assert m3.tokenizer.encode(text) == ids
        assert ids.count(start) == 1 and ids[0] == start


def test_tool_schema_with_unions_and_defaults_is_listed_as_it_came(m3):
    """F52: boolean, default, anyOf with null, no `required`."""
    listed = json.dumps(LOOK_UP["function"], ensure_ascii=False)
    assert f"<tool>{listed}</tool>" in text_of(m3, HI, [LOOK_UP])
    bare = LOOK_UP["function"]
    anthropic = {
        "name": bare["name"],
        "description": bare["description"],
        "input_schema": bare["parameters"],
    }
    assert ids_of(m3, HI, [bare]) == ids_of(m3, HI, [anthropic]) == ids_of(m3, HI, [LOOK_UP])


def test_results_follow_the_order_of_their_calls(m3):
    calls = {"role": "assistant", "tool_calls": [call("c1"), call("c2", word="x")]}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in (1, 2)]
    expected = text_of(m3, [*HI, calls, *results])
    assert "<response>r1</response>\n<response>r2</response>" in expected
    assert text_of(m3, [*HI, calls, *reversed(results)]) == expected


def test_anthropic_tool_turns_render_as_those_of_openai(m3):
    openai = [
        *HI,
        {"role": "assistant", "content": "I look.", "tool_calls": [call("c1", word="x")]},
        {"role": "tool", "tool_call_id": "c1", "content": "a letter"},
        {"role": "user", "content": "And?"},
    ]
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"word": "x"}}
    answer = [{"type": "text", "text": "a "}, {"type": "text", "text": "letter"}]
    anthropic = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": answer},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    assert ids_of(m3, anthropic) == ids_of(m3, openai)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reasoning_effort": "high"}, "does not read reasoning_effort: it reads add_generation"),
        ({"thinking_mod": "enabled"}, "does not read thinking_mod"),
        ({"thinking_mode": "sometimes"}, "must be enabled, disabled or adaptive, got 'sometimes'"),
        ({"reasoning_effort": "huge"}, "reasoning_effort must be one of none, minimal, low"),
        ({"enable_thinking": "yes"}, "enable_thinking must be true or false, got 'yes'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 'thinking must be {"type": mode}'),
    ],
)
def test_option_that_would_change_nothing_is_refused(m3, options, sentence):
    with pytest.raises(ValueError) as refusal:
        text_of(m3, HI, **options)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_no_effort_is_no_thought(m3):
    disabled = ids_of(m3, HI, thinking_mode="disabled")
    assert ids_of(m3, HI, reasoning_effort="none") == disabled
    assert ids_of(m3, HI, reasoning_effort="minimal") == disabled
    assert ids_of(m3, HI, reasoning_effort="high", thinking={"type": "disabled"}) == disabled


def test_template_that_refuses_says_so_in_one_sentence(m3):
    with pytest.raises(ValueError, match="refused the conversation: a system message stands at"):
        text_of(m3, [*HI, {"role": "system", "content": "late"}])
