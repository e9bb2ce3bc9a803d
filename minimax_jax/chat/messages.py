"""Chat messages as they come from clients: checked, and brought to the form that templates read.

What a client may vary is levelled here (names and places of the past thought, tool arguments as
JSON text, Anthropic's blocks); what it may not is refused in one sentence that names the message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minimax_jax.chat.blocks import expanded
from minimax_jax.chat.call_order import in_call_order
from minimax_jax.chat.dialects import M3
from minimax_jax.chat.plain import plain_data

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
    level_messages(messages)
    return messages


def level_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation as templates read it, or a ValueError that names the first message at fault.

    Plain data; `content` a string or a list of text parts; a past thought, inline too, as
    `reasoning_content`; tool arguments as objects; each tool result a message of its own, in the
    order of the calls.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"a chat must be a list of messages, not a {type(messages).__name__}")
    if not messages:
        raise ValueError("a chat must hold at least one message")
    levelled = []
    for index, message in enumerate(messages):
        for one in expanded(index, _checked(index, message)):
            levelled.append((index, _levelled(index, one)))
    return in_call_order(levelled)


def _checked(index: int, message: Any) -> dict[str, Any]:
    """One message as a plain copy, its parts not looked into yet."""
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ValueError(f"message {index} must be an object with role and content, not a {kind}")
    if "role" not in message:
        raise ValueError(f"message {index} has no role")
    if message["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"message {index} has the unknown role {message['role']!r}: use {known}")
    if message["role"] == "root" and index > 0:
        raise ValueError(f"message {index} has the role root: a root message must be the first")
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise ValueError(f"message {index} ({message['role']}) has no content")
    if not isinstance(content, (str, list, tuple, type(None))):
        kind = type(content).__name__
        raise ValueError(f"message {index} has content of type {kind}: expected text or a list")
    for key in REASONING_KEYS:
        if not isinstance(message.get(key), (str, type(None))):
            raise ValueError(f"message {index} has a {key} that is not a string")
    return plain_data(dict(message), f"message {index}")


def _levelled(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A plain message with its thought and its tool calls in the one form that templates read."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, type(None))):
        raise ValueError(f"message {index} has tool_calls that are not a list")
    if message["role"] != "assistant":
        return message
    message = _with_thought(message)
    if calls:
        message["tool_calls"] = [_levelled_call(index, call) for call in calls]
    return message


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with `reasoning_content` where there was a thought by any name, or
    inline before the content.
    """
    thoughts = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    content = message.get("content") or ""
    if thoughts:
        return {**message, "content": content, "reasoning_content": thoughts[0]}
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    text = text.lstrip()
    if text.startswith(M3.think_end):
        return {**message, "content": text.removeprefix(M3.think_end)}
    if text.startswith(M3.think_start) and M3.think_end in text:
        thought, _, answer = text.removeprefix(M3.think_start).partition(M3.think_end)
        return {**message, "content": answer, "reasoning_content": thought}
    return {**message, "content": content}


def _levelled_call(index: int, call: Any) -> dict[str, Any]:
    """An OpenAI tool call with its `arguments` decoded, since templates walk them as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call of message {index} must name its function, got {call!r}")
    name, arguments = function["name"], function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded_arguments(index, name, arguments)
    if not isinstance(arguments, (dict, type(None))):
        raise ValueError(
            f"message {index}: the arguments of tool call {name} are not a JSON object"
        )
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _decoded_arguments(index: int, name: str, text: str) -> Any:
    try:
        return plain_data(json.loads(text or "{}"), f"message {index}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"message {index}: the arguments of tool call {name} are not JSON: {error}"
        ) from error
