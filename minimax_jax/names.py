"""Checkpoint name <-> model path, both ways, from one table; and where a file has a leaf's values.

A *file name* loses its prefix (`language_model.model.`, `model.language_model.` or `model.`) and is
then a *name*, such as `layers.3.self_attn.q_proj.weight`. A *path* names a parameter of the model,
such as `layers.3.attention.q_proj.weight`. A `Place` says where a file has a leaf's values; its
`layout` is a reversible transform, named here and applied in `checkpoint_read`:

    whole          the tensor is the leaf
    per expert     tensor e is leaf[e]                                     (the released files)
    gate half      rows [0, F) of gate and up stacked, or even rows if interleaved
    up half        rows [F, 2F), or odd rows                     (transformers' text-only files)

In a tensor that stacks experts [E, ...] the same two halves are taken of every expert. What order
the bytes of a leaf have in memory is no matter of files: `quantize.has_kernel_order` says where
`layouts.nvfp4_pages.to_pages` is applied, `quantize.to_form` applies its inverse.

The drafter's parameters are in the same table; their names and paths begin with `dspark.`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

Layout = Literal["whole", "per expert", "gate half", "up half"]

RELEASED_PREFIX = "language_model.model."
RELEASED_HEAD = "language_model.lm_head."
DRAFTER = "dspark."
# Longer prefixes first; the head has none of its own beside `language_model.`.
PREFIXES = (RELEASED_PREFIX, "model.language_model.", "model.")
HEADS = (RELEASED_HEAD, "lm_head.")

# What we know and do not load.
KNOWN_PARTS = {
    "vision": re.compile(r"(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\."),
    "mtp": re.compile(r"((language_model\.)?model\.)?mtp\."),
    "dspark": re.compile(r"((language_model\.)?model\.)?dspark\."),
    "activation scale": re.compile(r".*\.(input_global_scale|input_scale)$"),
    "cache scale": re.compile(r".*\.(k_scale|v_scale)$"),
}
# What an expert tensor's name contains in any layout, ours or not.
EXPERT_NAME = re.compile(r"layers\.\d+\..*(experts(?!_)|switch_mlp|moe)")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a leaf's values are: the tensor `name`; `{e}` in it, if they lie per expert."""

    name: str
    layout: Layout = "whole"

    def names(self, num_experts: int) -> list[str]:
        """The tensors that make up the leaf, in order."""
        if self.layout != "per expert":
            return [self.name]
        return [self.name.replace("{e}", str(e)) for e in range(num_experts)]


def _mlp_rows(path: str, name: str) -> dict[str, tuple[Place, ...]]:
    fused = f"layers.{{i}}.{name}.gate_up_proj.weight"
    rows: dict[str, tuple[Place, ...]] = {
        f"layers.{{i}}.{path}.{part}.weight": (Place(name=f"layers.{{i}}.{name}.{part}.weight"),)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    rows[f"layers.{{i}}.{path}.gate_proj.weight"] += (Place(name=fused, layout="gate half"),)
    rows[f"layers.{{i}}.{path}.up_proj.weight"] += (Place(name=fused, layout="up half"),)
    return rows


def _layer_rows() -> dict[str, tuple[Place, ...]]:
    """What a layer may hold: model path -> places, the released one first."""
    same = {
        "input_norm": ["input_layernorm"],
        "post_attention_norm": ["post_attention_layernorm"],
        **{f"attention.{x}": [f"self_attn.{x}"] for x in ("q_norm", "k_norm")},
        **{f"attention.{x}_proj": [f"self_attn.{x}_proj"] for x in "qkvo"},
        **{
            f"attention.indexer.{x}": [f"self_attn.index_{x}", f"self_attn.indexer.{x}"]
            for x in ("q_proj", "k_proj", "q_norm", "k_norm")
        },
        "mlp.router": ["block_sparse_moe.gate", "mlp.gate"],
    }
    return {
        f"layers.{{i}}.{path}.weight": tuple(Place(name=f"layers.{{i}}.{n}.weight") for n in names)
        for path, names in same.items()
    }


def _expert_rows() -> dict[str, tuple[Place, ...]]:
    moe, mlp = "layers.{i}.block_sparse_moe", "layers.{i}.mlp"
    stacked = {
        "w1": Place(name=f"{mlp}.experts.gate_up_proj", layout="gate half"),
        "w3": Place(name=f"{mlp}.experts.gate_up_proj", layout="up half"),
        "w2": Place(name=f"{mlp}.experts.down_proj"),
    }
    rows = {
        f"{mlp}.experts.{w}.weight": (
            Place(name=f"{moe}.experts.{{e}}.{w}.weight", layout="per expert"),
            place,
        )
        for w, place in stacked.items()
    }
    bias = "e_score_correction_bias"
    rows[f"{mlp}.router.bias"] = (
        Place(name=f"{moe}.{bias}"),
        Place(name=f"{mlp}.gate.{bias}"),
    )
    return rows


def _drafter_rows() -> dict[str, tuple[Place, ...]]:
    """spec/dspark 1.2; a draft layer's parts are called as a target layer's."""
    rows = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "hidden_norm.weight",
        "norm.weight": "final_norm.weight",
        "markov.w1": "markov_head.markov_w1.weight",
        "markov.w2.weight": "markov_head.markov_w2.weight",
        "confidence.weight": "confidence_head.proj.weight",
        "confidence.bias": "confidence_head.proj.bias",
    }
    for path, (place, *_) in (_layer_rows() | _mlp_rows("mlp", "mlp")).items():
        if "indexer" not in path and "router" not in path:
            rows[path] = place.name.replace("layers.{i}.", "layers.{i}.decoder_layer.")
    return {DRAFTER + path: (Place(name=DRAFTER + name),) for path, name in rows.items()}


