"""Tells thought from content, outside of tool calls (specification model 4.3).

Whether a reply begins inside a thought is read from the end of the rendered prompt, never from a
request flag and never from markers further up, which may be quoted by a system message. A reply has
one thought at most: later openers are content. A marker that only repeats what already holds, with
nothing but white space since, is dropped; any other stray marker is text.
"""

from minimax_jax.chat.dialects import Dialect
from minimax_jax.chat.events import Output
from minimax_jax.chat.literals import BLANK
from minimax_jax.chat.markers import Kind, Marker


def starts_in_thought(prompt: str, dialect: Dialect) -> bool:
    """Whether the generation prompt has opened a thought: it ends with the opening marker."""
    return prompt.rstrip().endswith(dialect.think_start)


class Prose:
    """The text of a reply outside of its calls, as thought or as content."""

    def __init__(self, output: Output, *, in_thought: bool):
        self._output = output
        self._in_thought = self._had_thought = in_thought
        self._is_silent = True  # this thought has no text yet
        self._fresh = True  # no text but `_blanks` since the start, a marker or a call
        self._blanks: list[str] = []
        self._end_is_due = False  # a call has ended the thought, its closer may still come

    def text(self, piece: str) -> None:
        """Plain text. White space waits, while a repeated marker may still follow it."""
        if self._fresh:
            if not piece.strip(BLANK):
                self._blanks.append(piece)
                return
            self._settle()
            self._fresh = False
        self._write(piece)

    def marker(self, marker: Marker) -> None:
        """A marker of a thought."""
        starts = marker.kind is Kind.THINK_START
        if starts == self._in_thought and self._fresh:
            self._drop(marker)
        elif starts and not self._had_thought:
            self._settle()
            self._in_thought = self._had_thought = True
            self._drop(marker)
        elif not starts and self._in_thought:
            self._end_thought()
            self._drop(marker)
        elif not starts and self._end_is_due:
            self._drop(marker)
        else:
            self.text(marker.raw)

    def interrupt(self) -> None:
        """A call begins, which ends a thought."""
        self._end_is_due = self._in_thought or self._end_is_due
        self._settle()
        self._end_thought()
        self._fresh = True

    def finish(self) -> None:
        """The end of the text: white space that waited is text."""
        self._settle()
        self._end_thought()

    def _drop(self, marker: Marker) -> None:
        self._output.markup("".join([*self._blanks, marker.raw]))
        self._blanks.clear()
        self._fresh = True
        if marker.kind is Kind.THINK_END:
            self._end_is_due = False

    def _end_thought(self) -> None:
        self._settle()
        if self._in_thought and self._is_silent:
            self._output.reasoning("")
        self._in_thought = False

    def _settle(self) -> None:
        if self._blanks:
            self._write("".join(self._blanks))
            self._blanks.clear()

    def _write(self, piece: str) -> None:
        if self._in_thought:
            self._is_silent = False
            self._output.reasoning(piece)
        else:
            self._output.content(piece)
