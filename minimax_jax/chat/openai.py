"""Answers in the shapes of OpenAI's chat API: message, delta, tool calls, usage.

Plain values; `to_dict` writes what the API would, and leaves out what is absent. The thought goes
by `reasoning_content`. `MessageBuilder` makes them from the events of the parser.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minimax_jax.chat.events import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, kw_only=True)
class MessageToolCall:
    """A call of an answer; `arguments` is the text of a JSON object.

    `complete` is False for a call that was cut off or malformed, which must not be run.
    """

    id: str
    name: str
    arguments: str
    complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        """An entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class Message:
    """A whole answer; None where nothing was thought or said. A thought without words is ""."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: tuple[MessageToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A message that can be put back into the conversation as it is."""
        thought = {} if self.reasoning is None else {"reasoning_content": self.reasoning}
        calls = [call.to_dict() for call in self.tool_calls]
        message = {"role": "assistant", "content": self.content, **thought}
        return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """More of call `index`: id and name come once, with its first delta."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def to_dict(self) -> dict[str, Any]:
        """An entry of a delta's `tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class MessageDelta:
    """More of an answer. The deltas of an answer, merged by field and index, are its message."""

    role: str | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The `delta` of a chunk; {} where nothing is new."""
        fields = {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.reasoning,
            "tool_calls": [call.to_dict() for call in self.tool_calls] or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt came from a prefix cache (None: there is
    none).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The `usage` of a response."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


def finish_reason(reason: str, message: Message | None) -> str:
    """ "tool_calls" for an answer that stopped by itself and calls tools, else `reason`."""
    calls = message is not None and any(call.complete for call in message.tool_calls)
    return "tool_calls" if reason == "stop" and calls else reason


class MessageBuilder:
    """Folds the parser's events to deltas, and all of them to the message.

    Call n of the answer has the id `call_{reply_id}_{n}`, so the same answer has the same ids,
    streamed or whole; `reply_id` should differ between the answers of a conversation.
    """

    def __init__(self, reply_id: str):
        self._reply_id = reply_id
        self._is_first = True
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []

    def add(self, events: Iterable[Event]) -> MessageDelta:
        """What the events add, as one delta; the first one carries the role."""
        delta = _Pieces()
        for event in events:
            match event:
                case Reasoning(text):
                    self._reasoning.append(text)
                    delta.reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                    delta.content.append(text)
                case ToolCallStart(index, name):
                    self._calls.append(_Call(f"call_{self._reply_id}_{index}", name))
                    delta.starts.add(index)
                case ToolArguments(index, text):
                    self._calls[index].arguments.append(text)
                    delta.arguments.setdefault(index, []).append(text)
                case ToolCallEnd(index, complete):
                    self._calls[index].complete = complete
        role, self._is_first = ("assistant" if self._is_first else None), False
        return MessageDelta(
            role=role,
            reasoning=_joined(delta.reasoning),
            content=_joined(delta.content),
            tool_calls=tuple(self._call_deltas(delta)),
        )

    def message(self) -> Message:
        """The message so far; a call that has not ended is not complete."""
        return Message(
            reasoning=_joined(self._reasoning),
            content=_joined(self._content) or None,
            tool_calls=tuple(
                MessageToolCall(
                    id=call.id,
                    name=call.name,
                    arguments="".join(call.arguments),
                    complete=call.complete,
                )
                for call in self._calls
            ),
        )

    def _call_deltas(self, delta: "_Pieces") -> Iterable[ToolCallDelta]:
        for index in sorted(delta.starts | delta.arguments.keys()):
            call, arguments = self._calls[index], "".join(delta.arguments.get(index, ()))
            if index in delta.starts:
                yield ToolCallDelta(index=index, id=call.id, name=call.name, arguments=arguments)
            else:
                yield ToolCallDelta(index=index, arguments=arguments)


class _Call:
    def __init__(self, call_id: str, name: str):
        self.id, self.name = call_id, name
        self.arguments: list[str] = []
        self.complete = False


class _Pieces:
    """What one delta gathers."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.starts: set[int] = set()
        self.arguments: dict[int, list[str]] = {}


def _joined(pieces: list[str]) -> str | None:
    return "".join(pieces) if pieces else None
