"""From what was resolved to an engine that is ready: weights, blocks, programs."""

from configs.serving import ServingConfig
from minimax_jax.loaded import LoadedModel, load
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
    plan = Plan(config=resolved.config, num_blocks=blocks, seed=asked.seed)
    return loaded, assemble(loaded, plan, progress.compiling)


CPU_CACHE_BYTES = 1 << 30


def num_blocks(loaded: LoadedModel, config: ServingConfig) -> int:
    """How many blocks the pool has."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    return min(
        config.max_num_seqs * config.max_blocks, CPU_CACHE_BYTES // loaded.layout.block_bytes
    )
