"""A supervised run: model shape, config, text, folder; and what a resumed run may not change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from configs.sft import SFTConfig
from minimax_jax.chat import Tokenizer
from rl.data import HELD_OUT
from rl.pack_stream import PackRecipe, pack_of_kind
from rl.packing import Pack

MEASURED_PACKS = 2  # of each kind, held out
# Fields that a resumed run may not change: it would not be the same data or arithmetic any more.
FIXED = ("batch_tokens", "dtype", "seed")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to train, on what, and where to. `text` is the folder of tokenizer and chat template."""

    model: ModelConfig
    config: SFTConfig
    text: Path
    out: Path

    def __post_init__(self) -> None:
        block, context = self.model.indexer.block_size, self.model.max_context
        size = self.config.batch_tokens
        if size % block:
            raise ValueError(f"batch_tokens={size} is not a multiple of block_size={block}")
        if "long" in self.kinds and size < context:
            raise ValueError(f"batch_tokens={size} cannot hold a long problem of {context} tokens")
        wanted, there = Tokenizer.load(self.text).num_tokens, self.model.vocab_size
        if wanted > there:
            raise ValueError(f"the tokenizer has {wanted} tokens, more than vocab_size={there}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of pack that the run holds."""
        config = self.config
        lists = ("list",) if config.list_steps else ()
        long = ("long",) if config.long_steps or config.long_fraction else ()
        return ("short", *lists, *long)

    @property
    def fixed(self) -> dict[str, Any]:
        """What a resumed run may not change."""
        fixed = {name: getattr(self.config, name) for name in FIXED}
        return {"model": str(self.model), **fixed}

    def recipe(self, split: str) -> PackRecipe:
        """The recipe of a split's packs."""
        return PackRecipe(
            folder=str(self.text),
            split=split,
            seed=self.config.seed,
            tiles=self.config.batch_tokens // self.model.indexer.block_size,
            block_size=self.model.indexer.block_size,
            max_context=self.model.max_context,
            list_steps=self.config.list_steps,
            long_steps=self.config.long_steps,
            long_fraction=self.config.long_fraction,
        )


def start_run(model: ModelConfig, config: SFTConfig, text: Path, out: Path) -> Run:
    """A run of a preset, with the tokenizer's tokens, and NVFP4 caches where it names none."""
    tokens, stored = Tokenizer.load(text).num_tokens, model.quantization
    kv, index = stored.kv_cache or "nvfp4", stored.index_cache or "nvfp4"
    stored = replace(stored, kv_cache=kv, index_cache=index)
    tokens = min(tokens, model.vocab_size)  # too many are refused by the run
    model = replace(model, num_tokens=tokens, quantization=stored)
    return Run(model=model, config=config, text=text, out=out)


def measured_packs(run: Run) -> Iterator[tuple[str, Pack]]:
    """Held-out packs with their kind, on the device."""
    recipe = run.recipe(HELD_OUT)
    for kind in run.kinds:
        for number in range(MEASURED_PACKS):
            yield kind, jax.tree.map(jnp.asarray, pack_of_kind(recipe, kind, number))
