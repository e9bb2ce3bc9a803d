"""Where calls are found, what stays text, and what a broken call becomes.

`parsed` tries every cut in two, single characters and chunks of 2, 3, 7 and 50 (F36).
"""

import json

import pytest

from minimax_jax.chat.dialects import M2
from minimax_jax.chat.events import (
    Content,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    fold,
)
from minimax_jax.chat.parser import parse_reply
from tests.chat.replies import ENABLED, NS, block, call, events, parsed, spelled, tool

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [tool("f", city=STRING, days=INTEGER), tool("g"), tool("edit", old=STRING, new=STRING)]
PARIS = spelled("~<city>Paris~</city>~<days>3~</days>")
F = ToolCall("f", '{"city": "Paris", "days": 3}')
G = ToolCall("g", "{}")


def test_a_call_with_typed_arguments():
    """F32."""
    text = spelled(f"~<tool_call>{call('f', PARIS)}~</tool_call>")
    reply = parsed(text, tools=TOOLS)
    assert reply.tool_calls == (F,) and reply.content is None and reply.reasoning is None


@pytest.mark.parametrize(
    "text",
    [
        '</mm:think>~<tool_call>\n~<invoke name="f">~<city>Paris~</city>~<days>3~</days>~</invoke>'
        "\n~</tool_call>",
        "~<tool_call> ~<invoke name='f'>\n~<city>Paris~</city>\n\t~<days> 3 ~</days>\n~</invoke>"
        "~</tool_call>",
        "~<tool_call>~<invoke  name=f >~<city>Paris~</city>~<days>3~</days>~</invoke>~</tool_call>",
        '~ <tool_call>~\n<invoke name="f">~ <city>Paris~ </city>~<days>3~</days>~</invoke>'
        "~\t</tool_call>",
        '~<tool_call>~<tool_call>~<invoke name="f">~<city>Paris~</city>~<days>3~</days>~</invoke>'
        "~</tool_call>",
    ],
    ids=[
        "as generated",
        "single quotes, layout",
        "bare name",
        "spaced namespace",
        "doubled opener",
    ],
)
def test_spellings_of_one_call(text):
    reply = parsed(spelled(text), tools=TOOLS)
    assert reply.tool_calls == (F,) and reply.content is None


def test_text_around_calls_is_content_in_its_order():
    """F37."""
    reply = parsed(f"Hi {block(call('g'))} bye", tools=TOOLS)
    assert reply.content == "Hi  bye" and reply.tool_calls == (G,)
    reply = parsed(f"a\n\n{block(call('g'))}b{block(call('f', PARIS))}\nc\n", tools=TOOLS)
    assert reply.content == "a\n\nb\nc\n" and reply.tool_calls == (G, F)


def test_a_call_without_arguments_has_an_empty_object():
    """F38: the two characters come in the stream too."""
    assert parsed(block(call("ping")), tools=TOOLS).tool_calls == (ToolCall("ping", "{}"),)
    assert events([block(call("ping"))], tools=TOOLS) == [
        ToolCallStart(0, "ping"),
        ToolArguments(0, "{}"),
        ToolCallEnd(0),
    ]


def test_strings_are_kept_to_the_last_space():
    """F42."""
    old = "    if x:\n        return 1\n\u00a0"
    text = block(call("edit", f"~<old>{old}~</old>~<new>~</new>"))
    [one] = parsed(text, tools=TOOLS).tool_calls
    assert json.loads(one.arguments) == {"old": old, "new": ""}


@pytest.mark.parametrize(
    "value",
    [
        'a</city>b <x> & "q" &lt;',
        "a ]<]minimax[ b ]",
        "<mm:think>x</mm:think>",
        f"the tag {NS}<days>3{NS}</days>",
        f"{NS}{NS}<{NS}</x>",
        f"{NS}<two\nlines>",
    ],
)
def test_a_string_ends_at_its_own_closer_alone(value):
    """F43."""
    [one] = parsed(block(call("f", f"~<city>{value}~</city>")), tools=TOOLS).tool_calls
    assert json.loads(one.arguments) == {"city": value} and one.complete


