"""MiniMax-M3 and M3.1-Flash in JAX: `load`, `logits`, `generate`, `save`."""

from minimax_jax.completion import Completion, Delta
from minimax_jax.generate import generate
from minimax_jax.loaded import LoadedModel, load, logits, save

__all__ = ["Completion", "Delta", "LoadedModel", "generate", "load", "logits", "save"]
