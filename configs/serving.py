"""What a server may hold at once and how it shares it out, under the names of vLLM's flags.

Sizes are per data rank. The number of blocks is not here: the engine measures what fits.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from configs.parts import check, check_positive


def _default(value: Any, text: str) -> Any:
    """A field with its default and the help of its flag."""
    return field(default=value, metadata={"help": f"{text} (default {value})"})


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Limits and policies of the host side of the engine."""

    max_model_len: int = _default(262_144, "tokens of a sequence, prompt and output together")
    max_num_seqs: int = _default(256, "running sequences a data rank")
    max_num_batched_tokens: int = _default(8192, "tokens of a step a data rank")
    block_size: int = _default(128, "tokens of a block; the checkpoint's sparse block size")
    enable_prefix_caching: bool = _default(True, "lets requests share the blocks of equal prefixes")
    scheduling_policy: Literal["fcfs", "priority"] = _default("fcfs", "who goes first")
    async_scheduling: bool = _default(True, "plans a step while the one before it runs")
    num_scheduler_steps: int = _default(8, "device steps of a dispatch when nothing waits")
    num_speculative_tokens: int = _default(0, "drafts that a step verifies at most")
    watermark: float = _default(0.01, "share of the blocks that an admission leaves free")
    max_waiting_requests: int = _default(4096, "requests that may wait; more are turned away")
    max_logprobs: int = _default(20, "likeliest tokens that a request may ask for")
    enable_kv_cache_events: bool = _default(False, "records which blocks are stored and removed")

    def __post_init__(self) -> None:
        check_positive(self, "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        check_positive(self, "block_size", "num_scheduler_steps", "max_waiting_requests")
        for name in ("num_speculative_tokens", "max_logprobs"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} is negative")
        check(0 <= self.watermark < 1, f"watermark={self.watermark} is not in [0, 1)")
        needed = self.max_num_seqs * (1 + self.num_speculative_tokens)
        check(
            self.max_num_batched_tokens >= needed,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is less than one token and "
            f"{self.num_speculative_tokens} drafts of each of {self.max_num_seqs} sequences, "
            f"{needed}",
        )

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence: the width of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def steps_in_flight(self) -> int:
        """Plans that may be out before the first one's result is known."""
        return 2 if self.async_scheduling else 1