def test_a_key_with_a_bracket_is_read_if_the_schema_declares_it():
    """F43."""
    odd = tool("f", **{"a>b": INTEGER, "a": INTEGER, "<": STRING, "x" * 400: INTEGER})
    arguments = f"~<a>b>1~</a>b>~<a>2~</a>~<<>c~</<>~<{'x' * 400}>3~</{'x' * 400}>"
    [one] = parsed(block(call("f", arguments)), tools=[odd]).tool_calls
    assert json.loads(one.arguments) == {"a>b": 1, "a": 2, "<": "c", "x" * 400: 3} and one.complete


def test_a_key_that_looks_like_a_closer_closes():
    odd = tool("f", **{"/city": STRING, "city": STRING, 'invoke name="g"': STRING})
    reply = parsed(block(call("f", "~<city>a~</city>"), call("g")), tools=[odd])
    assert [one.complete for one in reply.tool_calls] == [True, True]


def test_a_quoted_key_of_m2_with_a_bracket():
    """F43."""
    odd = tool("f", **{"a>b": INTEGER})
    text = M2_CALL.replace("days", "a>b")
    [one] = parsed(text, tools=[odd], dialect=M2).tool_calls
    assert json.loads(one.arguments)["a>b"] == 3 and one.complete


def test_every_call_of_every_block_counts():
    """F45."""
    two = block(call("f", PARIS), call("g"))
    assert parsed(two, tools=TOOLS).tool_calls == (F, G)
    assert parsed(f"{two}\n{two}", tools=TOOLS).tool_calls == (F, G, F, G)


def test_the_index_counts_the_calls_of_the_reply():
    """F46."""
    edit = call("edit", "~<old>a~</old>")
    stream = events([block(edit, edit)], tools=TOOLS)
    assert [event for event in stream if isinstance(event, ToolCallStart)] == [
        ToolCallStart(0, "edit"),
        ToolCallStart(1, "edit"),
    ]


def test_the_name_comes_once_and_the_arguments_join_to_one_object():
    """F35: deltas merged by index, as the clients of OpenAI do."""
    stream = events(block(call("f", PARIS), call("g")), tools=TOOLS)
    merged: dict[int, list[str]] = {}
    for event in stream:
        if isinstance(event, ToolCallStart):
            assert event.index not in merged
            merged[event.index] = []
        elif isinstance(event, ToolArguments):
            merged[event.index].append(event.text)
    assert [json.loads("".join(texts)) for texts in merged.values()] == [
        {"city": "Paris", "days": 3},
        {},
    ]


def test_strings_stream_as_they_come_and_other_values_when_they_are_certain():
    pieces = ["~<tool_call>", '~<invoke name="f">', "~<city>", "Pa", '"ris', "~</city>"]
    pieces += ["~<days>", "3", "1", "~</days>", "~</invoke>", "~</tool_call>"]
    assert events(map(spelled, pieces), tools=TOOLS) == [
        ToolCallStart(0, "f"),
        ToolArguments(0, '{"city": "'),
        ToolArguments(0, "Pa"),
        ToolArguments(0, '\\"ris'),
        ToolArguments(0, '"'),
        ToolArguments(0, ', "days": 31}'),
        ToolCallEnd(0),
    ]


