"""Token ids to text as they come: whole characters only, and stop strings wherever they begin.

In byte-level BPE each token stands for a fixed run of bytes, so decoding is concatenation. What has
to wait is at most one unfinished UTF-8 character and the text that may yet become a stop string;
neither depends on how long the sequence is, so a token costs O(1).
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minimax_jax.chat.tokenizer import Tokenizer


class DecodeStream:
    """Decodes one id at a time and holds back the bytes of an unfinished character.

    The pieces of `push`, with the last one of `finish`, join to `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_unfinished(self) -> bool:
        """Whether the ids so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """Where a stop string ended a text: `num_tokens` counts up to the token that completed it,
    `num_tokens_before` those that lie wholly before its first character.
    """

    stop: str
    num_tokens: int
    num_tokens_before: int


class TextStream:
    """The text of one sequence up to the first stop string, told as soon as it is certain.

    The stop string that is complete first ends the text (the longest, where several are complete at
    one character), so the outcome does not depend on where tokens begin and end. The text ends
    before it, or after it with `include_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop=False,
        min_tokens: int = 0,
    ):
        """Stop strings are looked for behind the text of the first `min_tokens` tokens. Raises
        ValueError for an empty one.
        """
        if "" in stop:
            raise ValueError("a stop string is empty")
        self.match: StopMatch | None = None
        self._decoder = DecodeStream(tokenizer)
        self._stops = [_StopString(text) for text in stop]
        self._first_characters = {text[0] for text in stop}
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._held = ""
        self._tokens = _TokenEnds()

    @property
    def num_certain_tokens(self) -> int:
        """How many tokens lie wholly in text that no stop string can reach any more."""
        return self._tokens.count_before

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; afterwards `match` may be set."""
        assert self.match is None, "the text has ended"
        piece = self._decoder.push(token_id)
        self._tokens.push(len(piece), self._decoder.is_unfinished)
        if self._tokens.count <= self._min_tokens:
            self._tokens.forget(len(piece))
            return piece
        return self._take(piece)

    def finish(self) -> str:
        """The rest of a text that ends here, U+FFFD for an unfinished character included."""
        if self.match is not None:
            return ""
        certain = self._take(self._decoder.finish())
        held, self._held = self._held, ""
        return certain + held

    def _take(self, piece: str) -> str:
        if not self._held and self._first_characters.isdisjoint(piece):
            self._tokens.forget(len(piece))
            return piece
        for place, character in enumerate(piece):
            complete = [stop.text for stop in self._stops if stop.advance(character)]
            if complete:
                return self._end(self._held + piece[: place + 1], max(complete, key=len))
        text = self._held + piece
        certain = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[certain:]
        self._tokens.forget(certain)
        return text[:certain]

    def _end(self, text: str, stop: str) -> str:
        before = len(text) - len(stop)
        self._tokens.forget(before)
        self.match = StopMatch(
            stop=stop, num_tokens=self._tokens.count, num_tokens_before=self._tokens.count_before
        )
        self._held = ""
        return text if self._include_stop else text[:before]


class _StopString:
    """A stop string and how much of it the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str):
        self.text, self.matched = text, 0
        self._borders = [0] * len(text)
        for end in range(1, len(text)):
            self._borders[end] = self._longer(self._borders[end - 1], text[end])

    def advance(self, character: str) -> bool:
        """Takes one character; whether the stop string is complete now."""
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.text)

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == character)


class _TokenEnds:
    """Which tokens lie wholly inside the text that is certain."""

    def __init__(self):
        self.count = 0  # tokens in all
        self.count_before = 0  # of them, those that end inside the certain text
        self._length = 0  # characters in all
        self._certain = 0
        self._ends: deque[int] = deque()  # of the tokens that are not yet before

    def push(self, characters: int, unfinished: bool) -> None:
        self.count += 1
        self._length += characters
        # A token that begins a character reaches into it, though none of it is text yet.
        self._ends.append(self._length + unfinished)

    def forget(self, characters: int) -> None:
        self._certain += characters
        while self._ends and self._ends[0] <= self._certain:
            self._ends.popleft()
            self.count_before += 1
