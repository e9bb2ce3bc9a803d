"""A reply's text, in whatever pieces it comes, to thought, content and tool calls.

Four machines in a row, each with the little state that it needs: the scanner finds markers, the
tool calls find their blocks, a call writes its arguments, and prose tells thought from content.
Each character is looked at a bounded number of times, so the cost is linear in the text, and the
whole result is the fold of the streamed one by construction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minimax_jax.chat.dialects import M3, Dialect
from minimax_jax.chat.events import Event, Output, Reply, fold
from minimax_jax.chat.markers import Scanner
from minimax_jax.chat.reasoning import Prose, starts_in_thought
from minimax_jax.chat.schema import Schema
from minimax_jax.chat.tool_calls import ToolCalls

Tool = Mapping[str, Any]


class ReplyParser:
    """Parses one reply while it streams."""

    def __init__(self, *, prompt: str = "", tools: Sequence[Tool] = (), dialect: Dialect = M3):
        """`prompt` is the rendered prompt, whose end says whether the reply begins inside a
        thought. `tools` are OpenAI's tool objects, or bare function objects; without any, nothing
        is a call. Raises ValueError for a tool without a name.
        """
        schemas = dict(_named_schema(index, tool) for index, tool in enumerate(tools))
        keys = {name for schema in schemas.values() for name in schema.names()}
        output = Output()
        prose = Prose(output, in_thought=starts_in_thought(prompt, dialect))
        self._scanner = Scanner(dialect, keys)
        self._machine = ToolCalls(prose, schemas, output, nests=bool(dialect.namespace))
        self._output = output
        self._is_finished = False

    def feed(self, text: str) -> list[Event]:
        """The events that `text` makes certain."""
        if self._is_finished:
            raise ValueError(f"the reply is finished, and got more text: {text[:40]!r}")
        for token in self._scanner.push(text):
            self._machine.take(token)
        return self._output.take()

    def finish(self) -> list[Event]:
        """The end of the text: what was held back comes out, and a call that is open ends."""
        if self._is_finished:
            raise ValueError("the reply is finished already")
        self._is_finished = True
        for token in self._scanner.finish():
            self._machine.take(token)
        self._machine.finish()
        return self._output.take()


def parse_reply(
    text: str, *, prompt: str = "", tools: Sequence[Tool] = (), dialect: Dialect = M3
) -> Reply:
    """The whole of a finished reply; arguments and errors as for `ReplyParser`."""
    parser = ReplyParser(prompt=prompt, tools=tools, dialect=dialect)
    return fold([*parser.feed(text), *parser.finish()])


def _named_schema(index: int, tool: Tool) -> tuple[str, Schema]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool {index} must be an object that names its function, got {tool!r}")
    return function["name"], Schema(function.get("parameters"))
