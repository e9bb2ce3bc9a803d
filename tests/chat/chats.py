"""Conversations for tests of rendering, and M3's structure written out in plain Python.

`written_out` is the specification (model 4.2) once more, without a template, for conversations that
begin with at most one root and one system message.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

NS = "]<]minimax[>["
HI = [{"role": "user", "content": "hi"}]
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Wörter <und> & mehr",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "exact": {"type": "boolean", "default": False},
                "page": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
}
ARGUMENTS = {"word": "é <b>", "exact": True, "page": None, "in": {"sets": ["a", 2]}, "none": []}


def call(call_id: str | None = "c1", name: str = "look_up", **arguments: Any) -> dict[str, Any]:
    """A tool call as OpenAI writes it, its arguments as JSON text."""
    function = {"name": name, "arguments": json.dumps(arguments or ARGUMENTS)}
    return {"id": call_id, "type": "function", "function": function}


def matrix() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]]:
    """Messages, tools and options: {root?} x {system?} x {tools?} x {modes} x {tool round trip}."""
    for root, system, tools, mode, trip in itertools.product(
        (0, 1), (0, 1), (0, 1), ("enabled", "disabled", "adaptive", None), (0, 1)
    ):
        asked = {"role": "assistant", "content": "I look.", "reasoning_content": "Look it up."}
        messages = [
            *[{"role": "root", "content": "R"}] * root,
            *[{"role": "system", "content": "S\nT"}] * system,
            {"role": "user", "content": "What is é?"},
            *[{**asked, "tool_calls": [call("c1"), call("c2", word="x")]}] * trip,
            *[{"role": "tool", "tool_call_id": "c1", "content": "a letter"}] * trip,
            *[{"role": "tool", "tool_call_id": "c2", "content": ""}] * trip,
            {"role": "assistant", "content": "A letter."},
            {"role": "user", "content": "Thanks 😀"},
        ]
        yield messages, [LOOK_UP] * tools, {} if mode is None else {"thinking_mode": mode}


def written_out(messages: list[dict[str, Any]], tools: list[Any], mode: str | None) -> str:
    """The prompt of `m3_structure.jinja`."""
    now = {
        "enabled": "Now: think before every answer.",
        "disabled": "Now: answer at once.",
    }.get(mode or "", "Now: think where it helps.")
    said = {message["role"]: message["content"] for message in messages}
    text = (
        f"]~!b[]~b]system\n{said.get('root', 'You are a model of M3 kind.')}\n\n"
        f"<thinking_instructions>\nA thought stands between its tags.\n{now}\n"
        f"</thinking_instructions>[e~[\n]~b]developer\n{said.get('system', 'You help.')}"
    )
    if tools:
        listed = "".join(
            f"<tool>{json.dumps(tool['function'], ensure_ascii=False)}</tool>\n" for tool in tools
        )
        example = written_calls([{"function": {"name": "f", "arguments": '{"key": "value"}'}}])
        text += f"\n\n# Tools\nThese exist:\n<tools>\n{listed}</tools>\n\nA call is written so:\n"
        text += example
    text += "[e~[\n"
    for role, run in itertools.groupby(messages, key=lambda message: message["role"]):
        run = list(run)
        if role == "user":
            text += "".join(f"]~b]user\n{one['content']}[e~[\n" for one in run)
        elif role == "assistant":
            text += "".join(f"]~b]ai\n{written_turn(one)}[e~[\n" for one in run)
        elif role == "tool":
            results = "\n".join(f"<response>{one['content']}</response>" for one in run)
            text += f"]~b]tool\n{results}[e~[\n"
    prefix = {"enabled": "<mm:think>", "disabled": "</mm:think>"}.get(mode or "", "")
    return f"{text}]~b]ai\n{prefix}"


def written_turn(message: dict[str, Any]) -> str:
    """The body of an assistant's turn: thought, closer, content, calls."""
    thought = message.get("reasoning_content")
    opened = "" if thought is None else f"<mm:think>{thought}"
    calls = message.get("tool_calls")
    return f"{opened}</mm:think>{message['content'] or ''}{written_calls(calls) if calls else ''}"


def written_calls(calls: list[dict[str, Any]]) -> str:
    """Calls in M3's syntax."""
    invokes = "".join(
        f'{NS}<invoke name="{one["function"]["name"]}">'
        f"{_elements(json.loads(one['function']['arguments']))}{NS}</invoke>\n"
        for one in calls
    )
    return f"{NS}<tool_call>\n{invokes}{NS}</tool_call>"


def _elements(value: Any) -> str:
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if item is not None}
        return "".join(f"{NS}<{k}>{_elements(v)}{NS}</{k}>" for k, v in kept.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{_elements(item)}{NS}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)
