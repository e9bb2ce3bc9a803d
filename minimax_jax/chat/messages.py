"""Chat messages as they come from clients: checked, and brought to the form that templates read.

What a client may vary is levelled here (names of the past thought, tool arguments as JSON text);
what it may not is refused in one sentence that names the message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("root", "system", "developer", "user", "assistant", "tool")
# A past thought goes by several names among clients; templates read the first one.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Message = Mapping[str, Any]


def read_messages(text: str) -> list[Message]:
    """Messages from JSON text: a list of `{"role": ..., "content": ...}`."""
    try:
        messages = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the chat is not valid JSON: {error}") from error
    return check_messages(messages)


def check_messages(messages: Any) -> list[Message]:
    """The messages as a list, or a ValueError that names the first message at fault."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"a chat must be a list of messages, not a {type(messages).__name__}")
    if not messages:
        raise ValueError("a chat must hold at least one message")
    for index, message in enumerate(messages):
        _check_message(index, message)
    return list(messages)


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ValueError(f"message {index} must be an object with role and content, not a {kind}")
    if "role" not in message:
        raise ValueError(f"message {index} has no role")
    if message["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"message {index} has the unknown role {message['role']!r}: use {known}")
    for key in REASONING_KEYS:
        if not isinstance(message.get(key), (str, type(None))):
            raise ValueError(f"message {index} has a {key} that is not a string")
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple, type(None))):
        raise ValueError(f"message {index} has tool_calls that are not a list")
    has_calls = message["role"] == "assistant" and bool(calls)
    content = message.get("content")
    if content is None and not has_calls:
        raise ValueError(f"message {index} ({message['role']}) has no content")
    _check_content(index, content)


def _check_content(index: int, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise ValueError(f"message {index} has content of type {kind}: expected text or a list")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(f"message {index} has a content part {kind!r}: only text is supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"message {index} has a text part without text")


def normalised(message: Message) -> dict[str, Any]:
    """Plain data with `reasoning_content` under its first name and tool arguments as objects."""
    plain = plain_data(dict(message))
    thoughts = [plain[key] for key in REASONING_KEYS if plain.get(key) is not None]
    if thoughts:
        plain["reasoning_content"] = thoughts[0]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_normalised_call(call) for call in plain["tool_calls"]]
    return plain


def _normalised_call(call: Any) -> dict[str, Any]:
    """An OpenAI tool call with its `arguments` decoded, since templates walk them as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must name its function, got {call!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded_arguments(function["name"], arguments)
    if not isinstance(arguments, (dict, type(None))):
        raise ValueError(f"the arguments of tool call {function['name']} are not a JSON object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _decoded_arguments(name: str, text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the arguments of tool call {name} are not JSON: {error}") from error


def plain_data(value: Any) -> Any:
    """A copy made of plain JSON types, so that a template meets no object with its own methods."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a chat must be plain JSON data: {error}") from error
