"""Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`, a pair of
matrices for each linear and each expert under the checkpoint's own names (spec/rl 3.2).

A matrix that experts share is written for each, which every reader of the format understands.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from configs.model import ModelConfig
from minimax_jax.checkpoint.tensor_file import Entry, Spec, Writer, read_header
from minimax_jax.names import add_prefix, released_place
from rl.optimizer import Parameters

CONFIG, MATRICES = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SIDES = {"a": "lora_A", "b": "lora_B"}

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
    with Writer(folder / MATRICES, specs) as writer:
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
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", "utf-8")


def read_adapter(folder: Path, like: Parameters, config: ModelConfig) -> Parameters:
    """The arrays of an adapter in the names and shapes of `like`.

    Raises ValueError for a folder that holds none, a matrix that is missing or of another shape
    (such as another rank), and ones that `like` has no place for.
    """
    if not (folder / MATRICES).is_file():
        raise ValueError(f"{folder} holds no {MATRICES}")
    entries = {entry.name: entry for entry in read_header(folder / MATRICES)}
    parameters: Parameters = {}
    for name, x in like.items():
        names = list(_names(name, config))
        parts = [_read(entries, one, x.shape[-2:]) for one in names]
        stacked = np.stack(parts[: x.shape[0]]).reshape(x.shape)
        same = x.ndim == 2 or x.shape[0] == len(parts)
        if not same and any(not np.array_equal(one, parts[0]) for one in parts):
            raise ValueError(f"{folder}: the experts do not share {names[0]} and its like")
        parameters[name] = jnp.asarray(stacked)
    if entries:
        raise ValueError(f"{folder} holds {next(iter(entries))}, which this adapter has not")
    return parameters


def _read(entries: dict[str, Entry], name: str, shape: tuple[int, ...]) -> Matrix:
    entry = entries.pop(name, None)
    if entry is None or entry.shape != shape:
        found = "missing" if entry is None else f"{list(entry.shape)}"
        raise ValueError(f"{name} is {found}, not {list(shape)}")
    flat = np.fromfile(entry.file, entry.dtype, count=entry.size, offset=entry.start)
    return flat.reshape(shape).astype(np.float32)


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
        yield f"{PREFIX}{place.replace('{e}', str(expert))}.{SIDES[side]}.weight"
