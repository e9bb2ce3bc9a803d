"""Safe mode: control tokens that data spell stay text.

A template writes control tokens (`]~b]`, `<mm:think>`); a user, a web page or a tool may spell the
same characters. Before the template runs, a mark goes into every place of the data where such a
token stands, or would arise together with what the template writes before and after it. Afterwards
only unmarked tokens are read as tokens, and the marks go.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

# What templates compare with words of their own, some of which are parts of control tokens
# ("function" of `<function_call>`): of these fields only whole control tokens are marked.
COMPARED_FIELDS = ("role", "type")


class ControlTokens:
    """The strings that a tokenizer reads as single tokens wherever they stand in a text."""

    def __init__(self, tokens: Collection[str]):
        assert all(len(token) > 1 for token in tokens), "a mark must fit inside"
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        cuts = [(token, n) for token in tokens for n in range(1, len(token))]
        self._beginnings = {token[:n] for token, n in cuts}
        self._endings = {token[n:] for token, n in cuts}
        self._insides = {token[n:m] for token, n in cuts for m in range(n + 1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: str) -> Iterator[tuple[str, str]]:
        """Runs of text, each with the control token after it ("" at the end): leftmost, then
        longest, as tokenizers find them.
        """
        done = 0
        for found in self._pattern.finditer(text):
            yield text[done : found.start()], found.group()
            done = found.end()
        yield text[done:], ""

    def mark_messages(self, value: Any, mark: str) -> Any:
        """A copy of plain message data with the mark in whatever could be part of a control token.

        Keys are marked inside tool arguments only, where the template writes them out.
        """
        if isinstance(value, str):
            return _insert(value, self._fragments(value) | self._whole(value), mark)
        if isinstance(value, list):
            return [self.mark_messages(item, mark) for item in value]
        if isinstance(value, dict):
            return {key: self._mark_field(key, item, mark) for key, item in value.items()}
        return value

    def _mark_field(self, key: str, value: Any, mark: str) -> Any:
        if key == "arguments":
            return self._mark_arguments(value, mark)
        return (self.mark_whole if key in COMPARED_FIELDS else self.mark_messages)(value, mark)

    def _mark_arguments(self, value: Any, mark: str) -> Any:
        if isinstance(value, list):
            return [self._mark_arguments(item, mark) for item in value]
        if isinstance(value, dict):
            keys = (self.mark_messages(key, mark) for key in value)
            items = (self._mark_arguments(item, mark) for item in value.values())
            return dict(zip(keys, items, strict=True))
        return self.mark_messages(value, mark)

    def mark_whole(self, value: Any, mark: str) -> Any:
        """A copy of plain data with the mark in each whole control token, keys included."""
        if isinstance(value, str):
            return _insert(value, self._whole(value), mark)
        if isinstance(value, list):
            return [self.mark_whole(item, mark) for item in value]
        if isinstance(value, dict):
            marked = self.mark_whole
            return {marked(key, mark): marked(item, mark) for key, item in value.items()}
        return value

    def _whole(self, text: str) -> set[int]:
        """A place inside each token that the text spells, overlapping ones included."""
        places, start = set(), 0
        while found := self._pattern.search(text, start):
            start = found.start() + 1
            places.add(start)
        return places

    def _fragments(self, text: str) -> set[int]:
        """A place inside each end of the text, or the text itself, that is part of a token."""
        size, places = len(text), set()
        for n in range(1, min(self._longest, size + 1)):
            if text[:n] in self._endings:
                places.add(min(1, n - 1))
            if text[size - n :] in self._beginnings:
                places.add(size - n + 1)
        if text in self._insides and not text.isspace():
            places.add(1)
        return places


def _insert(text: str, places: set[int], mark: str) -> str:
    if not places:
        return text
    ends = sorted(places)
    pieces = [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]
    return mark.join(pieces)
