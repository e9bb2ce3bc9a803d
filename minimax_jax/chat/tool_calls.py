"""Finds the tool calls of a reply: blocks of calls, and what is loose between them.

A block opens, holds calls and closes; around calls in it white space is layout. Whatever else
stands in a block, or is no block, is text like any other and stays where it was found: a malformed
call never takes a good one after it along, for a block stays open until it is closed. A call that
has begun and is then cut off or broken ends there, not complete.
"""

from collections.abc import Mapping
from dataclasses import replace

from minimax_jax.chat.call import Call
from minimax_jax.chat.events import Output
from minimax_jax.chat.literals import BLANK
from minimax_jax.chat.markers import Kind, Marker, Token
from minimax_jax.chat.reasoning import Prose
from minimax_jax.chat.schema import Schema

_OF_CALLS = frozenset({Kind.CALL_START, Kind.CALL_END, Kind.BLOCK_START, Kind.BLOCK_END})
_OF_THOUGHTS = frozenset({Kind.THINK_START, Kind.THINK_END})


class ToolCalls:
    """Takes the tokens of a reply. `tools` are the schemas of the arguments by function name;
    without tools there are no calls, and their markup is text. `nests` says whether arguments hold
    elements.
    """

    def __init__(self, prose: Prose, tools: Mapping[str, Schema], output: Output, *, nests: bool):
        self._prose, self._tools, self._output = prose, tools, output
        # Elements are closed by their names, which may be the words of blocks and calls too.
        self._closers = {Kind.CLOSE, Kind.CALL_END, Kind.BLOCK_END} if nests else {Kind.CLOSE}
        self._ends_argument = _OF_CALLS if nests else _OF_CALLS | {Kind.OPEN}
        self._in_block = False
        self._has_calls = False  # a call of this block has been recognised
        self._call: Call | None = None
        self._layout: list[str] = []  # markers and white space that a call has yet to follow

    def take(self, token: Token) -> None:
        """The next token."""
        call = self._call
        if isinstance(token, Marker):
            self._take_marker(token)
        elif call is not None and call.in_argument:
            call.text(token)
        elif self._in_block:
            self._take_loose(token)
        else:
            self._prose.text(token)

    def finish(self) -> None:
        """The end of the text."""
        if self._call is not None:
            self._call.complete = False
            self._end_call(self._call)
        if self._has_calls:
            self._settle_layout()
        self._release_layout()
        self._prose.finish()

    def _take_marker(self, marker: Marker) -> None:
        call = self._call
        if call is not None:
            if marker.kind is Kind.BLOCK_START and call.declares(marker.name or ""):
                marker = replace(marker, kind=Kind.OPEN)
            if not (call.in_argument and self._take_in_argument(call, marker)):
                self._take_in_call(call, marker)
        elif self._in_block:
            self._take_in_block(marker)
        elif marker.kind is Kind.BLOCK_START and self._tools:
            self._in_block = True
            self._layout.append(marker.raw)
        else:
            self._take_stray(marker)

    def _take_in_argument(self, call: Call, marker: Marker) -> bool:
        """Whether the marker stays within the argument; one that does not has ended it."""
        if marker.kind is Kind.CUT or (marker.kind in self._closers and call.close(marker)):
            self._understand(marker)
        elif marker.kind in self._ends_argument:
            call.close_all()
            return False
        elif marker.kind is Kind.OPEN and call.open(marker):
            self._understand(marker)
        else:
            call.text(marker.raw)
        return True

    def _take_in_call(self, call: Call, marker: Marker) -> None:
        """A marker between arguments."""
        if marker.kind is Kind.CUT or (marker.kind is Kind.OPEN and call.open(marker)):
            self._understand(marker)
        elif marker.kind is Kind.CALL_END:
            self._understand(marker)
            self._end_call(call)
        else:
            call.complete = False
            if marker.kind in _OF_CALLS:
                self._end_call(call)
                self._take_in_block(marker)
            else:
                self._take_stray(marker)

    def _take_in_block(self, marker: Marker) -> None:
        """A marker between calls."""
        if marker.kind is Kind.CALL_START:
            self._start_call(marker)
        elif marker.kind is Kind.BLOCK_START:
            self._layout.append(marker.raw)
        elif marker.kind in (Kind.BLOCK_END, Kind.CUT) and self._has_calls:
            self._understand(marker)
            self._in_block = self._has_calls = False
        else:
            self._take_stray(marker)
            self._in_block = marker.kind is not Kind.BLOCK_END

    def _take_stray(self, marker: Marker) -> None:
        """A marker that opens or closes no part of a call here."""
        self._release_layout()
        if marker.kind in _OF_THOUGHTS:
            self._prose.marker(marker)
        else:
            self._prose.text(marker.raw)

    def _take_loose(self, piece: str) -> None:
        """Text in a block, outside of arguments. White space at its end may be layout."""
        text = piece.rstrip(BLANK)
        if text:
            self._release_layout()
            self._prose.text(text)
            if self._call is not None:
                self._call.complete = False
        if len(text) < len(piece):
            self._layout.append(piece[len(text) :])

    def _start_call(self, marker: Marker) -> None:
        self._prose.interrupt()
        self._understand(marker)
        name = marker.name or ""
        self._call = Call(name, self._tools.get(name, Schema()), self._output)
        self._has_calls = True

    def _end_call(self, call: Call) -> None:
        call.end()
        self._call = None

    def _understand(self, marker: Marker) -> None:
        """A marker has its place, and so has the layout before it."""
        self._settle_layout()
        self._output.markup(marker.raw)

    def _settle_layout(self) -> None:
        for piece in self._layout:
            self._output.markup(piece)
        self._layout.clear()

    def _release_layout(self) -> None:
        """What would have been layout is text."""
        if self._layout:
            self._prose.text("".join(self._layout))
            self._layout.clear()
