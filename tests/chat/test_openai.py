"""Messages, deltas, calls and usage in OpenAI's shapes, from the parser's events."""

import itertools
import json
import random

import pytest

from minimax_jax.chat import Message, MessageBuilder, MessageToolCall, ReplyParser, Usage
from minimax_jax.chat.events import Content, Reasoning, ToolArguments, ToolCallEnd, ToolCallStart
from minimax_jax.chat.openai import MessageDelta, finish_reason
from tests.chat.chats import LOOK_UP, NS

CALL = f'{NS}<invoke name="look_up">{NS}<word>é "x"{NS}</word>{NS}<page>3{NS}</page>{NS}</invoke>\n'
TEXT = f"why</mm:think>Hi {NS}<tool_call>\n{CALL}{CALL}{NS}</tool_call> bye"


def build(text, cuts=(), prompt="<mm:think>"):
    """The deltas and the message of a text that comes in pieces."""
    parser = ReplyParser(prompt=prompt, tools=[LOOK_UP])
    builder = MessageBuilder("r")
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[i:j] for i, j in itertools.pairwise(ends)]
    deltas = [builder.add(parser.feed(piece)) for piece in pieces]
    return [*deltas, builder.add(parser.finish())], builder.message()


def merged(deltas):
    """Deltas as dicts merged the way that clients do: text appended, calls by index."""
    message = {"role": None, "content": None, "tool_calls": []}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                for call in value:
                    merge_call(message["tool_calls"], call)
            elif name == "role":
                assert message["role"] is None, "the role comes once"
                message["role"] = value
            else:
                message[name] = (message.get(name) or "") + value
    return message if message["tool_calls"] else {k: v for k, v in message.items() if v != []}


def merge_call(calls, delta):
    if delta["index"] == len(calls):
        calls.append({"id": delta["id"], "type": delta["type"], "function": delta["function"]})
    else:
        assert delta.keys() == {"index", "function"}, "id and name come once"
        assert delta["function"].keys() == {"arguments"}
        calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def test_message_has_thought_content_and_calls():
    _, message = build(TEXT)
    arguments = '{"word": "é \\"x\\"", "page": 3}'
    calls = [
        {"id": f"call_r_{n}", "type": "function", "function": {"name": "look_up"}} for n in (0, 1)
    ]
    for call in calls:
        call["function"]["arguments"] = arguments
    assert message.to_dict() == {
        "role": "assistant",
        "content": "Hi  bye",
        "reasoning_content": "why",
        "tool_calls": calls,
    }


@pytest.mark.parametrize("text", [TEXT, "why</mm:think>42", "</mm:think>42", "cut", ""])
def test_deltas_merge_to_the_message_for_any_split(text):
    """F35, F46, F137: one name and one id for each index, however the text came."""
    draw = random.Random(0)
    _, whole = build(text)
    for cuts in [range(len(text)), *([draw.randrange(len(text) + 1) for _ in "123"] for _ in "ab")]:
        deltas, message = build(text, cuts)
        assert message == whole
        dicts = [delta.to_dict() for delta in deltas]
        assert merged(dicts) == whole.to_dict()
        assert json.loads(json.dumps(dicts)) == dicts


def test_absent_fields_are_left_out():
    assert MessageDelta().to_dict() == {}
    assert MessageDelta(content="a").to_dict() == {"content": "a"}
    assert Message(content="a").to_dict() == {"role": "assistant", "content": "a"}
    assert Message().to_dict() == {"role": "assistant", "content": None}
    assert "reasoning_content" in Message(reasoning="").to_dict()
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert Usage(prompt_tokens=3, completion_tokens=4).to_dict() == usage
    cached = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2).to_dict()
    assert cached == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}


def test_events_of_one_piece_make_one_delta():
    builder = MessageBuilder("r")
    delta = builder.add(
        [Reasoning("a"), Reasoning("b"), ToolCallStart(0, "f"), ToolArguments(0, "{"), Content("c")]
    )
    function = {"name": "f", "arguments": "{"}
    assert delta.to_dict() == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "ab",
        "tool_calls": [{"index": 0, "id": "call_r_0", "type": "function", "function": function}],
    }
    more = builder.add([ToolArguments(0, "}"), ToolCallEnd(0)]).to_dict()
    assert more == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert builder.message().tool_calls[0].complete


def test_reason_to_finish_is_the_calls_only_if_they_can_be_run():
    call = MessageToolCall(id="c", name="f", arguments="{}")
    cut = MessageToolCall(id="c", name="f", arguments="{}", complete=False)
    assert finish_reason("stop", Message(tool_calls=(call,))) == "tool_calls"
    assert finish_reason("stop", Message(tool_calls=(cut, call))) == "tool_calls"
    assert finish_reason("stop", Message(tool_calls=(cut,))) == "stop"
    assert finish_reason("length", Message(tool_calls=(call,))) == "length"
    assert finish_reason("stop", Message(content="a")) == finish_reason("stop", None) == "stop"


def test_call_that_is_cut_off_is_not_complete():
    """F47: it is there, with the arguments so far, and marked."""
    _, message = build(TEXT[: TEXT.index("3")])
    (call,) = message.tool_calls
    assert not call.complete and "é" in json.loads(call.arguments)["word"]
