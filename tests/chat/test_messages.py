"""What clients send, levelled: blocks, thoughts, arguments, results in order; and refusals."""

import pytest

from minimax_jax.chat import read_messages
from minimax_jax.chat.messages import level_messages
from minimax_jax.chat.tools import tool_definitions
from tests.chat.chats import HI, LOOK_UP, call

RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}


def assistant(**fields):
    return {"role": "assistant", **fields}


def levelled(*messages):
    return level_messages([*HI, *messages])[1:]


def test_arguments_as_json_text_are_decoded_in_their_order():
    (message,) = levelled(assistant(tool_calls=[call(b=1, a={"x": [True, None]})]))
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"b": 1, "a": {"x": [True, None]}} and list(arguments) == ["b", "a"]
    for empty in ("", "{}", None, {}):
        bare = {"name": "f", "arguments": empty}
        (message,) = levelled(assistant(tool_calls=[{"function": bare}]))
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("content", "reasoning", "said"),
    [
        ("<mm:think>R</mm:think>c", "R", "c"),
        ("\n<mm:think></mm:think> c", "", " c"),
        ("</mm:think>c", None, "c"),
        # No thought: unclosed, or not at the beginning.
        ("<mm:think> is a tag", None, "<mm:think> is a tag"),
        ("x<mm:think>R</mm:think>c", None, "x<mm:think>R</mm:think>c"),
        (None, None, ""),
        ("", None, ""),
    ],
)
def test_inline_thought_is_taken_apart(content, reasoning, said):
    (message,) = levelled(assistant(content=content))
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, said)


def test_thought_of_its_own_leaves_the_content_alone():
    (message,) = levelled(assistant(content="<mm:think>R</mm:think>c", reasoning="S"))
    assert message["reasoning_content"] == "S"
    assert message["content"] == "<mm:think>R</mm:think>c"


def test_answer_that_is_a_thought_alone_is_a_message():
    (message,) = levelled(assistant(content=None, reasoning="cut"))
    assert (message["reasoning_content"], message["content"]) == ("cut", "")


def test_text_by_the_names_of_other_apis_is_text():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b", "extra": 1}]
    (message,) = levelled({"role": "user", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = levelled(assistant(content=[{"type": "refusal", "refusal": "no"}]))
    assert message["content"] == [{"type": "text", "text": "no"}]


def test_anthropic_blocks_become_messages():
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "T", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "c1"}
    messages = levelled(
        assistant(content=[thought, {"type": "text", "text": "t"}, use]),
        {"role": "user", "content": [result]},
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert messages == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "t"}],
            "reasoning_content": "T",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]


def test_results_without_ids_stay_in_their_order():
    calls = assistant(tool_calls=[call(None), call(None)])
    results = [{"role": "tool", "content": f"r{n}"} for n in range(3)]
    assert levelled(calls, *results)[1:] == results


def test_last_calls_need_no_answer_yet():
    assert len(levelled(assistant(tool_calls=[call()]))) == 1


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (
            [assistant(tool_calls=[call()]), {**RESULT, "tool_call_id": "c9"}],
            "'c9': message 1",
        ),
        ([assistant(tool_calls=[call()]), RESULT, RESULT], "answered twice: .'c1', 'c1'"),
        ([assistant(tool_calls=[call(), call("c2")]), RESULT], r"calls \['c2'\] of message 1 are"),
        ([assistant(tool_calls=[call()]), *HI], r"calls \['c1'\] of message 1 are not answered"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part 'image_url': only text"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "part 'tool_use': only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text part whose text is not text"),
        ([{"role": "user", "content": ["a"]}], "content part 'str': only text"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "tool_use_id is not text: None"),
        (
            [assistant(content=[{"type": "tool_use", "id": "1", "name": "f"}])],
            "input is not",
        ),
        ([assistant(content=[{"type": "redacted_thinking"}])], "part 'redacted_thinking'"),
        ([{"role": "user", "content": "\ud800"}], "message 1 must be plain JSON data: 'utf-8'"),
        ([{"role": "user", "content": "a", "x": float("nan")}], "message 1 must be plain JSON"),
        ([assistant(tool_calls=[{"name": "f", "arguments": '{"a": NaN}'}])], "must be plain JSON"),
        ([{"role": "function", "content": "a"}], "unknown role 'function'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(messages, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        levelled(*messages)
    assert "\n" not in str(refusal.value)


def test_messages_are_not_changed_in_place():
    message = assistant(content="<mm:think>R</mm:think>c", tool_calls=[call()])
    before = repr(message)
    levelled(message)
    assert repr(message) == before


def test_messages_from_json_are_returned_as_they_were_written():
    assert read_messages('[{"role": "user", "content": "hi"}]') == HI
    with pytest.raises(ValueError, match="unknown role"):
        read_messages('[{"role": "x", "content": "hi"}]')


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ({"name": "f"}, "tools must be a list, not a dict"),
        (["f"], "tool 0 must be an object, not a str"),
        ([LOOK_UP, {"type": "function"}], "tool 1 does not name its function"),
        ([{"type": "web_search", "name": "w"}], "tool 0 is of type 'web_search': only functions"),
        ([LOOK_UP, LOOK_UP], r"the tools \['look_up'\] are defined more than once"),
        ([{"name": "f", "parameters": []}], r"tool 0 \(f\) has parameters that are no object"),
        ([{"name": "f", "description": object()}], "tool 0 must be plain JSON data"),
    ],
)
def test_malformed_tools_are_refused_in_one_sentence(tools, sentence):
    with pytest.raises(ValueError, match=sentence):
        tool_definitions(tools)


def test_tools_in_each_form_become_those_of_openai():
    bare = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    expected = [{"type": "function", "function": bare}]
    anthropic = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    for tool in (expected[0], bare, {"type": "function", **bare}, anthropic):
        assert tool_definitions([tool]) == expected
    assert tool_definitions([{**anthropic, "type": "custom"}]) == expected
    assert tool_definitions(None) == tool_definitions(()) == []
