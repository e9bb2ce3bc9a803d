"""What an engine has done so far, as plain counters in one place, and how long each request took.

The engine's thread alone counts; anyone may read. Times are seconds of `time.monotonic`. Listeners
get what a histogram needs, on the engine's event loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, get_args

from serving.scheduling.request import FinishReason


def _none_finished() -> dict[FinishReason, int]:
    return dict.fromkeys(get_args(FinishReason), 0)


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Totals since the start, and what is held at the moment (the last four, which are renewed
    several times a second and whenever the engine falls asleep).

    A sequence is one of a request's n; its prompt counts once for all n. Preempted sequences count
    nothing twice.
    """

    finished: dict[FinishReason, int] = field(default_factory=_none_finished)  # sequences
    prompt_tokens: int = 0
    generation_tokens: int = 0  # that clients get
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # of them, those that were there
    preemptions: int = 0
    broken: int = 0  # sequences whose logits were NaN
    steps: int = 0  # dispatches
    drafts: int = 0  # rows that tested drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place, the first draft's first
    weight_version: int = 0
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # share of the blocks that sequences hold, 0 to 1
    tokens_per_second: float = 0.0  # generated, of late


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRecord:
    """One sequence that has ended, and when things happened to it. A time is None where it never
    came to that.
    """

    request_id: str
    index: int
    reason: FinishReason
    n: int
    max_tokens: int | None
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    preemptions: int
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    end: float

    @property
    def e2e_s(self) -> float:
        """From its arrival to its end."""
        return self.end - self.arrival

    @property
    def queue_s(self) -> float | None:
        """From its arrival to its first step."""
        return _between(self.arrival, self.first_scheduled)

    @property
    def prefill_s(self) -> float | None:
        """From its first step to its first token."""
        return _between(self.first_scheduled, self.first_token)

    @property
    def decode_s(self) -> float | None:
        """From its first token to its last."""
        return _between(self.first_token, self.last_token)

    @property
    def inference_s(self) -> float | None:
        """From its first step to its last token."""
        return _between(self.first_scheduled, self.last_token)

    @property
    def per_token_s(self) -> float | None:
        """The mean time of its tokens after the first; None where there are none."""
        decode = self.decode_s
        if decode is None or self.generation_tokens < 2:
            return None
        return decode / (self.generation_tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One dispatch that has ended: its tokens (of prompts and of decode rows, drafts included), and
    of the sequences that got tokens by it, the time from arrival where these were the first, else
    since their last ones.
    """

    num_tokens: int
    first_token_s: Sequence[float]
    inter_token_s: Sequence[float]


class Listener(Protocol):
    """Whoever wants to know of each step and of each end."""

    def on_step(self, step: StepRecord) -> None:
        """A dispatch has ended."""
        ...

    def on_finished(self, sequence: SequenceRecord) -> None:
        """A sequence has ended."""
        ...


def _between(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first
