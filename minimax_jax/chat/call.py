"""One tool call while it is read: its open elements, and the JSON of its arguments as it grows.

A string argument is passed on as it comes, escaped; one of another type when its element closes,
for only then is its value certain. An element left open is closed by whatever closes what holds it,
and the call is then not complete. Inside a string only its own closer counts, or one of what holds
it; other tags there are text.
"""

from minimax_jax.chat.arguments import Element, arguments_json
from minimax_jax.chat.events import Output
from minimax_jax.chat.literals import NULLS, string_json
from minimax_jax.chat.markers import Marker
from minimax_jax.chat.schema import Schema

# Deeper tags are text.
MAX_DEPTH = 128
_NULL_STARTS = frozenset(null[:size] for null in NULLS for size in range(len(null) + 1))


class Call:
    """An open call. Its arguments have `schema`, and are written to `output`."""

    def __init__(self, name: str, schema: Schema, output: Output):
        self._schema, self._output = schema, output
        self._open: list[Element] = []
        self._names: set[str] = set()  # of the arguments that are written, wholly or in part
        self._closed: list[Element] = []  # of one name, not written: one more makes them a list
        self._streams = False  # the open argument is a string whose beginning is written
        self.complete = True
        output.start(name)

    @property
    def in_argument(self) -> bool:
        return bool(self._open)

    def declares(self, name: str) -> bool:
        """Whether an element of this name is expected here."""
        return (self._open[-1].schema if self._open else self._schema).declares(name)

    def text(self, piece: str) -> None:
        """Text of the innermost open element."""
        self._output.leaf(piece)
        if self._streams:
            self._output.arguments(string_json(piece)[1:-1])
            return
        self._open[-1].parts.append(piece)
        if self._open[0].schema.is_text:
            self._try_to_stream()

    def open(self, marker: Marker) -> bool:
        """Opens an element, unless its place or its name forbids that."""
        name = marker.name or ""
        if not self._open:
            if not self._open_argument(name):
                return False
        elif self._open[-1].schema.is_text or len(self._open) == MAX_DEPTH:
            return False
        else:
            self._open.append(self._open[-1].add(name))
        return True

    def close(self, marker: Marker) -> bool:
        """Closes the innermost element of the marker's name, and those left open in it."""
        if marker.name is not None:
            if all(element.name != marker.name for element in self._open):
                return False
            while self._open[-1].name != marker.name:
                self._close_innermost(complete=False)
        elif not self._open:
            return False
        self._close_innermost(complete=True)
        return True

    def close_all(self) -> None:
        """Closes what the model has left open."""
        while self._open:
            self._close_innermost(complete=False)

    def end(self) -> None:
        self.close_all()
        self._write_closed()
        self._output.arguments("}" if self._names else "{}")
        self._output.end(self.complete)

    def _open_argument(self, name: str) -> bool:
        """An argument cannot come twice, but several of a name in a row may be a list."""
        if self._closed and self._closed[0].name != name:
            self._write_closed()
        if name in self._names:
            return False
        element = Element(name, self._schema.property(name))
        self._open.append(element)
        if element.schema.is_text:
            self._write_name(name)
            self._try_to_stream()
        return True

    def _try_to_stream(self) -> None:
        """Begins to write a string, unless it may still turn out to be null."""
        [argument] = self._open
        start = "".join(map(str, argument.parts))
        if "null" not in argument.schema.types or start not in _NULL_STARTS:
            self._streams = True
            self._output.arguments(string_json(start)[:-1])

    def _close_innermost(self, *, complete: bool) -> None:
        self.complete = self.complete and complete
        element = self._open.pop()
        if self._streams:
            self._streams = False
            self._output.arguments('"')
            return
        element.close()
        if not self._open:
            if element.schema.is_text:
                self._output.arguments(element.json)
            else:
                self._closed.append(element)

    def _write_closed(self) -> None:
        if self._closed:
            self._write_name(self._closed[0].name)
            self._output.arguments(arguments_json(self._closed))
            self._closed = []

    def _write_name(self, name: str) -> None:
        self._output.arguments(f"{', ' if self._names else '{'}{string_json(name)}: ")
        self._names.add(name)
