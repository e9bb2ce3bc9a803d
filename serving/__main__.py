"""The command `minimax-serve`: `minimax-serve MODEL` serves, `minimax-serve bench` measures it,
`minimax-serve profile` what its steps cost.
"""

import asyncio
import os
import sys
from collections.abc import Sequence

import jax

from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.device_memory import use_all_memory
from minimax_jax.mesh_flags import joined
from serving import logs
from serving.bench.command import main as bench
from serving.command.flags import PROGRAM, parse
from serving.command.follow import follow, leave
from serving.command.resolve import Machine, Resolved, resolve
from serving.command.run import ENDED_EARLY, check_served, serve
from serving.processes.leader import Leader
from serving.processes.meeting import link_to_first, links_to_others
from serving.profile_costs import main as profile
from sharding.mesh import make_mesh
from sharding.processes import Processes

OTHERS = {"bench": bench, "profile": profile}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs it. A user's mistake is one sentence on standard error and exit code 2; a start that
    fails, or an engine that does, is one sentence and 1.
    """
    arguments = sys.argv[1:] if arguments is None else [*arguments]
    use_all_memory(os.environ)
    if arguments and arguments[0] in OTHERS:
        OTHERS[arguments[0]](arguments[1:])
        return
    try:
        asked = parse(arguments)
        logs.set_up(asked.monitoring)
        processes = joined(asked.place, os.environ)
        resolved = resolve(asked, _machine())
        check_served(resolved)
    except (ValueError, OSError) as error:
        _end(error, 2)
    keep_compiled_programs()
    try:
        code = asyncio.run(serve(resolved)) if processes is None else _together(resolved, processes)
    except (ValueError, OSError) as error:
        _end(error, 1)
    if code == ENDED_EARLY or (code and processes is not None):
        leave(code)  # a thread still compiles, or is in a step that never ends
    sys.exit(code)


def _machine() -> Machine:
    return Machine(
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        num_processes=jax.process_count(),
    )


def _together(resolved: Resolved, processes: Processes) -> int:
    """One of several processes; the exit code."""
    mesh = make_mesh(resolved.asked.parallel)
    if processes.index > 0:
        follow(resolved, link_to_first(processes, mesh))
        return 0
    leader = Leader(links_to_others(processes, mesh))
    return asyncio.run(serve(resolved, leader))


def _end(error: Exception, code: int) -> None:
    print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        leave(code)  # JAX would wait for processes that may never end
    sys.exit(code)


if __name__ == "__main__":
    main()
