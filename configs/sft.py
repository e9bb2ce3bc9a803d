"""How supervised training runs: length, data, optimiser, the two auxiliary signals, and what is
written when.
"""

from dataclasses import dataclass
from typing import Literal

from configs.parts import check, check_positive


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """A training run from scratch. Fields up to `seed` decide the result; those after it only what
    is measured and kept.
    """

    steps: int = 12000
    batch_tokens: int = (
        32768  # places in a pack, padding of the last block of each segment included
    )
    long_fraction: float = 0.3  # share of packs that hold long problems
    long_steps: int = 2000  # at the start with long problems alone: looking up is learnt slowest
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    decay_fraction: float = 0.2  # last share of the steps, in which the rate falls linearly to 0
    weight_decay: float = 0.1  # on matrices alone
    clip_norm: float = 1.0
    dtype: Literal["f32", "bf16"] = "f32"  # of activations; parameters are float32
    dense_steps: int = (
        1500  # at the start with every block visible, from which the indexer learns where to look
    )
    indexer_weight: float = (
        1.0  # of the indexer's distillation loss, which reaches its own parameters alone
    )
    indexer_queries: int = 256  # sampled a pack for that loss
    router_bias_rate: float = 1e-3  # step of the selection bias towards an even load of the experts
    seed: int = 0

    log_every: int = 20
    eval_every: int = 1000
    eval_problems: int = 256  # held-out short problems answered at temperature 1
    stop_at: float | None = (
        None  # ends the run at the first evaluation whose exact match reaches it
    )
    save_every: int = 1000
    keep: int = 3  # checkpoints
    max_seconds: float | None = None  # saves and ends after this time, to be resumed
    workers: int = 0  # processes that make packs ahead; 0 makes them between steps

    def __post_init__(self) -> None:
        check_positive(self, "steps", "batch_tokens", "indexer_queries", "keep")
        check(self.clip_norm > 0, f"clip_norm={self.clip_norm} is not positive")
        check_positive(self, "log_every", "eval_every", "eval_problems", "save_every")
        for name in ("long_fraction", "decay_fraction"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"{name}={value} is not in 0..1")
        for name in (
            *("long_steps", "warmup_steps", "dense_steps", "weight_decay"),
            *("indexer_weight", "router_bias_rate", "seed", "workers"),
        ):
            value = getattr(self, name)
            check(value >= 0, f"{name}={value} is negative")
        check(self.learning_rate > 0, f"learning_rate={self.learning_rate} is not positive")
        in_range = self.stop_at is None or 0 < self.stop_at <= 1
        check(in_range, f"stop_at={self.stop_at} is not in (0, 1]")
