"""How many blocks the pool has: what was said, what the memory holds, or on a CPU a default."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from configs.serving import ServingConfig
from minimax_jax.loaded import LoadedModel
from minimax_jax.lora import Adapter
from serving.device.model_device import ModelDevice

# A CPU's memory is shared with everything else, so a pool takes what all sequences need at their
# full length, and this much at most, unless --num-gpu-blocks-override says otherwise.
CPU_POOL_BYTES = 1 << 30
Device: TypeAlias = Any  # jax.Device, which type checkers see as a variable


def num_blocks_for(
    loaded: LoadedModel, config: ServingConfig, adapters: Mapping[str, Adapter] | None = None
) -> int:
    """Blocks of a rank's pool. Raises ValueError when they do not hold the longest sequence, or
    when the block size is not the model's.
    """
    block_bytes, block_size = loaded.layout.block_bytes, loaded.row_tokens
    if config.block_size != block_size:
        raise ValueError(
            f"block_size={config.block_size}, but this model chooses blocks of "
            f"{loaded.layout.block_size} tokens"
            + (f", one for each of {loaded.page_ranks} ranks" if loaded.page_ranks > 1 else "")
        )
    if config.num_gpu_blocks_override is not None:
        num_blocks, source = config.num_gpu_blocks_override, "num_gpu_blocks_override says"
    elif _devices(loaded)[0].platform == "cpu":
        wanted = config.max_num_seqs * config.max_blocks
        num_blocks, source = min(wanted, CPU_POOL_BYTES // block_bytes), "1 GiB on a CPU holds"
    else:
        num_blocks = _fitting(loaded, config, adapters)
        source = f"gpu_memory_utilization={config.gpu_memory_utilization} leaves room for"
    check_longest(config, num_blocks, source)
    return num_blocks


def check_longest(config: ServingConfig, num_blocks: int, source: str) -> None:
    """Raises ValueError unless the pool holds one sequence of the greatest length."""
    if num_blocks < config.max_blocks:
        raise ValueError(
            f"max_model_len={config.max_model_len} needs {config.max_blocks} blocks, but {source} "
            f"{num_blocks}: the largest max_model_len is {num_blocks * config.block_size}"
        )


def _fitting(
    loaded: LoadedModel, config: ServingConfig, adapters: Mapping[str, Adapter] | None
) -> int:
    """What is left of each device's memory beside the weights, the slots, and the temporaries of
    the largest programs, which are compiled around a pool of one sequence to know them.
    """
    jax.block_until_ready(loaded.model)  # what is still on its way is not in use yet
    free = min(_free_bytes(device, config) for device in _devices(loaded))
    block_bytes = loaded.layout.block_bytes
    most = max(0, free // block_bytes)
    check_longest(config, most, "beside the weights there is room for")
    trial = ModelDevice(loaded, config, config.max_blocks, adapters=adapters)
    return max(0, (free - trial.slot_bytes - trial.largest_temporaries(most)) // block_bytes)


def _free_bytes(device: Device, config: ServingConfig) -> int:
    stats: Mapping[str, Any] = device.memory_stats()
    return int(stats["bytes_limit"] * config.gpu_memory_utilization) - stats["bytes_in_use"]


def _devices(loaded: LoadedModel) -> list[Device]:
    if loaded.mesh is None:
        return jax.devices()[:1]
    return [one for one in loaded.mesh.devices.flat if one.process_index == jax.process_index()]
