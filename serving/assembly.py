"""A loaded model, a device over it and the engine over that: for the server and for offline use."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.serving import ServingConfig
from minimax_jax.loaded import LoadedModel
from minimax_jax.lora import Adapter
from serving.device.model_device import ModelDevice
from serving.device.placement import num_data_ranks
from serving.device_api import Others
from serving.engine import BatchingEngine
from serving.engine_api import EngineInfo
from serving.scheduling.cost_table import StepCosts

Progress = Callable[[str, int, int], None]  # a program, how many are done and how many there are
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A device that is warm and an engine that runs; `close` ends both."""

    device: ModelDevice
    engine: BatchingEngine

    async def close(self) -> None:
        """Aborts what runs, and lets go of the device."""
        await self.engine.close()
        self.device.close()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to make of a loaded model; `num_blocks` are a data rank's."""

    config: ServingConfig
    num_blocks: int
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    seed: int = 0
    costs: StepCosts | None = None  # without them every draft is verified


def assemble(
    loaded: LoadedModel,
    plan: Plan,
    progress: Progress | None = None,
    others: Others | None = None,
) -> Assembly:
    """Compiles every program and starts the engine; blocks until it is ready. `others` are the
    other processes, which then do what this one's device does. Raises ValueError with one sentence
    for what cannot be served.
    """
    device = ModelDevice(
        loaded, plan.config, plan.num_blocks, adapters=plan.adapters, others=others
    )
    device.warm_up(progress)
    engine = BatchingEngine(
        engine_info(loaded, plan.config),
        plan.config,
        device,
        tokenizer=loaded.tokenizer,
        adapters=sorted(plan.adapters),
        costs=plan.costs,
        seed=plan.seed,
    )
    return Assembly(device=device, engine=engine)


def engine_info(loaded: LoadedModel, config: ServingConfig) -> EngineInfo:
    """What clients are told of the model and of how it is served."""
    files, generation = (_read(loaded.folder / name) for name in ("config.json", GENERATION))
    tokenizer = loaded.tokenizer
    return EngineInfo(
        max_model_len=config.max_model_len,
        vocab_size=loaded.config.num_tokens,
        model_type=files["model_type"],
        architectures=tuple(files.get("architectures", ())),
        eos_token_ids=tokenizer.stop_ids if tokenizer is not None else _ids(generation),
        pad_token_id=generation.get("pad_token_id"),
        bos_token_id=generation.get("bos_token_id"),
        default_sampling={
            name: generation[name] for name in SAMPLING_DEFAULTS if name in generation
        },
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        data_parallel_size=num_data_ranks(loaded.mesh),
        kv_cache_dtype=loaded.formats.kv,
        model_dtype=str(loaded.model.dtype),
        attention_backend="jax",
    )


GENERATION = "generation_config.json"


def _ids(generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence; a file gives one or several."""
    ids = generation.get("eos_token_id", ())
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
