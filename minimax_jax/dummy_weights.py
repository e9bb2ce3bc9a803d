"""What `load_format="dummy"` gives: random weights in the formats that a config names, for
measuring a model of which nothing else is there.
"""

from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from configs.model import ModelConfig
from configs.parts import QuantizationConfig
from configs.speculative import SpeculativeConfig
from minimax_jax.checkpoint.folder import DRAFTER
from minimax_jax.model import Model
from minimax_jax.quantize import Format
from minimax_jax.random_model import random_drafter, random_model
from minimax_jax.speculative.calibration import read_calibration
from minimax_jax.speculative.setup import Speculation
from sharding.rules import Rules

LOAD_FORMATS = ("auto", "dummy")
_FORMATS: dict[tuple[str, str], Format] = {  # of projections and experts
    ("mxfp8", "nvfp4"): "m3.1",
    ("mxfp8", "mxfp8"): "mxfp8",
    ("bf16", "bf16"): "bf16",
}


def check_load_format(name: str, quantization: QuantizationConfig) -> None:
    """ValueError for an unknown name, and for "dummy" where no random model has the formats."""
    if name not in LOAD_FORMATS:
        raise ValueError(f"load_format={name!r} is not one of {', '.join(LOAD_FORMATS)}")
    if name == "dummy":
        format_of(quantization)


def format_of(quantization: QuantizationConfig) -> Format:
    """The name under which a random model has what a checkpoint stores."""
    stored = quantization.projections, quantization.experts
    if stored not in _FORMATS:
        known = ", ".join(f"{projections} and {experts}" for projections, experts in _FORMATS)
        raise ValueError(
            f"load_format='dummy' has no random weights of {stored[0]} projections and {stored[1]} "
            f"experts: {known} it has"
        )
    return _FORMATS[stored]


def dummy_model(config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None, rules: Rules) -> Model:
    """A model of a `read_target_config`."""
    return random_model(config, dtype, format_of(config.quantization), mesh=mesh, rules=rules)


def dummy_speculation(
    folder: Path, config: ModelConfig, asked: SpeculativeConfig, dtype: DTypeLike, mesh: Mesh | None
) -> Speculation:
    """Of a folder whose `drafted_config` is `config`. Hardly any draft will be accepted."""
    assert config.drafter is not None
    drafter = random_drafter(config, dtype, format_of(config.quantization), mesh=mesh)
    calibration = read_calibration(folder / DRAFTER, config.drafter.draft_block)
    return Speculation(drafter=drafter, config=asked, calibration=calibration)
