"""From what was resolved to an engine that is ready: weights, blocks, programs."""

from minimax_jax.loaded import LoadedModel, load
from minimax_jax.peft import read_adapter
from serving.assembly import Assembly, Plan, assemble
from serving.command.progress import StartProgress
from serving.command.resolve import Resolved
from serving.device import num_blocks_for
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel


def load_and_assemble(resolved: Resolved, progress: StartProgress) -> tuple[LoadedModel, Assembly]:
    """Reads the weights and compiles the programs; blocks. Raises ValueError with one sentence for
    a damaged checkpoint and for what does not fit.
    """
    asked, how = resolved.asked, resolved.asked.load
    loaded = load(
        asked.model,
        dtype=None if how.dtype == "auto" else how.dtype,
        kv=how.kv,
        index=how.index,
        mesh=make_mesh(asked.parallel) if asked.parallel.num_devices > 1 else None,
        revision=how.revision,
        speculative=asked.speculative or False,
        rules=with_parallel(SERVE, asked.parallel),
        progress=progress.loading,
    )
    adapters = {name: read_adapter(at, loaded.model) for name, at in asked.adapters.items()}
    plan = Plan(
        config=resolved.config,
        num_blocks=num_blocks_for(loaded, resolved.config, adapters),
        adapters=adapters,
        seed=asked.seed,
        costs=resolved.costs,
    )
    return loaded, assemble(loaded, plan, progress.compiling)
