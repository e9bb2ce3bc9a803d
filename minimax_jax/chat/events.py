"""What a reply is made of: events while it streams, and the whole that they fold to.

A piece of `ToolArguments` is a piece of the JSON text of the call's arguments, as OpenAI's deltas
carry it; the pieces of one call join to a JSON object.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thought; one with empty text says that there was a thought without words."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of a reply from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call ends; its arguments are one JSON object. Every call that starts ends.

    `complete` is False for a call that was cut off or malformed: its arguments hold what was
    written, and a caller should not run it as if it had been finished.
    """

    index: int
    complete: bool = True


Event = Reasoning | Content | ToolCallStart | ToolArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in whole; `arguments` is the text of a JSON object, `complete` as in `ToolCallEnd`."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply in whole; None where nothing was thought or said.

    `reasoning` is "" when the model closed its thought at once, so that the turn can be rendered
    back unchanged.
    """

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


def fold(events: Iterable[Event]) -> Reply:
    """The whole reply of a stream that has finished."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    complete: list[bool] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case ToolCallStart(_, name):
                names.append(name)
                arguments.append([])
                complete.append(False)
            case ToolArguments(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index, whole):
                complete[index] = whole
    calls = zip(names, map("".join, arguments), complete, strict=True)
    return Reply(
        reasoning="".join(reasoning) if reasoning else None,
        content="".join(content) or None,
        tool_calls=tuple(ToolCall(*call) for call in calls),
    )


class Output:
    """The one way out of the machines: collects events until they are taken.

    Every character of a reply goes, in order, through exactly one of `reasoning`, `content`, `leaf`
    (text of an argument) and `markup` (a marker that was understood, or white space between such
    markers).
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_calls = 0

    def reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def content(self, text: str) -> None:
        self._events.append(Content(text))

    def leaf(self, text: str) -> None:
        """Text of an argument; what becomes of it is told by `arguments`."""

    def markup(self, text: str) -> None:
        """Structure alone: nobody gets to see it."""

    def start(self, name: str) -> None:
        self._events.append(ToolCallStart(self._num_calls, name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        self._events.append(ToolArguments(self._num_calls - 1, text))

    def end(self, complete: bool) -> None:
        self._events.append(ToolCallEnd(self._num_calls - 1, complete))

    def take(self) -> list[Event]:
        """The events since the last call, neighbours of one kind joined."""
        events, self._events = self._events, []
        if len(events) < 2:
            return events
        return [joined for kind, run in groupby(events, type) for joined in _joined(kind, run)]


def _joined(kind: type, run: Iterable[Event]) -> list[Event]:
    """A run of events of one kind, as few as say the same."""
    events = list(run)
    if kind is Reasoning or kind is Content:
        return [kind("".join(event.text for event in events))]  # type: ignore[union-attr]
    if kind is ToolArguments:  # those of two calls have a ToolCallEnd between them
        return [ToolArguments(events[0].index, "".join(event.text for event in events))]  # type: ignore[union-attr]
    return events
