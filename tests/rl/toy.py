"""A model of two layers and a run of eight steps, small enough to compile in seconds."""

from dataclasses import replace
from pathlib import Path

from configs.model import ModelConfig
from configs.parts import AttentionConfig, IndexerConfig, MLPConfig, MoEConfig
from configs.sft import SFTConfig
from minimax_jax.loaded import ASSETS
from rl.sft_run import Run, start_run

TEXT = ASSETS / "tiny"

MODEL = ModelConfig(
    vocab_size=512,
    num_tokens=512,
    hidden_size=32,
    sparse_layers=(True, True),
    moe_layers=(False, True),
    max_context=128,
    norm_eps=1e-6,
    attention=AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=16, rotary_dim=8, rope_theta=1e4
    ),
    indexer=IndexerConfig(num_heads=1, head_dim=16, block_size=16, top_k=2),
    mlp=MLPConfig(dense_dim=32),
    moe=MoEConfig(num_experts=4, experts_per_token=2, expert_dim=32, shared_dim=32),
)
CONFIG = SFTConfig(
    steps=8,
    batch_tokens=512,
    long_fraction=0.0,
    list_steps=0,
    long_steps=0,
    dense_steps=0,
    learning_rate=1e-2,
    warmup_steps=1,
    indexer_queries=32,
    log_every=2,
    eval_every=100,
    eval_problems=4,
    save_every=3,
)


def toy_run(out: Path, **changes: object) -> Run:
    """The run, with some fields changed."""
    return start_run(MODEL, replace(CONFIG, **changes), TEXT, out)
