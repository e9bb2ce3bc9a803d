"""From what was resolved to an engine that is ready: weights, blocks, programs. With several
processes all of them do this, agree on the blocks, and process 0 alone has the engine.
"""

from collections.abc import Callable, Mapping

from minimax_jax.loaded import LoadedModel, load
from minimax_jax.lora import Adapter
from minimax_jax.peft import read_adapter
from serving.assembly import Assembly, Plan, assemble
from serving.command.progress import StartProgress
from serving.command.resolve import Resolved
from serving.device import ModelDevice, num_blocks_for
from serving.processes.follower import Follower
from serving.processes.leader import Leader
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel

Progress = Callable[[str, int], None]


def load_and_assemble(
    resolved: Resolved, progress: StartProgress, leader: Leader | None = None
) -> tuple[LoadedModel, Assembly]:
    """Reads the weights and compiles the programs; blocks. Raises ValueError with one sentence for
    a damaged checkpoint and for what does not fit.
    """
    loaded, adapters = _loaded(resolved, progress.loading)
    num_blocks = num_blocks_for(loaded, resolved.config, adapters)
    if leader is not None:
        num_blocks = leader.agree(flags_of(resolved), num_blocks)
    plan = Plan(
        config=resolved.config,
        num_blocks=num_blocks,
        adapters=adapters,
        seed=resolved.asked.seed,
        costs=resolved.costs,
    )
    assembly = assemble(loaded, plan, progress.compiling, leader)
    if leader is not None:
        leader.await_ready()
    return loaded, assembly


def load_to_follow(resolved: Resolved, progress: StartProgress, follower: Follower) -> ModelDevice:
    """The same on another process than 0, which has no engine."""
    loaded, adapters = _loaded(resolved, progress.loading)
    num_blocks = num_blocks_for(loaded, resolved.config, adapters)
    num_blocks = follower.agree(flags_of(resolved), num_blocks)
    device = ModelDevice(loaded, resolved.config, num_blocks, adapters=adapters)
    device.warm_up(progress.compiling)
    return device


def flags_of(resolved: Resolved) -> dict[str, str]:
    """What all processes must have been told alike."""
    asked = resolved.asked
    return {
        "limits": str(resolved.config),
        "formats": str(asked.load),
        "--parallel": str(asked.parallel),
        "--speculative-config": str(asked.speculative),
        "--lora": ", ".join(sorted(asked.adapters)) or "none",
    }


def _loaded(resolved: Resolved, progress: Progress) -> tuple[LoadedModel, Mapping[str, Adapter]]:
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
        load_format=how.load_format,
        progress=progress,
    )
    return loaded, {name: read_adapter(at, loaded.model) for name, at in asked.adapters.items()}
