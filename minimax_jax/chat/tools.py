"""Tool definitions as clients send them, in OpenAI's form, which templates and parsers read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minimax_jax.chat.plain import plain_data


def read_tools(text: str) -> list[dict[str, Any]]:
    """Tool definitions from JSON text: a list in any form that `tool_definitions` reads."""
    try:
        tools = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the tools are not valid JSON: {error}") from error
    return tool_definitions(tools)


def tool_definitions(tools: Any) -> list[dict[str, Any]]:
    """Plain `{"type": "function", "function": {"name": ..., "parameters": ...}}` of each tool; none
    for None.

    Read are OpenAI's form, a bare function, and Anthropic's with `input_schema`. Schemas are not
    touched. Raises ValueError, in one sentence, for another kind of tool, a missing name or a name
    given twice.
    """
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list, not a {type(tools).__name__}")
    definitions = [_definition(index, tool) for index, tool in enumerate(tools)]
    names = [definition["function"]["name"] for definition in definitions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the tools {twice} are defined more than once")
    return definitions


def _definition(index: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise ValueError(f"tool {index} must be an object, not a {type(tool).__name__}")
    tool = plain_data(dict(tool), f"tool {index}")
    kind = tool.get("type", "function")
    if kind not in ("function", "custom" if "input_schema" in tool else "function"):
        raise ValueError(f"tool {index} is of type {kind!r}: only functions are supported")
    function = tool.get("function")
    if function is None:
        function = {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool {index} does not name its function")
    if "input_schema" in function:
        function["parameters"] = function.pop("input_schema")
    if not isinstance(function.get("parameters"), (dict, type(None))):
        raise ValueError(f"tool {index} ({function['name']}) has parameters that are no object")
    return {"type": "function", "function": function}
