"""Whatever a template writes is read back, in whatever pieces it comes: 10,000 generated replies.

Hypothesis shrinks what fails and prints it, with the seed to run it again.
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minimax_jax.chat.dialects import M2, M3, Dialect
from minimax_jax.chat.events import fold
from minimax_jax.chat.parser import parse_reply
from tests.chat.generated import FRAGMENTS, Conversation, conversations
from tests.chat.replies import cut, events, spelled, tool

pytestmark = pytest.mark.slow
THOROUGH = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# Whole markers beside the pieces of them.
MARKERS = [
    "<mm:think>",
    "</mm:think>",
    *map(spelled, ("~<tool_call>", "~</tool_call>", "~</invoke>")),
]
MARKERS += map(spelled, ('~<invoke name="f">', "~<city>", "~</city>", "~<x>", "~</x>", "~<item>"))
TOOLS = [tool("f", city={"type": "string"}, x={"type": "array"})]


# Where a text is cut, as shares of its length.
CUTS = st.lists(st.integers(0, 99), max_size=4)


def pieces(text: str, shares: list[int]) -> list[str]:
    return cut(text, *(share * len(text) // 100 for share in shares))


@settings(THOROUGH, max_examples=5000)
@given(conversations(M3), CUTS)
def test_replies_in_m3(conversation, shares):
    check(conversation, shares, M3)


@settings(THOROUGH, max_examples=2000)
@given(conversations(M2), CUTS)
def test_replies_in_m2(conversation, shares):
    check(conversation, shares, M2)


def check(conversation: Conversation, shares: list[int], dialect: Dialect) -> None:
    options = {"prompt": conversation.prompt, "tools": conversation.tools, "dialect": dialect}
    reply = parse_reply(conversation.text, **options)
    assert (reply.reasoning, reply.content) == (conversation.reasoning, conversation.content)
    found = [(one.name, json.loads(one.arguments)) for one in reply.tool_calls]
    assert json.dumps(found) == json.dumps(conversation.calls)
    assert all(one.complete for one in reply.tool_calls)
    assert fold(events(pieces(conversation.text, shares), **options)) == reply


@settings(THOROUGH, max_examples=3000)
@given(st.lists(st.sampled_from(FRAGMENTS + MARKERS), max_size=15).map("".join), CUTS)
def test_any_text_is_the_same_in_any_pieces(text, shares):
    reply = parse_reply(text, tools=TOOLS)
    assert fold(events(pieces(text, shares), tools=TOOLS)) == reply
    for one in reply.tool_calls:
        assert isinstance(json.loads(one.arguments), dict)
