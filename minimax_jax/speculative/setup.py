"""What a loaded model speculates with, and whether it can do what is asked of it."""

from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from configs.model import ModelConfig
from configs.speculative import SpeculativeConfig
from minimax_jax.checkpoint.folder import DRAFTER, read_config
from minimax_jax.drafter import Drafter
from minimax_jax.speculative.calibration import Calibration, read_calibration
from minimax_jax.speculative.checkpoint import load_drafter

Asked = SpeculativeConfig | bool | None


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A drafter, how it is used, and what its confidences are worth."""

    drafter: Drafter
    config: SpeculativeConfig
    calibration: Calibration

    @property
    def num_drafts(self) -> int:
        """How many drafts a step verifies at most."""
        return self.config.verified(self.drafter.config.draft_block)

    def __str__(self) -> str:
        return self.config.described(self.drafter.config.draft_block)


def drafted_config(folder: Path, asked: SpeculativeConfig) -> ModelConfig:
    """The config of a folder whose drafter can do what is asked; ValueError if it cannot."""
    config = read_config(folder)
    if config.drafter is None:
        raise ValueError(f"{folder} has no {DRAFTER}/config.json: there is no drafter to speculate")
    asked.verified(config.drafter.draft_block)
    return config


def load_speculation(
    folder: Path, config: ModelConfig, asked: SpeculativeConfig, dtype: DTypeLike, mesh: Mesh | None
) -> Speculation:
    """The drafter of a folder whose `drafted_config` is `config`, with its calibration."""
    assert config.drafter is not None
    drafter, _ = load_drafter(folder, config, dtype=dtype, mesh=mesh)
    calibration = read_calibration(folder / DRAFTER, config.drafter.draft_block)
    return Speculation(drafter=drafter, config=asked, calibration=calibration)


def config_of_load(asked: Asked) -> SpeculativeConfig | None:
    """How a model that is to be loaded will speculate: not at all, by default, or as asked."""
    if isinstance(asked, SpeculativeConfig):
        return asked
    return SpeculativeConfig() if asked else None


def config_of_call(speculation: Speculation | None, asked: Asked) -> SpeculativeConfig | None:
    """How a call speculates with a model that was loaded with `speculation`: as that says unless
    something else is asked, False for instance. ValueError if it cannot.
    """
    if asked is False or (asked is None and speculation is None):
        return None
    if speculation is None:
        raise ValueError("the model was loaded without its drafter: load(..., speculative=True)")
    if not isinstance(asked, SpeculativeConfig):
        return speculation.config
    asked.verified(speculation.drafter.config.draft_block)
    wanted, has = asked.kv_cache_dtype, speculation.config.kv_cache_dtype
    if wanted != has:
        raise ValueError(f"kv_cache_dtype={wanted!r}, but the model was loaded with {has!r}")
    return asked
