"""What is in a checkpoint folder beside the weights: `config.json` as we write it, and the files
that go along unchanged.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from configs.model import ModelConfig
from configs.parts import QuantizationConfig, WeightFormat
from minimax_jax import names
from minimax_jax.checkpoint.files import read_json
from minimax_jax.checkpoint.write import Kind
from minimax_jax.quantize import is_expert, is_projection

# Tokenizer, template, generation and processor files. Never code, and no quantisation of before.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
)
DRAFTER = "dspark"
# What a source's config says of its own storage or code, which is ours to say, or not copied.
_STALE = ("quantization_config", "auto_map", "torch_dtype", "dtype")
_IGNORED = ["lm_head", "model.embed_tokens", "vision_tower"]
_IGNORED += ["multi_modal_projector", "patch_merge_mlp"]
_LAYER_LISTS = ("sparse_attention_freq", "sparse_disable_index_value", "moe_layer_freq")
_LAYER_LISTS += ("layer_types", "mlp_layer_types")  # what transformers makes of them
_WEIGHT_FORMAT: dict[str, WeightFormat] = {"plain": "bf16", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def read_config(folder: Path | str) -> ModelConfig:
    """The model's shape, from `config.json` (and `dspark/config.json` if there is one).

    Raises CheckpointError, a ValueError, for a file that is missing or is not JSON, and ValueError
    with one sentence for a value that cannot be, in a drafter of another kind for instance.
    """
    path = Path(folder) / DRAFTER / "config.json"
    drafter = read_json(path) if path.is_file() else None
    return ModelConfig.from_hf(read_json(Path(folder) / "config.json"), drafter)


def read_target_config(folder: Path | str) -> ModelConfig:
    """`read_config` of the target alone, whatever drafter may be beside it."""
    return ModelConfig.from_hf(read_json(Path(folder) / "config.json"))


def config_json(
    config: ModelConfig, kinds: Mapping[str, Kind], source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config.json` of a model whose parameters (by path) are stored so, over the source's."""
    ours = replace(config, quantization=_quantization(config, kinds)).to_hf()
    if "quantization_config" in ours:
        ours["quantization_config"]["ignored_layers"] = _IGNORED + _plain_modules(kinds)
        if not all(kind.divides for kind in kinds.values()):  # ModelOpt's names are no such format
            ours["quantization_config"].pop("moe_quant_format", None)
    plain = kinds["embedding"].dtype.name
    ours["torch_dtype"] = plain if kinds["embedding"].form == "plain" else "bfloat16"
    if source is None:
        return ours
    root = dict(source) if "text_config" in source else {"text_config": dict(source)}
    text = {k: v for k, v in root["text_config"].items() if k not in _STALE}
    root = {key: value for key, value in root.items() if key not in _STALE}
    return root | ours | {"text_config": text | ours["text_config"]}


def cut_config(source: Mapping[str, Any], layers: list[int]) -> dict[str, Any]:
    """A `config.json` of just these layers, in this order, in its lists with an entry a layer.

    The drafter's keys go: it reads the residual stream of layers that need not be there any more.
    """
    text = source.get("text_config", source)
    cut = _cut_lists(text, layers) | {"num_hidden_layers": len(layers)}
    whole = cut if text is source else {**source, "text_config": cut}
    return {key: value for key, value in whole.items() if not key.startswith("dspark")}


def copy_companions(source: Path, folder: Path, *, drafter: bool = True) -> None:
    """Tokenizer, template, generation files and the drafter's folder, unchanged."""
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in COMPANIONS):
            shutil.copyfile(path, folder / path.name)
    if drafter and (source / DRAFTER).is_dir():
        shutil.copytree(source / DRAFTER, folder / DRAFTER)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """`config.json`, as the released files are laid out."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, "utf-8")


def _quantization(config: ModelConfig, kinds: Mapping[str, Kind]) -> QuantizationConfig:
    """Formats as stored; caches as the config has them, unless nothing at all is quantised."""
    projections = {kind.form for path, kind in kinds.items() if is_projection(path)} - {"plain"}
    experts = {kind.form for path, kind in kinds.items() if is_expert(path)} - {"plain"}
    if not projections | experts:
        return QuantizationConfig()
    return replace(
        config.quantization,
        projections=_WEIGHT_FORMAT[min(projections, default="plain")],
        experts=_WEIGHT_FORMAT[min(experts, default="plain")],
    )


def _plain_modules(kinds: Mapping[str, Kind]) -> list[str]:
    """Matrices that stay plain in a quantised checkpoint, in the released names."""
    paths = [
        path
        for path, kind in kinds.items()
        if kind.form == "plain" and (path.endswith("router.weight") or is_projection(path))
    ]
    return [names.add_prefix(names.released_place(path).name)[: -len(".weight")] for path in paths]


def _cut_lists(value: Any, layers: list[int]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: [inner[layer] for layer in layers]
        if key in _LAYER_LISTS and isinstance(inner, list)
        else _cut_lists(inner, layers)
        for key, inner in value.items()
    }
