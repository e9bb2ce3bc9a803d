"""A rendered prompt that still knows which of its control tokens are meant (see
`control_tokens.py`).
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

FIRST_MARK = 0xFDD0  # Unicode's first noncharacter: no text should hold it
NEVER_IN_UTF8 = b"\xff"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A prompt's text with its marks in it; `mark` is one character that the text itself lacks."""

    marked: str
    mark: str

    @property
    def text(self) -> str:
        """The prompt without marks."""
        return self.marked.replace(self.mark, "")

    def until(self, place: int) -> "Rendered":
        """The beginning, up to a place in the marked text."""
        return Rendered(marked=self.marked[:place], mark=self.mark)

    def after(self, place: int) -> "Rendered":
        """The rest, from a place in the marked text."""
        return Rendered(marked=self.marked[place:], mark=self.mark)

    def digests(self, places: Sequence[int]) -> list[bytes]:
        """A digest of the beginning up to each place, places ascending: equal if text and marks are
        equal, whatever character the mark is.
        """
        hashed, digests = blake2b(digest_size=16), []
        for start, end in itertools.pairwise([0, *places]):
            pieces = self.marked[start:end].split(self.mark)
            hashed.update(NEVER_IN_UTF8.join(piece.encode("utf-8") for piece in pieces))
            digests.append(hashed.digest())
        return digests


def unused_mark(text: str) -> str:
    """A character that `text` lacks, as itself and as JSON's escape."""
    used = set(text)
    free = (c for c in map(chr, range(FIRST_MARK, 0x110000)) if c not in used)
    return next(c for c in free if escaped(c) not in text)


def escaped(mark: str) -> str:
    """What JSON writes for a mark where it keeps to ASCII."""
    return json.dumps(mark).strip('"')
