"""The parts of a model's shape: attention, indexer, MLP, experts, drafter, stored formats.

Each refuses an impossible combination in one sentence. Letters in comments are those of
`sharding.axes`.
"""

from dataclasses import dataclass
from typing import Literal

CacheFormat = Literal["f32", "bf16", "fp8", "nvfp4"]
WeightFormat = Literal["bf16", "mxfp8", "nvfp4"]
CACHE_FORMATS = ("f32", "bf16", "fp8", "nvfp4")


def check(condition: bool, sentence: str) -> None:
    """Raises ValueError with the sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def check_positive(part: object, *names: str) -> None:
    """Raises unless each named field of a config part is at least 1."""
    for name in names:
        value = getattr(part, name)
        check(isinstance(value, int | float), f"{name}={value!r} is not a number")
        check(value >= 1, f"{name}={value} is not at least 1")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention with per-head norms and rotary embedding on the first `rotary_dim` of
    H.
    """

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rotary_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "num_kv_heads", "head_dim")
        n, k, h, r = self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_dim
        check(n % k == 0, f"num_heads={n} is not a multiple of num_kv_heads={k}")
        check(
            r % 2 == 0 and 0 <= r <= h, f"rotary_dim={r} is not an even number in 0..head_dim={h}"
        )
        check(self.rope_theta > 0, f"rope_theta={self.rope_theta} is not positive")


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """MSA's indexer: K index heads share one index key; each query keeps its best `top_k` blocks of
    `block_size` tokens.
    """

    num_heads: int
    head_dim: int  # I
    block_size: int  # Z
    top_k: int  # C
    init_blocks: int = 0
    local_blocks: int = 1

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "block_size", "top_k", "local_blocks")
        block = self.block_size  # NVFP4 groups and the kernels' tiles are 16 wide
        check(block % 16 == 0, f"block_size={block} is not a multiple of 16")
        check(self.init_blocks >= 0, f"init_blocks={self.init_blocks} is negative")
        forced = self.init_blocks + self.local_blocks
        check(forced <= self.top_k, f"top_k={self.top_k} blocks cannot hold {forced} forced blocks")


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """SwiGLU-OAI: y = min(g, limit) sigmoid(alpha min(g, limit)) (clip(u, +-limit) + beta)."""

    dense_dim: int  # F of the layers without experts
    alpha: float = 1.702
    limit: float = 7.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "dense_dim")
        check(self.limit > 0, f"swiglu_limit={self.limit} is not positive")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """E routed experts of width F, the best X by biased sigmoid score, plus one shared expert."""

    num_experts: int  # E
    experts_per_token: int  # X
    expert_dim: int  # F
    shared_dim: int
    routed_scale: float = 2.0

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "experts_per_token", "expert_dim", "shared_dim")
        e, x = self.num_experts, self.experts_per_token
        check(x <= e, f"num_experts_per_tok={x} is more than num_local_experts={e}")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """DSpark: a small sliding-window transformer over the target's hidden states of
    `target_layers`, a Markov head of rank `markov_rank` and a confidence head.
    """

    num_layers: int
    attention: AttentionConfig  # its key/value heads are as the target's: they share pages
    mlp: MLPConfig
    norm_eps: float
    markov_rank: int  # R
    draft_block: int  # tokens proposed a step
    noise_token: int
    window: int  # tokens that a query sees to its left, itself included
    target_layers: tuple[int, ...]
    confidence_head: bool = True
    projections: WeightFormat = "bf16"  # as stored; the target's format is its own

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "markov_rank", "draft_block", "window")
        taps = self.target_layers
        check(len(taps) > 0, "the drafter names no target layers")
        distinct = len(set(taps)) == len(taps) and min(taps) >= 0
        check(distinct, f"the drafter's target layers {list(taps)} are not distinct layers from 0")
        check(self.noise_token >= 0, f"noise_token={self.noise_token} is negative")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What a checkpoint stores: the format of projections, of routed experts and of the two
    caches.
    """

    projections: WeightFormat = "bf16"
    experts: WeightFormat = "bf16"
    kv_cache: CacheFormat | None = None
    index_cache: CacheFormat | None = None

    def __post_init__(self) -> None:
        for name in ("kv_cache", "index_cache"):
            value = getattr(self, name)
            known = value is None or value in CACHE_FORMATS
            check(known, f"{name}={value!r} is not one of {', '.join(CACHE_FORMATS)}")
