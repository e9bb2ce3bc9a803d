"""How supervised training runs: length, data, optimiser, the two auxiliary signals, and what is
written when.
"""

from dataclasses import dataclass
from typing import Literal

from configs.cli import described
from configs.parts import check, check_positive


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """A training run from scratch. Fields up to `seed` decide the result; those after it only what
    is measured and kept.
    """

    steps: int = described(6000, "updates, one pack each")
    batch_tokens: int = described(32768, "places in a pack; segments are padded to whole blocks")
    list_steps: int = described(2700, "first steps, with short ledgers: looking up is learnt here")
    long_steps: int = described(1800, "steps after those, with longer ledgers")
    long_fraction: float = described(0.4, "share of packs with longer ledgers in all later steps")
    learning_rate: float = described(2e-3, "of AdamW, between warm-up and decay")
    warmup_steps: int = described(200, "steps of linear warm-up")
    decay_fraction: float = described(0.4, "last share of the steps, of linear decay to 0")
    weight_decay: float = described(0.1, "on matrices alone")
    clip_norm: float = described(1.0, "bound of the gradient's norm")
    dtype: Literal["f32", "bf16"] = described("f32", "of activations; parameters are float32")
    dense_steps: int = described(3100, "first steps, in which ledger packs see every block")
    indexer_weight: float = described(1.0, "of the loss that teaches the indexer")
    indexer_queries: int = described(256, "places sampled from a pack for that loss")
    router_bias_rate: float = described(1e-3, "step of the experts' biases towards an even load")
    seed: int = described(0, "of weights, problems and samples")

    log_every: int = described(20, "steps between lines of the log")
    eval_every: int = described(250, "steps between evaluations")
    eval_problems: int = described(256, "held-out short problems answered at temperature 1")
    stop_at: float | None = described(None, "exact match that ends the run")
    save_every: int = described(250, "steps between checkpoints")
    keep: int = described(4, "checkpoints kept")
    max_seconds: float | None = described(None, "saves and ends after this time, to be resumed")
    workers: int = described(0, "processes that make packs ahead; 0: between steps")

    def __post_init__(self) -> None:
        check_positive(self, "steps", "batch_tokens", "indexer_queries", "keep")
        check(self.clip_norm > 0, f"clip_norm={self.clip_norm} is not positive")
        check_positive(self, "log_every", "eval_every", "eval_problems", "save_every")
        for name in ("long_fraction", "decay_fraction"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"{name}={value} is not in 0..1")
        for name in (
            *("list_steps", "long_steps", "warmup_steps", "dense_steps", "weight_decay"),
            *("indexer_weight", "router_bias_rate", "seed", "workers"),
        ):
            value = getattr(self, name)
            check(value >= 0, f"{name}={value} is negative")
        limit = self.max_seconds
        check(limit is None or limit > 0, f"max_seconds={limit} is not positive")
        check(self.learning_rate > 0, f"learning_rate={self.learning_rate} is not positive")
        in_range = self.stop_at is None or 0 < self.stop_at <= 1
        check(in_range, f"stop_at={self.stop_at} is not in (0, 1]")
