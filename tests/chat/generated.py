"""Generated replies that know what they must parse to: a schema, values of it, and the text that a
template makes of them, written without the parser's help.
"""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from minimax_jax.chat.dialects import M3, Dialect
from tests.chat.replies import ADAPTIVE, DISABLED, ENABLED, NS, spelled

# Pieces of markers, and what else parsers trip over; no two of them join to a whole marker.
FRAGMENTS = [
    *("a", "Paris", "3", "null", "true", "item", "\u00e9", "\u4e2d\u6587", "\U0001f600", "\u00a0"),
    *(" ", "\n", "\t", "    ", '"', "'", "\\", "{", "[", ":", "&lt;", "$text"),
    *("<", ">", "</", "]", "]<", "]<]mini", NS, "<mm:thin", "</mm:think", "<think", "<tool_call"),
    *("</city>", "<item>", "<invoke", "<parameter", "</minimax:tool_call", 'name="f">'),
]
KEYS = ["city", "days", "x", "item", "old text", "a.b", "$ref", "\u540d", "thinking", "invoke", ""]
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
}


def _holds_no_marker(text: str) -> bool:
    tags = text.replace(" ", "").replace("\n", "").replace("\t", "")
    words = ("<mm:think>", "</mm:think>", "<think>", "</think>")
    return f"{NS}<" not in tags and not any(word in text for word in words)


TEXTS = (
    st.lists(st.sampled_from(FRAGMENTS), max_size=4)
    .map("".join)
    .filter(_holds_no_marker)
    # M2 has no namespace: there a bare tag of a call is a marker.
    .filter(lambda text: not any(f"{word} " in text for word in ("<invoke", "<parameter")))
)


@dataclass(frozen=True)
class Argument:
    """A value, the schema that it fits, and how it may be written."""

    schema: dict[str, Any]
    value: Any


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> Argument:
    """Any schema that decides, and a value of it."""
    kind = draw(st.sampled_from(["string", "string", *SCALARS, "nullable", "array", "object"]))
    if kind == "string" or (depth == 0 and kind in ("array", "object", "nullable")):
        return Argument({"type": "string"}, draw(TEXTS))
    if kind in SCALARS:
        return Argument({"type": kind}, draw(SCALARS[kind]))
    if kind == "nullable":
        inner = draw(typed(depth=0))
        union = {"anyOf": [inner.schema, {"type": "null"}]}
        is_null = draw(st.booleans()) or inner.value == "null"
        return Argument(union, None if is_null else inner.value)
    if kind == "array":
        inner = draw(typed(depth=depth - 1))
        size = draw(st.integers(0, 3))
        return Argument({"type": "array", "items": inner.schema}, [inner.value] * size)
    keys = draw(st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    members = {key: draw(typed(depth=depth - 1)) for key in keys}
    properties = {key: member.schema for key, member in members.items()}
    value = {key: member.value for key, member in members.items()}
    return Argument({"type": "object", "properties": properties}, value)


@dataclass(frozen=True)
class Conversation:
    """What the parser is given, and what it must find."""

    prompt: str
    text: str
    tools: list[dict[str, Any]]
    reasoning: str | None
    content: str | None
    calls: list[tuple[str, dict[str, Any]]]


@st.composite
def conversations(draw: st.DrawFn, dialect: Dialect = M3) -> Conversation:
    """A thought or none, then content and blocks of calls in any order."""
    tools, arguments = {}, {}
    for name in ("f", "get_weather")[: draw(st.integers(1, 2))]:
        keys = draw(st.lists(st.sampled_from(KEYS[:-1]), max_size=3, unique=True))
        arguments[name] = {key: draw(typed()) for key in keys}
        properties = {key: argument.schema for key, argument in arguments[name].items()}
        tools[name] = {"name": name, "parameters": {"type": "object", "properties": properties}}
    prompt, opening, reasoning = draw(_thoughts(dialect))
    text, content, calls = opening, "", []
    names = st.lists(st.sampled_from(sorted(tools)), min_size=1, max_size=2)
    for block_names in [*draw(st.lists(names, max_size=2)), []]:
        words = draw(TEXTS)
        called = [(name, {k: a.value for k, a in arguments[name].items()}) for name in block_names]
        text += words + (_block(dialect, called) if called else "")
        content, calls = content + words, calls + called
    return Conversation(prompt, text, list(tools.values()), reasoning, content or None, calls)


@st.composite
def _thoughts(draw: st.DrawFn, dialect: Dialect) -> tuple[str, str, str | None]:
    """The prompt, the beginning of the reply, and the thought."""
    start, end = dialect.think_start, dialect.think_end
    prompt = draw(st.sampled_from([ENABLED, DISABLED, ADAPTIVE]))
    prompt = prompt.replace(M3.think_start, start).replace(M3.think_end, end)
    if prompt.endswith(start):
        thought = draw(TEXTS)
        return prompt, draw(st.sampled_from(["", start])) + thought + end, thought
    if draw(st.booleans()):
        return prompt, draw(st.sampled_from(["", end])), None
    thought = draw(TEXTS)
    return prompt, start + thought + end, thought


def _block(dialect: Dialect, calls: list[tuple[str, dict[str, Any]]]) -> str:
    if not dialect.namespace:
        return (
            f"<minimax:tool_call>\n{''.join(_m2_call(*call) for call in calls)}</minimax:tool_call>"
        )
    text = "".join(
        f'~<invoke name="{name}">{_members(values)}~</invoke>\n' for name, values in calls
    )
    return spelled(f"~<tool_call>\n{text}~</tool_call>")


def _members(values: dict[str, Any]) -> str:
    return "".join(f"~<{key}>{_value(value)}~</{key}>" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return _members(value)
    if isinstance(value, list):
        return "".join(f"~<item>{_value(item)}~</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _m2_call(name: str, values: dict[str, Any]) -> str:
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    inner = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'
