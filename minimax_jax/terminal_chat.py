"""A chat in the terminal: answers stream, thoughts are dim, tools are called, history is kept."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from rich.console import Console

from minimax_jax.chat import Message, MessageDelta, TurnMemory
from minimax_jax.completion import Completion, Delta
from minimax_jax.python_tools import PythonTools

MAX_ROUNDS = 8  # of calls after one question: a model that loops should ask its user
HELP = "/new begins a new chat, /exit (or the end of input) leaves; Ctrl-C stops an answer"


@dataclass(kw_only=True)
class TerminalChat:
    """One chat. `answer` streams the next answer to messages, with the definitions of the tools and
    the memory of past turns; `messages` is what was said so far, `system` first if there is one.
    """

    answer: Callable[[list[dict[str, Any]], list[Any], TurnMemory], Iterator[Delta]]
    console: Console
    tools: PythonTools | None = None
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: TurnMemory = field(default_factory=TurnMemory)

    def run(self, read: Callable[[], str]) -> None:
        """Reads questions and answers them until `read` raises EOFError or the user leaves."""
        self._say(HELP)
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/exit":
                return
            if line == "/new":
                self.messages.clear()
            elif line.startswith("/"):
                self._say(HELP)
            elif line:
                self.ask(line)

    def ask(self, question: str) -> None:
        """One question to its last answer. What fails or is stopped leaves the chat as it was."""
        before = list(self.messages)
        if not before and self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": question})
        try:
            self._answer_and_call()
        except KeyboardInterrupt:
            self.messages[:] = before
            self._say("\nstopped; the question is forgotten")
        except ValueError as error:
            self.messages[:] = before
            self._say(f"{error}; /new begins a new chat")

    def _answer_and_call(self) -> None:
        for _ in range(MAX_ROUNDS):
            message = self._next_message()
            if not message.tool_calls:
                return
            assert self.tools is not None, "without tools nothing is a call"
            for call in message.tool_calls:
                self._show(f"{call.name} {call.arguments}", style="cyan")
                result = "error: the call was cut off or malformed, and was not run"
                if call.complete:
                    result = self.tools.call(call.name, call.arguments)
                self._show(f"  {result}", style="red" if result.startswith("error:") else "green")
                result = {"role": "tool", "tool_call_id": call.id, "content": result}
                self.messages.append(result)
        self._say(f"{MAX_ROUNDS} rounds of calls without an answer; say how to go on")

    def _next_message(self) -> Message:
        """Streams one answer and adds it to the messages."""
        definitions = [] if self.tools is None else self.tools.definitions
        done: Completion | None = None
        shown = _Shown(self.console)
        with _stopped_between_deltas() as stopped:
            for delta in self.answer(self.messages, definitions, self.turns):
                assert delta.message is not None, "a chat has messages"
                shown.add(delta.message)
                done = delta.completion
                if stopped.is_set():
                    raise KeyboardInterrupt
        shown.end()
        assert done is not None and done.message is not None
        if done.finish_reason not in ("stop", "tool_calls"):
            self._say(f"({done.finish_reason})")
        self.messages.append(done.message.to_dict())
        return done.message

    def _say(self, text: str) -> None:
        self._show(text, style="dim italic")

    def _show(self, text: str, style: str) -> None:
        write(self.console, text + "\n", style)


class _Shown:
    """What of one answer is on the screen: the thought dim, on lines of its own."""

    def __init__(self, console: Console):
        self._console = console
        self._at_line_start = True
        self._in_thought = False

    def add(self, delta: MessageDelta) -> None:
        if delta.reasoning:
            self._in_thought = True
            self._write(delta.reasoning, "dim")
        if delta.content:
            if self._in_thought:
                self.end()
            self._write(delta.content, "")

    def end(self) -> None:
        """Ends the line, if one is begun."""
        if not self._at_line_start:
            self._write("\n", "")
        self._in_thought = False

    def _write(self, text: str, style: str) -> None:
        write(self._console, text, style)
        self._at_line_start = text.endswith("\n")


def write(console: Console, text: str, style: str) -> None:
    """Text as it is: no markup is read, no line is broken, and escape sequences do nothing."""
    visible = text.replace("\x1b", "\u241b")
    console.print(visible, style=style, end="", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _stopped_between_deltas() -> Iterator[Event]:
    """Ctrl-C sets the event instead of tearing a step apart, which may crash the process as it
    exits; a second Ctrl-C does not wait.
    """
    stopped = Event()

    def stop(signal_number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
