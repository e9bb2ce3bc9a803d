"""From what was resolved to an engine that is ready: weights, blocks, programs."""

import jax

from configs.serving import ServingConfig
from minimax_jax.loaded import LoadedModel, load
from minimax_jax.peft import read_adapter
from serving.assembly import Assembly, Plan, assemble
from serving.command.progress import StartProgress
from serving.command.resolve import Resolved
from sharding.mesh import make_mesh


def load_and_assemble(resolved: Resolved, progress: StartProgress) -> tuple[LoadedModel, Assembly]:
    """Reads the weights and compiles the programs; blocks. Raises ValueError with one sentence for
    a damaged checkpoint and for what does not fit.
    """
    asked, how = resolved.asked, resolved.asked.load
    tp = asked.parallel.tp
    loaded = load(
        asked.model,
        dtype=None if how.dtype == "auto" else how.dtype,
        kv=how.kv,
        index=how.index,
        mesh=make_mesh(asked.parallel) if tp > 1 else None,
        revision=how.revision,
        speculative=asked.speculative or False,
        progress=progress.loading,
    )
    blocks = num_blocks(loaded, resolved.config)
    plan = Plan(
        config=resolved.config,
        num_blocks=blocks,
        adapters={name: read_adapter(at, loaded.model) for name, at in asked.adapters.items()},
        seed=asked.seed,
    )
    return loaded, assemble(loaded, plan, progress.compiling)


CPU_CACHE_BYTES = 1 << 30  # where the machine's memory is everyone's


def num_blocks(loaded: LoadedModel, config: ServingConfig) -> int:
    """How many blocks the pool has: as many as were asked for, or as fit beside the weights in
    `gpu_memory_utilization` of the device's memory (the rest is for what programs hold while they
    run), but none that could never be used. Raises ValueError where they hold no sequence of the
    greatest length.
    """
    blocks = config.num_gpu_blocks_override
    if blocks is None:
        fit = cache_bytes(config.gpu_memory_utilization) // loaded.layout.block_bytes
        blocks = min(fit, config.max_num_seqs * config.max_blocks)
    if blocks < config.max_blocks:
        raise ValueError(
            f"{blocks} blocks of {config.block_size} tokens fit, which hold no sequence of "
            f"max_model_len={config.max_model_len}: --max-model-len may be at most "
            f"{blocks * config.block_size}"
        )
    return blocks


def cache_bytes(utilization: float) -> int:
    """Memory of the first device that a pool may take, now that the weights are there."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        return CPU_CACHE_BYTES
    return max(0, int(utilization * stats["bytes_limit"]) - stats["bytes_in_use"])
