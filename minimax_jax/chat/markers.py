"""Cuts text, in whatever pieces it comes, into plain text and markers.

What may still become a marker is held back, at most a tag of bounded length, and nothing else. The
same markers come out for every way of cutting the text, and the tokens join to the input.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from re import Match

from minimax_jax.chat.dialects import Dialect


class Kind(Enum):
    """What a marker does; OPEN and CLOSE belong to a parameter or to an element inside one."""

    THINK_START = "think start"
    THINK_END = "think end"
    BLOCK_START = "block start"
    BLOCK_END = "block end"
    CALL_START = "call start"
    CALL_END = "call end"
    OPEN = "open"
    CLOSE = "close"
    CUT = "cut"  # a tag that the end of the text has cut off


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker, and its text `raw`.

    `name` is the function of a CALL_START, else the tag's word; None in M2's CLOSE, which closes
    whatever is open.
    """

    kind: Kind
    name: str | None
    raw: str


Token = str | Marker
_HELD = object()


class Scanner:
    """Pieces of text to tokens. `keys` are the parameter names that a schema declares; those which
    a tag could not hold otherwise, such as `a>b`, are recognised by it.
    """

    def __init__(self, dialect: Dialect, keys: Iterable[str] = ()):
        self._dialect = dialect
        self._held = ""
        self._firsts = frozenset(lead[0] for lead in dialect.leads)
        self._longest = max(map(len, dialect.leads))
        self._unusual = _unusual_tags(dialect, keys)

    def push(self, text: str) -> list[Token]:
        """The tokens that are certain once `text` has come."""
        buffer = self._held + text
        if self._firsts.isdisjoint(buffer):
            self._held = ""
            return [buffer] if buffer else []
        return self._scan(buffer, final=False)

    def finish(self) -> list[Token]:
        """The tokens of what was held back, at the end of the text."""
        return self._scan(self._held, final=True)

    def _scan(self, buffer: str, *, final: bool) -> list[Token]:
        tokens: list[Token] = []
        begin = place = 0  # of the plain text; of the search
        end = None
        while end is None and (lead := self._dialect.lead.search(buffer, place)):
            marker = self._marker(buffer, lead, final=final)
            if marker is None:
                place = lead.end()
                continue
            if lead.start() > begin:
                tokens.append(buffer[begin : lead.start()])
            begin = lead.start()
            if isinstance(marker, Marker):
                tokens.append(marker)
                begin = place = begin + len(marker.raw)
            else:
                end = begin
        if end is None:
            end = len(buffer) if final else self._start_of_lead(buffer, place)
        if end > begin:
            tokens.append(buffer[begin:end])
        self._held = buffer[end:]
        return tokens

    def _marker(self, buffer: str, lead: Match[str], *, final: bool) -> Marker | object | None:
        """The marker at a lead, `_HELD` while that is open, None if there is none."""
        dialect = self._dialect
        if lead[0] == dialect.think_start:
            return Marker(Kind.THINK_START, None, lead[0])
        if lead[0] == dialect.think_end:
            return Marker(Kind.THINK_END, None, lead[0])
        start = lead.start()
        for marker in self._unusual:
            if buffer.startswith(marker.raw, start):
                return marker
            if not final and marker.raw.startswith(buffer[start : start + len(marker.raw)]):
                return _HELD
        if match := dialect.tag.match(buffer, start):
            return _read_tag(dialect, match)
        if dialect.partial.fullmatch(buffer, start):
            return Marker(Kind.CUT, None, buffer[start:]) if final else _HELD
        return None

    def _start_of_lead(self, buffer: str, place: int) -> int:
        """Where the end of the buffer begins to be the beginning of a lead."""
        for start in range(max(place, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._firsts:
                tail = buffer[start:]
                if any(lead.startswith(tail) for lead in self._dialect.leads):
                    return start
        return len(buffer)


def _read_tag(dialect: Dialect, match: Match[str]) -> Marker:
    raw = match[0]
    if match["called"] is not None:
        name = match["double"] or match["single"] or match["bare"]
        kind = Kind.CALL_START if match["called"] == dialect.call else Kind.OPEN
        return Marker(kind, name, raw)
    if (word := match["opened"]) is not None:
        return Marker(Kind.BLOCK_START if word == dialect.block else Kind.OPEN, word, raw)
    word = match["closed"]
    if word == dialect.block:
        return Marker(Kind.BLOCK_END, word, raw)
    if word == dialect.call:
        return Marker(Kind.CALL_END, word, raw)
    return Marker(Kind.CLOSE, word if dialect.namespace else None, raw)


def _unusual_tags(dialect: Dialect, keys: Iterable[str]) -> list[Marker]:
    """The tags of keys that no pattern reads, longest first: `a>b>` before `a>`."""
    markers = []
    for key in sorted(keys, key=len, reverse=True):
        opener = f"{dialect.namespace}<{key}>" if dialect.namespace else f'<parameter name="{key}">'
        if dialect.tag.fullmatch(opener) is None:
            markers.append(Marker(Kind.OPEN, key, opener))
            if dialect.namespace:
                markers.append(Marker(Kind.CLOSE, key, f"{dialect.namespace}</{key}>"))
    return markers
