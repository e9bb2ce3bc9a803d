"""Small random drafters for tests, beside the small targets of `tests.model.models`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.model import ModelConfig
from configs.parts import DrafterConfig, MLPConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache, local_heads, pool_layout
from minimax_jax.drafter import Drafter
from pallas_kernels.layouts.pool import CacheFormats
from tests.model.models import small

Z, WINDOW = 16, 40
EXACT = CacheFormats(kv="f32", index="f32", draft="f32")


def drafted(target: ModelConfig | None = None, **changes) -> ModelConfig:
    """A small target with a drafter of two layers and a window of 40 tokens."""
    target = target or small(num_tokens=501)
    drafter = DrafterConfig(
        num_layers=2,
        attention=replace(target.attention, rope_theta=1e4),
        mlp=MLPConfig(dense_dim=128, limit=2.0),
        norm_eps=1e-5,
        markov_rank=16,
        draft_block=7,
        noise_token=490,
        window=WINDOW,
        target_layers=(0, target.num_layers - 1),
    )
    return replace(target, drafter=replace(drafter, **changes))


def random_drafter(config: ModelConfig, seed: int = 0) -> Drafter:
    """Weights from a seed; norms, biases and the Markov head are not left at zero."""
    drafter = Drafter(config, nnx.Rngs(seed))
    leaves, tree = jax.tree.flatten(drafter)
    keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
    noisy = [
        leaf if leaf.ndim == 2 and jnp.any(leaf) else 0.3 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def empty_cache(config: ModelConfig, num_blocks: int, formats: CacheFormats = EXACT) -> Cache:
    """A cache whose every byte is 0xFF, which is NaN in each format: nothing unwritten is read."""
    mesh = jax.sharding.get_mesh()
    mesh = None if mesh.empty else mesh
    layout = pool_layout(config, formats, local_heads(config, mesh))
    cache = Cache.empty(layout, num_blocks, mesh)
    return cache.with_pool(jnp.full_like(cache.pool, 0xFF))


def at(positions: np.ndarray, table: np.ndarray) -> Batch:
    """A batch that says where tokens are, whatever they are."""
    positions = jnp.asarray(positions, jnp.int32)
    return Batch(
        tokens=jnp.zeros_like(positions),
        positions=positions,
        block_table=jnp.asarray(table, jnp.int32),
    )


def streams(config: ModelConfig, *shape: int, seed: int = 0) -> list[jax.Array]:
    """Random residual streams [*shape, D] after each tapped layer."""
    assert config.drafter is not None
    rng = np.random.default_rng(seed)
    size = (*shape, config.hidden_size)
    return [jnp.asarray(rng.normal(size=size), jnp.float32) for _ in config.drafter.target_layers]
