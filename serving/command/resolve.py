"""What was asked for, with what the model is and the machine has: limits and devices, checked
before any weight is read.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli import from_flags
from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.serving import ServingConfig
from minimax_jax.cache import heads_of_rank
from minimax_jax.checkpoint.folder import read_config, read_target_config
from minimax_jax.loaded import SMALL_FILES, find
from serving.command.flags import Asked
from serving.device.num_blocks import check_longest
from serving.scheduling.cost_table import StepCosts, read_costs

# Where no GPU is, programs are compiled and run by a few cores: smaller steps, and fewer shapes.
CPU_DEFAULTS: dict[str, Any] = {"max_num_seqs": "16", "max_num_batched_tokens": "512"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that JAX sees, those of all processes together."""

    platform: str
    num_devices: int
    num_processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What will be loaded and served."""

    asked: Asked
    folder: Path  # with all but the weights
    model: ModelConfig
    config: ServingConfig
    name: str  # under which clients know it
    aliases: tuple[str, ...]
    lines: tuple[str, ...]  # about what is not as it was typed or as one expects
    costs: StepCosts | None = None  # of a step's parts, by which drafts are scheduled


def resolve(asked: Asked, machine: Machine) -> Resolved:
    """Raises ValueError with one sentence for what this model or machine cannot do."""
    folder = find(asked.model, asked.load.revision, files=SMALL_FILES)
    model = read_target_config(folder) if asked.speculative is None else read_config(folder)
    check_devices(asked.parallel, machine)
    heads_of_rank(model, asked.parallel.tp, asked.parallel.page_ranks)
    _check_experts(asked, model)
    config = serving_config(asked, model, machine)
    name, *aliases = asked.served_names or (default_name(asked.model),)
    taken = {name, *aliases} & set(asked.adapters)
    if taken:
        raise ValueError(f"--lora {min(taken)} is a name that the model itself has")
    merged = [one for one in (name, *aliases) if is_merged(one)]
    lines = [
        f"--served-model-name {one}: over HTTP chat deltas come joined to some 80 characters, as "
        "the gateway does for names like minimax*"
        for one in merged
    ]
    return Resolved(
        asked=asked,
        folder=folder,
        model=model,
        config=config,
        name=name,
        aliases=tuple(aliases),
        lines=(*asked.lines, *lines),
        costs=_costs(config),
    )


def serving_config(asked: Asked, model: ModelConfig, machine: Machine) -> ServingConfig:
    """The limits: those given, and for others what suits the model and the machine."""
    sparse, shared = model.indexer.block_size, asked.parallel.page_ranks
    block_size, context = sparse * shared, model.max_context
    usual = ServingConfig().max_model_len
    defaults = {"block_size": str(block_size), "max_model_len": str(min(usual, context))}
    defaults |= CPU_DEFAULTS if machine.platform == "cpu" else {}
    drafts = _drafts(asked, model)
    if drafts:
        defaults |= {"num_speculative_tokens": str(drafts)}
    config = from_flags(ServingConfig, argparse.Namespace(**_for_rows(defaults, asked.engine)))
    if config.block_size != block_size:
        raise ValueError(
            f"block_size={config.block_size} is not the model's sparse block size, {sparse}"
            + (f", times the {shared} ranks that share out pages" if shared > 1 else "")
        )
    if config.max_model_len > context:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {context}")
    if config.num_gpu_blocks_override is not None:
        check_longest(config, config.num_gpu_blocks_override, "num_gpu_blocks_override says")
    return config


def check_devices(parallel: ParallelConfig, machine: Machine) -> None:
    """Raises ValueError for more devices than there are, and for processes left without work."""
    if parallel.num_devices > machine.num_devices:
        raise ValueError(
            f"{parallel} needs {parallel.num_devices} devices, and JAX sees {machine.num_devices} "
            f"({machine.platform})"
        )
    if machine.num_processes > 1 and parallel.num_devices < machine.num_devices:
        raise ValueError(
            f"{parallel} uses {parallel.num_devices} of the {machine.num_devices} devices of "
            f"{machine.num_processes} processes: all of them must take part"
        )


def default_name(model: str) -> str:
    """The last part of a path or hub name in small letters, without what makes the gateway join
    deltas: "MiniMaxAI/MiniMax-M3.1-Flash" is "m3.1-flash".
    """
    last = Path(model).resolve().name if model in (".", "..") else Path(model).name
    return last.lower().removeprefix("minimax").lstrip("-_") or "model"


def is_merged(name: str) -> bool:
    """Whether the gateway joins deltas under this name (specification serving 1.4)."""
    return name.lower().startswith("minimax")


def _costs(config: ServingConfig) -> StepCosts | None:
    if config.speculation_costs is None:
        return None
    if not config.num_speculative_tokens:
        raise ValueError("--speculation-costs says what drafts cost, and nothing speculates")
    try:
        return read_costs(config.speculation_costs)
    except OSError as error:
        raise ValueError(f"--speculation-costs cannot be read: {error}") from error


def _drafts(asked: Asked, model: ModelConfig) -> int:
    if asked.speculative is None:
        return 0
    if model.drafter is None:
        raise ValueError(f"--speculative-config: {asked.model} has no drafter in dspark/")
    return asked.speculative.verified(model.drafter.draft_block)


def _for_rows(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; tokens of a step default to at least what the rows asked for need."""
    fields = {**defaults, **given}
    rows, places = fields.get("max_num_seqs", ""), 1 + int(fields.get("num_speculative_tokens", 0))
    tokens = fields.get("max_num_batched_tokens", "")
    if "max_num_batched_tokens" not in given and rows.isdigit() and tokens.isdigit():
        fields["max_num_batched_tokens"] = str(max(int(tokens), int(rows) * places))
    return fields


def _check_experts(asked: Asked, model: ModelConfig) -> None:
    """`--quantization-config.moe`: the format must be the checkpoint's."""
    wanted, stored = asked.experts, model.quantization.experts
    if wanted is not None and wanted != stored:
        raise ValueError(
            f"--quantization-config.moe {wanted}: the experts of {asked.model} are {stored}; "
            f"`minimax-jax convert SRC DST --format {wanted}` writes them anew"
        )
