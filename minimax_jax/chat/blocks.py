"""Content as a list of parts: text in its several names, and Anthropic's blocks as OpenAI messages.

`thinking` and `tool_use` blocks of an assistant become its `reasoning_content` and `tool_calls`;
each `tool_result` block of a user becomes a message of role `tool`, before what else the user says.
"""

from collections.abc import Iterator
from typing import Any

# Part type -> the field with its text. The second and third are of OpenAI's Responses API.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def expanded(index: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that one message stands for; its content is a string, None or text parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    if message["role"] == "assistant":
        return [_assistant(index, message, content)]
    own = ("tool_result",) if message["role"] == "user" else ()
    results = [_result(index, part) for part in content if _kind(part) in own]
    rest = [_text_part(index, part) for part in content if _kind(part) not in own]
    said = [] if results and not rest else [{**message, "content": rest}]
    return [*results, *said]


def _assistant(index: int, message: dict[str, Any], content: list[Any]) -> dict[str, Any]:
    thoughts = [_field(index, p, "thinking", str) for p in content if _kind(p) == "thinking"]
    calls = [_call(index, part) for part in content if _kind(part) == "tool_use"]
    rest = [part for part in content if _kind(part) not in ("thinking", "tool_use")]
    message = {**message, "content": [_text_part(index, part) for part in rest]}
    if thoughts and message.get("reasoning_content") is None:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [*(message.get("tool_calls") or ()), *calls]
    return message


def _call(index: int, block: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": _field(index, block, "name", str),
        "arguments": _field(index, block, "input", dict),
    }
    return {"id": _field(index, block, "id", str), "type": "function", "function": function}


def _result(index: int, block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = list(_texts(index, content))
    call = _field(index, block, "tool_use_id", str)
    return {"role": "tool", "tool_call_id": call, "content": content}


def _texts(index: int, content: Any) -> Iterator[dict[str, str]]:
    if not isinstance(content, list):
        raise ValueError(f"message {index} has a tool_result whose content is no text and no list")
    for part in content:
        yield _text_part(index, part)


def _text_part(index: int, part: Any) -> dict[str, str]:
    kind = _kind(part)
    if kind not in TEXT_PARTS:
        raise ValueError(f"message {index} has a content part {kind!r}: only text is supported")
    return {"type": "text", "text": _field(index, part, TEXT_PARTS[kind], str)}


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def _field(index: int, block: dict[str, Any], name: str, kind: type) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        expected = {str: "text", dict: "an object"}[kind]
        raise ValueError(
            f"message {index} has a {block['type']} part whose {name} is not {expected}: {value!r}"
        )
    return value
