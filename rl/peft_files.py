"""A trained adapter into PEFT's files, a pair of matrices for each linear and each expert under the
checkpoint's own names (spec/rl 3.2). `minimax_jax.peft` reads them.

A matrix that experts share is written for each, which every reader of the format understands.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float

from configs.model import ModelConfig
from minimax_jax import peft
from minimax_jax.checkpoint.tensor_file import Spec, Writer
from minimax_jax.names import add_prefix, released_place
from rl.optimizer import Parameters

SIDES = {side: end for end, side in peft.SIDES.items()}

Matrix = Float[np.ndarray, "M N"]


def write_adapter(
    parameters: Parameters, config: ModelConfig, base: str, *, rank: int, alpha: float, folder: Path
) -> None:
    """Writes an adapter to `base`, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    matrices = dict(_matrices(parameters, config))
    specs = [
        Spec(name=name, dtype=np.dtype(np.float32), shape=x.shape) for name, x in matrices.items()
    ]
    with Writer(folder / peft.MATRICES, specs) as writer:
        for name, x in matrices.items():
            writer.write(name, x)
    modules = sorted({name.split(".")[-3] for name in matrices})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
    }
    (folder / peft.CONFIG).write_text(json.dumps(described, indent=2) + "\n", "utf-8")


def _matrices(parameters: Parameters, config: ModelConfig) -> Iterator[tuple[str, Matrix]]:
    for name, x in parameters.items():
        names, values = list(_names(name, config)), np.asarray(x, np.float32)
        values = values if values.ndim == 3 else values[None]
        for number, one in enumerate(names):
            yield one, values[number if len(values) > 1 else 0]


def _names(parameter: str, config: ModelConfig) -> Iterator[str]:
    """The file's names of `layers.3.mlp.experts.w1.a`: one, or one an expert."""
    path, _, side = parameter.rpartition(".")
    place = add_prefix(released_place(f"{path}.weight").name).removesuffix(".weight")
    experts = range(config.moe.num_experts) if "{e}" in place else (0,)
    for expert in experts:
        yield f"{peft.PREFIX}{place.replace('{e}', str(expert))}{SIDES[side]}"