@pytest.mark.parametrize(
    ("bad", "content"),
    [
        ('~<invoke nam="a">~<x>1~</x>~</invoke>', True),
        ("~<invoke name=>~</invoke>", True),
        ("~<invoke>~<x>1~</x>~</invoke>", True),
        ("nonsense", True),
        ('{"name": "f"}', True),
        ('~<invoke name="f">~<city>Paris', False),
        ('~<invoke name="f">~<city>Paris~</invoke>', False),
        ('~<invoke name="f">~<city>Paris~</town>~</invoke>', False),
        ('~<invoke name="f">~<days>3', False),
        ('~<invoke name="f">~</city>~</invoke>', True),
        ('~<invoke name="f">city: Paris~</invoke>', True),
        ('~<invoke name="f">~<city>a~</city>~<city>b~</city>~</invoke>', True),
        ('~<invoke name="f">', False),
        ('~<invoke name="f">~</tool_call>~<tool_call>', False),
        ('~<invoke name="f">~<city>Paris~<tool_call>', False),
    ],
)
def test_a_malformed_call_takes_no_good_one_along(bad, content):
    """F33: it is text, or a call that is not complete."""
    text = spelled(f"~<tool_call>\n{bad}\n{call('f', PARIS)}\n~</tool_call>{block(call('g'))}")
    reply = parsed(text, tools=TOOLS)
    assert reply.tool_calls[-2:] == (F, G)
    assert not any(one.complete for one in reply.tool_calls[:-2])
    assert all(isinstance(json.loads(one.arguments), dict) for one in reply.tool_calls)
    assert (reply.content is not None) == content


@pytest.mark.parametrize(
    ("inner", "arguments", "content"),
    [
        ("~<city>Paris~</invoke>", {"city": "Paris"}, None),
        ("~<days>3~</invoke>", {"days": 3}, None),
        ("~<city>Paris~</city>~</town>~</invoke>", {"city": "Paris"}, spelled("~</town>")),
        ("so ~<days>3~</days> it is\n~</invoke>", {"days": 3}, "so it is"),
        (
            "~<city>a~</city>~<days>3~</days>~<city>b~</city>~</invoke>",
            {"city": "a", "days": 3},
            spelled("~<city>b~</city>"),
        ),
    ],
)
def test_a_broken_call_keeps_what_was_written(inner, arguments, content):
    text = spelled(f'~<tool_call>~<invoke name="f">{inner}~</tool_call>')
    reply = parsed(text, tools=TOOLS)
    [one] = reply.tool_calls
    assert (json.loads(one.arguments), reply.content) == (arguments, content)
    assert not one.complete


def test_a_stream_may_end_anywhere():
    """F47: a call that was cut is not complete, and every prefix has valid JSON."""
    text = f"Hi{block(call('f', PARIS), call('g'))}"
    done = text.index(spelled("~</invoke>")) + len(spelled("~</invoke>"))
    begun = text.index('"f">') + len('"f">')
    for end in range(len(text) + 1):
        reply = parse_reply(text[:end], tools=TOOLS)
        assert fold(events(text[:end], tools=TOOLS)) == reply
        for one in reply.tool_calls:
            assert isinstance(json.loads(one.arguments), dict)
        complete = [one.name for one in reply.tool_calls if one.complete]
        assert complete == ["f"] * (end >= done) + ["g"] * (end >= len(text) - 26)
        assert len(reply.tool_calls) >= (end >= begun)
        if end >= begun:  # half a namespace could still have become anything
            assert NS.startswith((reply.content or "").removeprefix("Hi").lstrip())


def test_a_cut_call_keeps_what_came_without_the_half_tag():
    text = spelled('~<tool_call>~<invoke name="f">~<city>Par~</ci')
    reply = parsed(text, tools=TOOLS)
    assert reply.tool_calls == (ToolCall("f", '{"city": "Par"}', complete=False),)
    reply = parsed(text[: -len(spelled("~</ci"))] + "[0]", tools=TOOLS)
    assert reply.tool_calls == (ToolCall("f", '{"city": "Par[0]"}', complete=False),)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_calls>[...]</tool_calls>",  # F51
        "<tool_call>f</tool_call>",
        "<minimax:tool_call><invoke name='f'></invoke></minimax:tool_call>",
        "~<tool_call>",
        "~<tool_call>\n~</tool_call>",
        "~<tool_call>\n~<invoke nam",
        "~<tool_call> opens a block and ~</tool_call> closes it.",
        '~<invoke name="f">~</invoke>',
        "~~<tool_call~<tool_call",
        "~<" + "x" * 400 + ">",
        "~</city>~",
    ],
)
def test_what_is_no_call_is_content_unchanged(text):
    """F51 and its kind."""
    reply = parsed(spelled(text), tools=TOOLS)
    assert reply.content == spelled(text) and reply.tool_calls == ()


