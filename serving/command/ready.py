"""The one block that a started server prints: where it is, what it is, and what fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import jax
from rich.console import Console

from minimax_jax.loaded import LoadedModel
from serving.assembly import Assembly
from serving.command.listeners import Listeners
from serving.command.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What came of the start. `http` is the gateway's root, `metrics` the address of its page."""

    resolved: Resolved
    loaded: LoadedModel
    assembly: Assembly
    listeners: Listeners
    http: str | None
    metrics: str | None
    seconds: float


def rows(ready: Ready) -> Mapping[str, str]:
    """What the block says, by name."""
    resolved, loaded = ready.resolved, ready.loaded
    config, device, formats = resolved.config, ready.assembly.device, loaded.formats
    tokens = device.num_blocks * config.block_size
    host, names = resolved.asked.server.host, ", ".join((resolved.name, *resolved.aliases))
    found = {
        "model": f"{resolved.asked.model}, served as {names}",
        "HTTP": f"{ready.http}/v1, and /v1/messages" if ready.http else "none (--no-http)",
        "gRPC": ", ".join(
            f"{host}:{port} ({name})" for name, port in ready.listeners.ports.items()
        ),
        "metrics": ready.metrics or "none",
        "limits": f"{config.max_model_len:,} tokens a sequence, {config.max_num_seqs} at a time, "
        f"{config.max_num_batched_tokens:,} tokens a step",
        "cache": f"{formats.kv} keys and values, {formats.index} index keys; {device.num_blocks:,} "
        f"blocks of {config.block_size} = {tokens:,} tokens, "
        f"{tokens / config.max_model_len:.1f} sequences of full length",
    }
    if loaded.mesh is not None:
        count = jax.process_count()
        where = "this process" if count == 1 else f"{count} processes"
        found["devices"] = f"{loaded.mesh.size} as {resolved.asked.parallel}, of {where}"
    if loaded.drafter is not None:
        assert resolved.asked.speculative is not None
        block = loaded.drafter.config.draft_block
        found["drafts"] = resolved.asked.speculative.described(block)
    programs = (
        f"{device.num_programs} compiled, none from now on; ready after {ready.seconds:.0f} s"
    )
    return found | {"programs": programs}


def show(ready: Ready, console: Console) -> None:
    """Prints the block."""
    console.print(f"[bold]minimax-serve {version('minimax-jax')} is ready[/bold]")
    for name, text in rows(ready).items():
        console.print(f"  {name:<9} {text}", markup=False, soft_wrap=True)
