"""What is measured on: a random model with its drafter, the layout of its pages, and what memory
they leave.
"""

import argparse
from dataclasses import replace

import jax

from configs.model import ModelConfig
from configs.parts import CacheFormat
from configs.presets import DRAFTERS
from configs.speculative import SpeculativeConfig
from minimax_jax.cache import formats_of, local_heads, pool_layout
from minimax_jax.drafter import Drafter
from minimax_jax.model import Model
from minimax_jax.random_model import random_drafter, random_model
from pallas_kernels.layouts.pool import PoolLayout
from sharding.axes import DATA
from sharding.rules import Rules

_PLAIN: dict[str, CacheFormat] = {"float32": "f32", "bfloat16": "bf16"}


def made_model(config: ModelConfig, options: argparse.Namespace, rules: Rules) -> Model:
    """A random model on the current mesh."""
    how = {"seed": options.seed, "mesh": jax.sharding.get_mesh(), "rules": rules}
    return jax.block_until_ready(random_model(config, options.dtype, options.weights, **how))


def made_drafter(config: ModelConfig, options: argparse.Namespace) -> Drafter:
    """The random drafter of a `drafted_config` on the current mesh."""
    how = {"seed": options.seed, "mesh": jax.sharding.get_mesh()}
    return random_drafter(config, options.dtype, options.weights, **how)


def drafted_config(preset: str, config: ModelConfig, committed: float) -> ModelConfig:
    """The first layers of a preset with its drafter, which taps those of its target layers that are
    there. ValueError if the preset has no drafter, if none of these layers is there, or if no step
    can commit so many tokens.
    """
    if preset not in DRAFTERS:
        raise ValueError(f"{preset} has no drafter; {', '.join(DRAFTERS)} have")
    drafter, known = DRAFTERS[preset](), config.num_layers
    most = drafter.draft_block + 1
    if not 1 <= committed <= most:
        raise ValueError(f"speculative={committed:g}, but a step commits 1 to {most} tokens")
    taps = tuple(layer for layer in drafter.target_layers if layer < known)
    if not taps:
        raise ValueError(
            f"the drafter taps layers {drafter.target_layers}, but there are {known} layers"
        )
    return replace(config, drafter=replace(drafter, target_layers=taps))


def layout_of(config: ModelConfig, dtype: str) -> PoolLayout:
    """Of the pages of a rank of the current mesh."""
    formats = formats_of(config, _PLAIN[dtype])
    if config.drafter is not None:
        formats = replace(formats, draft=SpeculativeConfig().cache_format(_PLAIN[dtype]))
    return pool_layout(config, formats, local_heads(config, jax.sharding.get_mesh()))


def memory_text(layout: PoolLayout, seconds: float) -> str:
    """What is held after the weights were made, which took so long, and what else would fit."""
    text, mesh = f"weights made in {seconds:.1f} s", jax.sharding.get_mesh()
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return text
    held, limit = stats["bytes_in_use"], stats["bytes_limit"]
    tokens = (limit - held) // layout.block_bytes * layout.block_size * mesh.shape[DATA]
    return (
        f"{text}: {held / 1e9:.1f} of a device's {limit / 1e9:.1f} GB; the rest, less what steps "
        f"need, holds {tokens} tokens of pages"
    )
