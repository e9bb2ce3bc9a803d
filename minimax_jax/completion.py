"""One sequence on the host: takes tokens as they come, finds where it ends, and says what it
was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from minimax_jax.chat import (
    Message,
    MessageBuilder,
    MessageDelta,
    Prompt,
    ReplyParser,
    TextStream,
    Tokenizer,
    Usage,
)
from minimax_jax.chat.events import Event
from minimax_jax.chat.openai import finish_reason
from minimax_jax.chat.tools import tool_definitions
from minimax_jax.speculative.stats import SpeculationStats


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The raw log-probability of a generated token, and of the likeliest ids at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished sequence. `text` is what was said, without thought and calls, which are in
    `message` (chats only).

    `finish_reason` is "stop" (a stop id, or the stop string in `stop`), "tool_calls" (stopped after
    calls), "length", or "error" (the model gave NaN logits, or nothing was allowed). Ids,
    log-probabilities, text and usage end at the same token; the stop string itself is not in the
    text. `speculation` is None where no draft was verified.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    message: Message | None = None
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    seconds: float = 0.0
    speculation: SpeculationStats | None = None

    @property
    def reasoning(self) -> str | None:
        """The thought of a chat's answer, None if there is none."""
        return None if self.message is None else self.message.reasoning

    @property
    def is_whole(self) -> bool:
        """Whether the message says all that the tokens say: after a stop string it says less."""
        return self.stop is None and self.finish_reason != "error"

    @property
    def usage(self) -> Usage:
        """How many tokens went in and came out."""
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=len(self.token_ids))


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one dispatch added to sequence `index`; the last one carries the completion.

    `text` is as generated, markers included; the texts of a sequence join to everything that it
    wrote. `message` is the same for a chat's client: thought, content and calls apart.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    message: MessageDelta | None = None
    completion: Completion | None = None


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
        min_tokens: int = 0,
        reply_id: str = "0",
    ):
        """Nothing stops the first `min_tokens` tokens. `reply_id` goes into the ids of tool
        calls.
        """
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.entries: list[TokenLogprob] = []
        self.speculation = SpeculationStats()
        stream = partial(TextStream, stop=stop, min_tokens=min_tokens)
        self._stream = None if tokenizer is None else stream(tokenizer)
        self._parser, self._builder = _parser(prompt), MessageBuilder(reply_id)
        self._max_tokens, self._stop_ids = max_tokens, stop_ids
        self._pieces: list[str] = []
        self._events: list[Event] = []  # that deltas have not carried yet
        self._reported = (0, 0)  # pieces and tokens that deltas have carried

    def push(self, entry: TokenLogprob) -> None:
        """Adds a token; afterwards `finish_reason` may be set."""
        assert self.finish_reason is None
        self.entries.append(entry)
        if entry.token_id in self._stop_ids:
            self.finish("stop")
            return
        if self._stream is not None:
            self._take(self._stream.push(entry.token_id))
            if self._stream.match is not None:
                self.finish("stop")
                return
        if len(self.entries) == self._max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """Ends the sequence and lets go of what was held back."""
        assert self.finish_reason is None
        if self._stream is not None:
            self._take(self._stream.finish())
            if self._stream.match is not None and reason == "length":
                reason = "stop"  # half a character was held back, and its U+FFFD completed one
        if self._parser is not None:
            self._events += self._parser.finish()
        self.finish_reason = reason

    def delta(self, index: int) -> Delta:
        """What has come since the last delta; text that may be the start of a stop string waits."""
        pieces, tokens = self._reported
        text = "".join(self._pieces[pieces:])
        new = tuple(entry.token_id for entry in self.entries[tokens:])
        self._reported = (len(self._pieces), len(self.entries))
        return Delta(index=index, text=text, token_ids=new, message=self._message_delta())

    def completion(self, seconds: float, *, logprobs: bool) -> Completion:
        """The finished sequence."""
        assert self.finish_reason is not None
        self._message_delta()
        message = None if self._parser is None else self._builder.message()
        text = None if self._stream is None else "".join(self._pieces)
        match = None if self._stream is None else self._stream.match
        return Completion(
            text=text if message is None else message.content or "",
            token_ids=tuple(entry.token_id for entry in self.entries),
            finish_reason=finish_reason(self.finish_reason, message),
            prompt_tokens=len(self.prompt.ids),
            message=message,
            stop=None if match is None else match.stop,
            logprobs=tuple(self.entries) if logprobs else None,
            seconds=seconds,
            speculation=self.speculation if self.speculation.steps else None,
        )

    def _take(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._parser is not None:
            self._events += self._parser.feed(piece)

    def _message_delta(self) -> MessageDelta | None:
        if self._parser is None:
            return None
        events, self._events = self._events, []
        return self._builder.add(events)


def _parser(prompt: Prompt) -> ReplyParser | None:
    """The parser of an answer to a chat; other prompts have none."""
    if prompt.chat is None:
        return None
    assert prompt.text is not None
    return ReplyParser(prompt=prompt.text, tools=tool_definitions(prompt.chat.tools))
