"""How a drafter is trained: the target's answers that it learns from, anchors, losses, optimiser,
and what is written when.
"""

from dataclasses import dataclass
from typing import Literal

from configs.cli import described
from configs.parts import CACHE_FORMATS, check, check_positive


@dataclass(frozen=True, kw_only=True)
class DrafterTrainingConfig:
    """A drafter's training run (spec/dspark 5). Fields up to `seed` decide the result; those after
    it only what is measured and kept.
    """

    short: int = described(16384, "short problems that the target answers")
    ledger: int = described(2048, "dialogues about ledgers of up to 50 lines")
    long: int = described(768, "dialogues about ledgers of up to 240 lines")
    wave: int = described(1024, "dialogues that the target answers in lock-step")
    answer_tokens: int = described(64, "most tokens of an answer, its thought included")
    steps: int = described(4000, "updates, one pack each")
    batch_tokens: int = described(8192, "places in a pack; dialogues are padded to whole blocks")
    batch_anchors: int = described(3072, "blocks of drafts that a step learns from at most")
    sequence_anchors: int = described(512, "of those from one dialogue at most")
    ce_weight: float = described(0.1, "of the cross-entropy of the answer's own tokens")
    tv_weight: float = described(0.9, "of the distance |q - p| to the target's distribution")
    confidence_weight: float = described(1.0, "of the confidence head's loss")
    loss_decay: float = described(4.0, "draft k counts exp(-k / this), k from 0")
    draft_cache: str = described("fp8", "format in which the context's keys and values are seen")
    learning_rate: float = described(2e-3, "of AdamW, between warm-up and decay")
    warmup_steps: int = described(200, "steps of linear warm-up")
    decay_fraction: float = described(0.6, "last share of the steps, of linear decay to 0")
    weight_decay: float = described(0.0, "on matrices alone")
    clip_norm: float = described(1.0, "bound of the gradient's norm")
    dtype: Literal["f32", "bf16"] = described("f32", "of activations; parameters are float32")
    seed: int = described(0, "of weights, problems, answers, order and anchors")

    log_every: int = described(20, "steps between lines of the log")
    eval_every: int = described(500, "steps between measurements on held-out problems")
    kept_packs: int = described(512, "packs of which the target's streams stay on the device")
    eval_problems: int = described(64, "held-out dialogues of each kind")
    save_every: int = described(500, "steps between checkpoints")
    keep: int = described(2, "checkpoints kept")
    max_seconds: float | None = described(None, "saves and ends after this time, to be resumed")

    def __post_init__(self) -> None:
        check_positive(self, "wave", "answer_tokens", "steps", "batch_tokens", "batch_anchors")
        check_positive(self, "sequence_anchors", "log_every", "eval_every", "eval_problems")
        check_positive(self, "save_every", "keep")
        for name in (
            *("short", "ledger", "long", "ce_weight", "tv_weight", "confidence_weight"),
            *("warmup_steps", "weight_decay", "seed", "kept_packs"),
        ):
            value = getattr(self, name)
            check(value >= 0, f"{name}={value} is negative")
        asked = self.short + self.ledger + self.long
        check(asked > 0, "short, ledger and long are all 0: there is nothing to learn from")
        for name in ("loss_decay", "learning_rate", "clip_norm"):
            value = getattr(self, name)
            check(value > 0, f"{name}={value} is not positive")
        share = self.decay_fraction
        check(0 <= share <= 1, f"decay_fraction={share} is not in 0..1")
        known = self.draft_cache in CACHE_FORMATS
        choices = ", ".join(CACHE_FORMATS)
        check(known, f"draft_cache={self.draft_cache!r} is not one of {choices}")
        limit = self.max_seconds
        check(limit is None or limit > 0, f"max_seconds={limit} is not positive")