def test_without_tools_nothing_is_a_call():
    text = block(call("f", PARIS))
    assert parsed(text).content == text


def test_a_function_that_was_not_offered_is_called_all_the_same():
    arguments = "~<a>1~</a>~<b>true~</b>~<c>~<item>x~</item>~</c>"
    [one] = parsed(block(call("other", arguments)), tools=TOOLS).tool_calls
    assert (one.name, json.loads(one.arguments)) == ("other", {"a": "1", "b": True, "c": ["x"]})


def test_arguments_named_like_markers():
    odd = tool("f", tool_call=STRING, invoke={"type": "object", "properties": {"invoke": INTEGER}})
    arguments = "~<tool_call>a~</tool_call>~<invoke>~<invoke>1~</invoke>~</invoke>"
    [one] = parsed(block(call("f", arguments)), tools=[odd]).tool_calls
    assert json.loads(one.arguments) == {"tool_call": "a", "invoke": {"invoke": 1}}
    assert one.complete


def test_a_call_in_the_thought_and_one_after_it():
    text = f"why{block(call('g'))}so</mm:think>then{block(call('f', PARIS))}"
    reply = parsed(text, prompt=ENABLED, tools=TOOLS)
    assert (reply.reasoning, reply.content, reply.tool_calls) == ("why", "sothen", (G, F))


def test_content_between_the_arguments_comes_where_it_stood():
    text = spelled('~<tool_call>~<invoke name="f">so ~<days>3~</days>~</invoke>~</tool_call>')
    assert events([text], tools=TOOLS) == [
        ToolCallStart(0, "f"),
        Content("so"),
        ToolArguments(0, '{"days": 3}'),
        ToolCallEnd(0, complete=False),
    ]


M2_CALL = """<minimax:tool_call>
<invoke name="f">
<parameter name="city">Paris <b>&amp;</b>
 </parameter>
<parameter name="days">3</parameter>
</invoke>
</minimax:tool_call>"""


def test_calls_of_m2():
    reply = parsed(f"<think>\nwhy\n</think>\n\nHi{M2_CALL}", tools=TOOLS, dialect=M2)
    assert (reply.reasoning, reply.content) == ("\nwhy\n", "\n\nHi")
    [one] = reply.tool_calls
    assert json.loads(one.arguments) == {"city": "Paris <b>&amp;</b>\n ", "days": 3}


def test_containers_of_m2_are_json():
    nested = tool("f", filter={"type": "object"}, tags={"type": "array"}, text=STRING)
    text = (
        '<minimax:tool_call><invoke name="f"><parameter name="filter">{"a": [1, null]}</parameter>'
        '<parameter name="tags"> ["x"]\n</parameter><parameter name="text">{"a": 1}</parameter>'
        "</invoke></minimax:tool_call>"
    )
    [one] = parsed(text, tools=[nested], dialect=M2).tool_calls
    assert json.loads(one.arguments) == {
        "filter": {"a": [1, None]},
        "tags": ["x"],
        "text": '{"a": 1}',
    }


def test_a_parameter_of_m2_left_open_ends_where_the_next_begins():
    text = M2_CALL.replace("\n </parameter>", "")
    [one] = parsed(text, tools=TOOLS, dialect=M2).tool_calls
    assert json.loads(one.arguments) == {"city": "Paris <b>&amp;</b>\n", "days": 3}
    assert not one.complete
