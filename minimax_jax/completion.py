"""One sequence on the host: takes tokens as they come, finds where it ends, and says what it
was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minimax_jax.chat import TextStream, Tokenizer, parse_reply


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The raw log-probability of a generated token, and of the likeliest ids at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished sequence. `text` is the answer, `reasoning` the thought apart from it (chats only;
    None if there is none).

    `finish_reason` is "stop" (a stop id or string), "length", or "error" (the model gave NaN
    logits). Ids, log-probabilities, text and usage end at the same token; the stop string itself is
    not in the text.
    """

    text: str | None
    reasoning: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    seconds: float = 0.0

    @property
    def completion_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one dispatch added to sequence `index`; the last one carries the completion. `text` is
    as generated, markers included; the texts of a sequence join to everything that it wrote.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as ids; for a chat also its rendered text, whose end says whether the answer begins
    inside a thought.
    """

    ids: list[int]
    chat_text: str | None = None


class Collector:
    """Takes one sequence's tokens until it ends. Stops are tested before the length: a stop at the
    last place is "stop".
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        *,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ):
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.entries: list[TokenLogprob] = []
        self._stream = None if tokenizer is None else TextStream(tokenizer, stop=stop)
        self._max_tokens, self._stop_ids = max_tokens, stop_ids
        self._pieces: list[str] = []
        self._reported = (0, 0)  # pieces and tokens that deltas have carried

    def push(self, entry: TokenLogprob) -> None:
        """Adds a token; afterwards `finish_reason` may be set."""
        assert self.finish_reason is None
        self.entries.append(entry)
        if entry.token_id in self._stop_ids:
            self.finish("stop")
            return
        if self._stream is not None:
            self._pieces.append(self._stream.push(entry.token_id))
            if self._stream.match is not None:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.entries) == self._max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """Ends the sequence and lets go of what was held back."""
        assert self.finish_reason is None
        if self._stream is not None:
            self._pieces.append(self._stream.finish())
            if self._stream.match is not None and reason == "length":
                reason = "stop"  # half a character was held back, and its U+FFFD completed one
        self.finish_reason = reason

    def delta(self, index: int) -> Delta:
        """What has come since the last delta; text that may be the start of a stop string waits."""
        pieces, tokens = self._reported
        text = "".join(self._pieces[pieces:])
        new = tuple(entry.token_id for entry in self.entries[tokens:])
        self._reported = (len(self._pieces), len(self.entries))
        return Delta(index=index, text=text, token_ids=new)

    def completion(self, seconds: float, *, logprobs: bool) -> Completion:
        """The finished sequence."""
        assert self.finish_reason is not None
        text = None if self._stream is None else "".join(self._pieces)
        reasoning = None
        if text is not None and self.prompt.chat_text is not None:
            reply = parse_reply(text, prompt=self.prompt.chat_text)
            text, reasoning = reply.content or "", reply.reasoning
        return Completion(
            text=text,
            reasoning=reasoning,
            token_ids=tuple(entry.token_id for entry in self.entries),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt.ids),
            logprobs=tuple(self.entries) if logprobs else None,
            seconds=seconds,
        )
