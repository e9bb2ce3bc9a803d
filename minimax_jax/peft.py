"""Adapters that PEFT has written (`adapter_config.json`, `adapter_model.safetensors`) as trees of
`LowRank`, for a model that is loaded.

A file names a linear as the checkpoint does, one pair of matrices each, experts one by one; an
expert without a pair has none of the adapter.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from minimax_jax import names
from minimax_jax.checkpoint import parameters_of
from minimax_jax.checkpoint.tensor_file import Entry, read_header
from minimax_jax.lora import Adapter, LowRank
from minimax_jax.model import Model

CONFIG, MATRICES = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SIDES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
# Modules that take an adapter, by the last part of their path.
LINEARS = {*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# What PEFT can be told to do that is more than y + s (x A) B of one rank and scale.
BEYOND = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
}

# (path, expert) -> side -> tensor
Pairs = dict[tuple[str, int | None], dict[str, Entry]]


def read_adapter(folder: str | Path, model: Model) -> Adapter:
    """The adapter in a folder. Raises ValueError with one sentence for what is no adapter of this
    model, or more than pairs of matrices.
    """
    folder = Path(folder)
    scale, pairs = _scale(folder), _pairs(folder)
    shapes = {path: p.get_value().shape for path, p in parameters_of(model).items()}
    by_path: dict[str, dict[int | None, dict[str, Entry]]] = defaultdict(dict)
    for (path, expert), sides in pairs.items():
        by_path[path][expert] = sides
    tree: dict[str, Any] = {}
    for path, experts in by_path.items():
        if path not in shapes:
            raise ValueError(f"{folder}: {path} is no part of this model")
        *parents, last = path.removesuffix(".weight").split(".")
        branch = tree
        for name in parents:
            branch = branch.setdefault(name, {})
        branch[last] = _low_rank(folder, path, experts, shapes[path], scale)
    return tree


def _scale(folder: Path) -> float:
    """alpha / rank, or alpha / sqrt(rank)."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no adapter: expected a file {CONFIG}")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {config.get('peft_type')!r} is not LORA")
    for name, usual in BEYOND.items():
        if config.get(name) not in (usual, None, [], {}, False):
            raise ValueError(f"{path}: {name}={config[name]!r} is not supported")
    rank, alpha = config["r"], config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs(folder: Path) -> Pairs:
    path = folder / MATRICES
    if not path.is_file():
        raise ValueError(f"{folder} holds no {MATRICES}")
    pairs: Pairs = defaultdict(dict)
    for entry in read_header(path):
        pairs[_place(entry)][_side(entry.name)] = entry
    return pairs


def _side(name: str) -> str:
    return next((side for end, side in SIDES.items() if name.endswith(end)), "")


def _place(entry: Entry) -> tuple[str, int | None]:
    """The path of the linear that a tensor belongs to, and its expert."""
    module = entry.name.removeprefix(PREFIX)
    for end in SIDES:
        module = module.removesuffix(end)
    name = names.strip_prefix(f"{module}.weight")
    found = None if name is None else names.path_of(name)
    if not _side(entry.name) or found is None:
        raise ValueError(f"{entry}: this is no matrix of an adapter to this model")
    path, expert = found
    released = names.released_place(path)
    is_fused = released.layout == "per expert" and expert is None
    if path.split(".")[-2] not in LINEARS or is_fused:
        raise ValueError(f"{entry}: {module} takes no adapter")
    return path, expert


def _low_rank(
    folder: Path,
    path: str,
    experts: Mapping[int | None, Mapping[str, Entry]],
    shape: tuple[int, ...],
    scale: float,
) -> LowRank:
    """The pair of one linear of shape [*E, F, D]."""
    ranks = (sides["a"].shape[0] for sides in experts.values() if "a" in sides)
    rank = max(ranks, default=0)
    *count, out, width = shape
    a = np.zeros((*count, rank, width), np.float32)
    b = np.zeros((*count, out, rank), np.float32)
    for expert, sides in experts.items():
        where = () if expert is None else (expert,)
        for side, whole in (("a", a), ("b", b)):
            if side not in sides or sides[side].shape != whole[where].shape:
                found = list(sides[side].shape) if side in sides else "missing"
                raise ValueError(
                    f"{folder}: lora_{side.upper()} of {path.removesuffix('.weight')} is {found}, "
                    f"not {list(whole[where].shape)}"
                )
            whole[where] = sides[side].read().astype(np.float32)
    return LowRank(a=jnp.asarray(a), b=jnp.asarray(b), scale=scale)
