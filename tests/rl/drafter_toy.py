"""A target that mostly says the id after the last one, and a drafter of one layer for it."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from configs.drafter_training import DrafterTrainingConfig
from configs.parts import DrafterConfig
from minimax_jax.cache import CacheFormats
from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.loaded import LoadedModel
from minimax_jax.model import Model
from rl.train_drafter import DrafterRun
from tests.rl.toy import MODEL, TEXT

TOKENS = 501
TARGET = replace(MODEL, num_tokens=TOKENS, max_context=512)
DRAFTER = DrafterConfig(
    num_layers=1,
    attention=MODEL.attention,
    mlp=MODEL.mlp,
    norm_eps=1e-6,
    markov_rank=32,
    draft_block=7,
    noise_token=511,
    window=24,
    target_layers=(0, 1),
    projections="mxfp8",
)
CONFIG = DrafterTrainingConfig(
    short=24,
    ledger=4,
    long=0,
    wave=12,
    answer_tokens=20,
    steps=8,
    batch_tokens=1024,
    batch_anchors=96,
    learning_rate=2e-2,
    warmup_steps=1,
    log_every=2,
    eval_every=4,
    eval_problems=6,
    save_every=3,
    kept_packs=1,
)


@cache
def target() -> LoadedModel:
    """Its head is the embedding, moved on by one id, so what it says is a chain with some noise."""
    model = Model(TARGET, nnx.Rngs(0))
    rows = model.embedding.get_value()
    model.head.weight.set_value(3 * jnp.roll(rows, 1, axis=0))
    return LoadedModel(
        model=model,
        formats=CacheFormats(kv="nvfp4", index="nvfp4"),
        folder=TEXT,
        tokenizer=Tokenizer.load(TEXT),
        template=ChatTemplate.load(TEXT),
    )


def toy_drafter_run(out: Path, **changes: object) -> DrafterRun:
    """A run of eight steps, with some fields of its config changed."""
    config = replace(CONFIG, **changes)
    return DrafterRun(loaded=target(), drafter=DRAFTER, config=config, out=out)
