"""Thought and content of a reply, decided from the end of the rendered prompt."""

import sys
from itertools import repeat

import pytest

from minimax_jax.chat import ChatTemplate, ReplyParser
from minimax_jax.chat.dialects import M2, M3
from minimax_jax.chat.events import Content, Reasoning
from minimax_jax.chat.reasoning import starts_in_thought
from tests.chat.folders import TINY
from tests.chat.replies import (
    ADAPTIVE,
    DISABLED,
    ENABLED,
    NS,
    block,
    call,
    events,
    parsed,
    tool,
)

CALL = block(call("f"))


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        # F22: the opening tag may stand in the text, in the prompt, or in both.
        (ADAPTIVE, "<mm:think>a</mm:think>b", "a", "b"),
        (ENABLED, "a</mm:think>b", "a", "b"),
        (ENABLED, "<mm:think>a</mm:think>b", "a", "b"),
        # F26: without markers all is content, unless the prompt opened the thought.
        (ADAPTIVE, "Hello", None, "Hello"),
        (DISABLED, "Hello", None, "Hello"),
        (ENABLED, "cut by max_tokens", "cut by max_tokens", None),
        (ADAPTIVE, "<mm:think>cut", "cut", None),
        # A leading closer says "no thought"; later ones without an opener stay.
        (ADAPTIVE, "</mm:think>Hello", None, "Hello"),
        (ADAPTIVE, "\n</mm:think>Hello", None, "Hello"),
        (DISABLED, "</mm:think>Hello", None, "Hello"),
        (ADAPTIVE, "a</mm:think>b", None, "a</mm:think>b"),
        (ENABLED, "a</mm:think>b</mm:think>c", "a", "b</mm:think>c"),
        # A marker that comes twice in a row counts once.
        (ENABLED, "\n<mm:think><mm:think>a</mm:think>b", "a", "b"),
        (ADAPTIVE, "<mm:think><mm:think>a</mm:think>\n</mm:think>b", "a", "b"),
        (DISABLED, "</mm:think></mm:think>", None, None),
        # A reply has one thought: later openers are content, and openers in a thought are thought.
        (ADAPTIVE, "<mm:think>a</mm:think>b<mm:think>c", "a", "b<mm:think>c"),
        (ENABLED, "a<mm:think>b</mm:think>c", "a<mm:think>b", "c"),
        # Text before the thought is content.
        (ADAPTIVE, "x<mm:think>a</mm:think>b", "a", "xb"),
        (ADAPTIVE, "\n<mm:think>a</mm:think>b", "a", "\nb"),
        # Nothing said is None, nothing thought between two tags is "".
        (ENABLED, "a</mm:think>", "a", None),
        (ENABLED, "</mm:think>b", "", "b"),
        (ADAPTIVE, "<mm:think></mm:think>b", "", "b"),
        (ENABLED, "", "", None),
        (ADAPTIVE, "", None, None),
        # White space is part of the text.
        (ENABLED, " a \n</mm:think>\n b ", " a \n", "\n b "),
        (ENABLED, "\n</mm:think>\n", "\n", "\n"),
        # What could not become a marker any more is text, at once or at the end.
        (ENABLED, "a<mm:thin</mm:think>b<mm:th", "a<mm:thin", "b<mm:th"),
        (ADAPTIVE, "<mm:think</mm:think>", None, "<mm:think</mm:think>"),
        (ENABLED, f"a{NS}</mm:think>b", f"a{NS}", "b"),
    ],
)
def test_split(prompt, text, reasoning, content):
    reply = parsed(text, prompt=prompt)
    assert (reply.reasoning, reply.content) == (reasoning, content)


@pytest.mark.parametrize("prompt", [ADAPTIVE, ENABLED], ids=["F22 in text", "F22 in prompt"])
def test_other_dialects_have_the_same_rules_for_their_own_markers(prompt):
    prompt = prompt.replace("mm:", "")
    text = ("" if prompt.endswith(">") else "<think>") + "a</think>b</mm:think>"
    reply = parsed(text, prompt=prompt, dialect=M2)
    assert (reply.reasoning, reply.content) == ("a", "b</mm:think>")


def test_state_comes_from_the_end_of_the_prompt_alone():
    """F23."""
    template = ChatTemplate.load(TINY)
    system = {"role": "system", "content": "Write <mm:think>thought</mm:think>answer."}
    prompt = template.render([system, {"role": "user", "content": "why?"}])
    reply = parsed("why</mm:think>42", prompt=prompt)
    assert (reply.reasoning, reply.content) == ("why", "42")


def test_open_marker_quoted_by_the_user_starts_no_thought():
    template = ChatTemplate.load(TINY)
    quoted = [{"role": "user", "content": "What is <mm:think>"}]
    prompt = template.render(quoted, thinking_mode="disabled")
    reply = parsed("A tag.", prompt=prompt)
    assert (reply.reasoning, reply.content) == (None, "A tag.")


def test_white_space_after_the_marker_does_not_hide_it():
    assert starts_in_thought(ENABLED + "\n", M3)
    assert starts_in_thought("]~b]ai\n<think>\n", M2)
    assert not starts_in_thought(DISABLED, M3)


def test_half_a_marker_is_never_released():
    """F25: `parsed` tries every cut in two and single characters."""
    reply = parsed("<mm:think>ab</mm:think>cd")
    assert (reply.reasoning, reply.content) == ("ab", "cd")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"plan{CALL}", "plan", None),
        (CALL, "", None),
        # The closer may still come; it belongs to the thought that the call has ended.
        (f"plan{CALL}</mm:think>answer", "plan", "answer"),
        (f"plan{CALL}more</mm:think>answer", "plan", "moreanswer"),
        (f"plan{CALL}more</mm:think>a</mm:think>b", "plan", "morea</mm:think>b"),
        # What is no call is thought like the rest.
        (f"plan{NS}<tool_call> is how</mm:think>a", f"plan{NS}<tool_call> is how", "a"),
    ],
)
def test_a_call_ends_a_thought(text, reasoning, content):
    """F27."""
    reply = parsed(text, prompt=ENABLED, tools=[tool("f")])
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [one.name for one in reply.tool_calls] == ["f"] * (CALL in text)


def test_text_comes_out_as_soon_as_it_cannot_be_a_marker():
    parser = ReplyParser(prompt=ENABLED)
    pieces = ["a", "<mm", ":x", "</mm:think", ">", "\n", "b", "]"]
    assert [parser.feed(piece) for piece in pieces] == [
        [Reasoning("a")],
        [],
        [Reasoning("<mm:x")],
        [],
        [],
        [],  # white space waits, for a second closer would take it along
        [Content("\nb")],
        [],
    ]
    assert parser.finish() == [Content("]")]


def test_a_thought_without_words_is_told_to_those_who_stream():
    assert events(["</mm:think>b"], prompt=ENABLED) == [Reasoning(""), Content("b")]


def calls_made(function) -> int:
    """How many Python functions run, C functions included: work without a clock."""
    count = 0

    def profiler(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profiler)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_work_is_linear_in_the_length_of_a_thought():
    """F30, without a clock: the benchmark has the times."""
    once, twice = (
        calls_made(lambda tokens=tokens: events(repeat("tok<", tokens), prompt=ENABLED))
        for tokens in (1000, 2000)
    )
    assert twice < 2.05 * once
