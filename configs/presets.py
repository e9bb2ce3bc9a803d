"""Named model shapes: the two released models, the bundled small one and a random one for tests."""

from dataclasses import replace

from configs.model import ModelConfig
from configs.parts import (
    AttentionConfig,
    DrafterConfig,
    IndexerConfig,
    MLPConfig,
    MoEConfig,
    QuantizationConfig,
)


def m3() -> ModelConfig:
    """MiniMax-M3, BF16: dense attention and dense MLP in layers 0-2 (spec/model 1.1)."""
    return ModelConfig(
        vocab_size=200064,
        num_tokens=200061,
        hidden_size=6144,
        sparse_layers=(False,) * 3 + (True,) * 57,
        moe_layers=(False,) * 3 + (True,) * 57,
        max_context=1048576,
        norm_eps=1e-6,
        attention=AttentionConfig(
            num_heads=64, num_kv_heads=4, head_dim=128, rotary_dim=64, rope_theta=5e6
        ),
        indexer=IndexerConfig(num_heads=4, head_dim=128, block_size=128, top_k=16),
        mlp=MLPConfig(dense_dim=12288),
        moe=MoEConfig(num_experts=128, experts_per_token=4, expert_dim=3072, shared_dim=3072),
    )


def m3_1_flash() -> ModelConfig:
    """MiniMax-M3.1-Flash: sparse attention in every layer, NVFP4 experts and caches, DSpark
    (spec/model 1.3).
    """
    base = m3()
    return replace(
        base,
        sparse_layers=(True,) * 60,
        drafter=m3_1_drafter(),
        quantization=QuantizationConfig(
            projections="mxfp8", experts="nvfp4", kv_cache="nvfp4", index_cache="nvfp4"
        ),
    )


def tiny() -> ModelConfig:
    """The bundled small model: every mechanism of M3.1 at about 1.3 M active parameters."""
    return ModelConfig(
        vocab_size=512,
        num_tokens=512,
        hidden_size=128,
        sparse_layers=(True,) * 5,
        moe_layers=(False,) + (True,) * 4,
        max_context=2048,
        norm_eps=1e-6,
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=4, head_dim=32, rotary_dim=16, rope_theta=5e6
        ),
        indexer=IndexerConfig(num_heads=4, head_dim=32, block_size=16, top_k=4),
        mlp=MLPConfig(dense_dim=256),
        moe=MoEConfig(num_experts=16, experts_per_token=4, expert_dim=64, shared_dim=128),
        quantization=QuantizationConfig(
            projections="mxfp8", experts="nvfp4", kv_cache="nvfp4", index_cache="nvfp4"
        ),
    )


def tiny_drafter() -> DrafterConfig:
    """The drafter of the bundled small model: its window of 128 tokens is shorter than most of its
    contexts, its noise is the last row of the embedding, which is no token.
    """
    base = tiny()
    return DrafterConfig(
        num_layers=2,
        attention=base.attention,
        mlp=base.mlp,
        norm_eps=base.norm_eps,
        markov_rank=64,
        draft_block=7,
        noise_token=base.vocab_size - 1,
        window=128,
        target_layers=(0, 2, 4),
        projections="mxfp8",
    )


def m3_1_drafter() -> DrafterConfig:
    """The released drafter of M3.1 (spec/dspark 1.1)."""
    attention = m3().attention
    return DrafterConfig(
        num_layers=5,
        attention=attention,
        mlp=MLPConfig(dense_dim=12288),
        norm_eps=1e-6,
        markov_rank=256,
        draft_block=7,
        noise_token=200058,
        window=4096,
        target_layers=(3, 17, 31, 45, 59),
        projections="mxfp8",
    )


def tiny_random() -> ModelConfig:
    """T0 of spec/field_cases: dense then sparse layers, two chosen blocks, a padded vocabulary; for
    random weights.
    """
    return ModelConfig(
        vocab_size=384,
        num_tokens=300,
        hidden_size=64,
        sparse_layers=(False, True, True, True),
        moe_layers=(False, True, True, True),
        max_context=8192,
        norm_eps=1e-6,
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=4, head_dim=32, rotary_dim=16, rope_theta=5e6
        ),
        indexer=IndexerConfig(num_heads=4, head_dim=32, block_size=128, top_k=2),
        mlp=MLPConfig(dense_dim=128),
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_dim=32, shared_dim=32),
    )


PRESETS = {
    "m3": m3,
    "m3_1_flash": m3_1_flash,
    "tiny": tiny,
    "tiny_random": tiny_random,
}

DRAFTERS = {"m3_1_flash": m3_1_drafter, "tiny": tiny_drafter}
