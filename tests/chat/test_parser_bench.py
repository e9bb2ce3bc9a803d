"""The benchmark's texts are what their names say."""

import pytest

from minimax_jax.chat.bench import cases
from minimax_jax.chat.parser import parse_reply

CALLS = {
    "code as a string argument": 1,
    "a list argument": 1,
    "a hundred calls": 3,
    "a hundred calls of M2": 3,
}


@pytest.mark.parametrize("name", cases())
def test_a_case_has_the_calls_of_its_name(name):
    make, options = cases()[name]
    reply = parse_reply(make(3), **options)
    assert len(reply.tool_calls) == CALLS.get(name, 0)
    assert all(call.complete for call in reply.tool_calls)
    assert (reply.reasoning == make(3)) == (name == "a thought")