@cache
def table() -> dict[str, tuple[Place, ...]]:
    """Model path -> places, with `{i}` for the layer; the first place is the released files'."""
    shared = _mlp_rows("mlp.shared", "block_sparse_moe.shared_experts")
    in_transformers = _mlp_rows("mlp.shared", "mlp.shared_experts")
    return {
        "embedding": (Place(name="embed_tokens.weight"),),
        "norm.weight": (Place(name="norm.weight"),),
        "head.weight": (Place(name="lm_head.weight"),),
        **_layer_rows(),
        **_mlp_rows("mlp", "mlp"),
        **{path: places + in_transformers[path] for path, places in shared.items()},
        **_expert_rows(),
        **_drafter_rows(),
    }


def places(path: str) -> tuple[Place, ...]:
    """Where files may have the leaf at a model path, the released place first."""
    numbers = NUMBER.findall(path)
    layer = numbers[0] if numbers else ""
    rows = table()[NUMBER.sub("{i}", path)]
    return tuple(
        Place(name=place.name.replace("{i}", layer), layout=place.layout) for place in rows
    )


def released_place(path: str) -> Place:
    """The place of a leaf in the files that we write."""
    return places(path)[0]


def path_of(name: str) -> tuple[str, int | None] | None:
    """The model path and expert number of a name, of whatever layout; None for an unknown one.

    Inverse of `places`. A fused tensor belongs to two leaves; the gate is given.
    """
    numbers = NUMBER.findall(name)
    path = _paths().get(NUMBER.sub("{}", name))
    if path is None:
        return None
    expert = int(numbers[1]) if len(numbers) == 2 else None
    return path.replace("{i}", numbers[0]) if numbers else path, expert


def strip_prefix(file_name: str) -> str | None:
    """The name of a text-model or drafter tensor without its prefix; None if it has none of the
    known ones.
    """
    for head in HEADS:
        if file_name.startswith(head):
            return "lm_head." + file_name.removeprefix(head)
    for prefix in PREFIXES:
        if file_name.startswith(prefix):
            return file_name.removeprefix(prefix)
    return file_name if file_name.startswith(DRAFTER) else None


def add_prefix(name: str) -> str:
    """The released files' full name, inverse of `strip_prefix`."""
    if name.startswith("lm_head."):
        return RELEASED_HEAD + name.removeprefix("lm_head.")
    return RELEASED_PREFIX + name


def known_part(file_name: str) -> str | None:
    """Which of `KNOWN_PARTS` a tensor that is not loaded belongs to."""
    for part, pattern in KNOWN_PARTS.items():
        if pattern.match(file_name):
            return part
    return None


def layer_number(file_name: str) -> int | None:
    """The text layer that a tensor belongs to, by its full name in a file."""
    return path_layer(strip_prefix(file_name) or "")


def path_layer(path: str) -> int | None:
    """The layer that a parameter belongs to, by its path."""
    match = re.match(r"layers\.(\d+)\.", path)
    return int(match[1]) if match else None


def with_layer(file_name: str, layer: int) -> str:
    """The same tensor's name in another layer."""
    return re.sub(r"\blayers\.\d+\.", f"layers.{layer}.", file_name, count=1)


@cache
def _paths() -> dict[str, str]:
    paths: dict[str, str] = {}
    for name, path in _pairs():
        paths.setdefault(name, path)
    return paths


def _pairs() -> Iterator[tuple[str, str]]:
    for path, rows in table().items():
        for place in rows:
            yield place.name.replace("{i}", "{}").replace("{e}", "{}"), path
