"""What a server may hold at once and how it shares it out, under the names of vLLM's flags.

Sizes are per data rank. By default the engine measures how many blocks fit.
"""

from dataclasses import dataclass
from typing import Literal

from configs.cli import described
from configs.parts import check, check_positive


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Limits and policies of an engine. An engine has one of these, and any number of listeners,
    each with a `ServerConfig`; offline use has no listener at all, which is why they are two.
    """

    max_model_len: int = described(262_144, "tokens of a sequence, prompt and output together")
    max_num_seqs: int = described(256, "running sequences a data rank")
    max_num_batched_tokens: int = described(8192, "tokens of a step a data rank")
    block_size: int = described(
        128, "tokens of a block; the checkpoint's sparse block size, times the ranks of split"
    )
    gpu_memory_utilization: float = described(0.92, "share of a device's memory that may be used")
    num_gpu_blocks_override: int | None = described(None, "blocks of the cache, not what fits")
    enable_prefix_caching: bool = described(True, "shares the blocks of equal prefixes")
    scheduling_policy: Literal["fcfs", "priority"] = described("fcfs", "who goes first")
    async_scheduling: bool = described(True, "plans a step while the one before it runs")
    num_scheduler_steps: int = described(8, "device steps of a dispatch when nothing waits")
    num_speculative_tokens: int = described(0, "drafts that a step verifies at most")
    speculation_costs: str | None = described(
        None, "a file of `minimax-serve profile`, by which the drafts to verify are chosen"
    )
    watermark: float = described(0.01, "share of the blocks that an admission leaves free")
    max_waiting_requests: int = described(4096, "requests that may wait; more are turned away")
    max_logprobs: int = described(20, "likeliest tokens that a request may ask for")
    enable_kv_cache_events: bool = described(False, "records which blocks are stored and removed")
    enable_return_routed_experts: bool = described(
        False, "records the experts of each token, which offline outputs then have"
    )

    def __post_init__(self) -> None:
        check_positive(self, "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        check_positive(self, "block_size", "num_scheduler_steps", "max_waiting_requests")
        for name in ("num_speculative_tokens", "max_logprobs"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} is negative")
        share, blocks = self.gpu_memory_utilization, self.num_gpu_blocks_override
        check(0 < share <= 1, f"gpu_memory_utilization={share} is not in (0, 1]")
        check(blocks is None or blocks > 0, f"num_gpu_blocks_override={blocks} is not at least 1")
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
