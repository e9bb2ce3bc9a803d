"""What came back for a request, and when, by one clock in seconds.

Latencies are vLLM's (specification serving 4.4): TTFT from sending to the first token, ITL the gaps
between events that bring tokens (several each where drafts are accepted), E2EL from sending to the
end, and TPOT (E2EL - TTFT) / (output tokens - 1).
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Fate = Literal["completed", "failed", "cancelled"]


@dataclass(kw_only=True, slots=True)
class Answer:
    """Filled in while the answer comes; `counts[i]` tokens came at `times[i]`."""

    request_id: str
    is_measured: bool = True
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None where the server does not say
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    is_cancelled: bool = False

    def note(self, now: float, count: int) -> None:
        """Takes an event with new tokens in."""
        self.times.append(now)
        self.counts.append(count)

    @property
    def fate(self) -> Fate:
        """What became of it."""
        if self.is_cancelled:
            return "cancelled"
        return "failed" if self.error else "completed"

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def itls(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 where there is no other."""
        if self.output_tokens < 2:
            return 0.0
        return (self.e2el - self.ttft) / (self.output_tokens - 1)
