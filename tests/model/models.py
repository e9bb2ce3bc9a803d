"""Small random models for tests: a config, weights from a seed, and a `LoadedModel` around them."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from configs.model import ModelConfig
from configs.presets import tiny
from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.loaded import ASSETS, LoadedModel
from minimax_jax.model import Model
from pallas_kernels.layouts.pool import CacheFormats


def small(layers: int = 3, **changes) -> ModelConfig:
    """A model with a dense-attention first layer, then sparse ones; 2 chosen blocks of 16."""
    base = tiny()
    return replace(
        base,
        hidden_size=64,
        sparse_layers=(False,) + (True,) * (layers - 1) if layers > 1 else (True,),
        moe_layers=(False,) + (True,) * (layers - 1),
        indexer=replace(base.indexer, top_k=2),
        moe=replace(base.moe, num_experts=8, expert_dim=32, shared_dim=32),
        **changes,
    )


def random_model(config: ModelConfig, seed: int = 0) -> Model:
    """Weights from a seed; norms and router biases are not left at zero."""
    model = Model(config, nnx.Rngs(seed))
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        0.3 * jax.random.normal(key, leaf.shape) if leaf.ndim == 1 else leaf
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def random_loaded(config: ModelConfig | None = None, seed: int = 0, **formats) -> LoadedModel:
    """A random model with the bundled tokenizer and template; caches in float32 unless said
    otherwise.
    """
    folder: Path = ASSETS / "tiny"
    return LoadedModel(
        model=random_model(config or small(num_tokens=501), seed),
        formats=CacheFormats(**({"kv": "f32", "index": "f32"} | formats)),
        folder=folder,
        tokenizer=Tokenizer.load(folder),
        template=ChatTemplate.load(folder),
    )


def tokens(count: int, seed: int = 0, limit: int = 480) -> list[int]:
    """Random ids below the markers."""
    return jax.random.randint(jax.random.key(seed), (count,), 0, limit, jnp.int32).tolist()
