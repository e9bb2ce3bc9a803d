"""Flags of a command that runs on several devices, and on those of several processes."""

import argparse
from collections.abc import Mapping

from jax.sharding import Mesh

from configs.parallel import ParallelConfig
from sharding.mesh import make_mesh
from sharding.processes import Processes, find_processes, meet, start
from sharding.rules import SERVE, Rules, with_parallel


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """--parallel, and where this process stands among several."""
    mesh = parser.add_argument_group("several devices")
    mesh.add_argument("--parallel", help="such as tp4 or tp4,ep; one device by default")
    add_process_flags(mesh)


def add_process_flags(group: argparse._ArgumentGroup) -> None:
    """Where this process stands among several."""
    group.add_argument(
        "--distributed",
        action="store_true",
        help="join the processes that SLURM, Open MPI or a LeaderWorkerSet started",
    )
    group.add_argument("--coordinator", help="host:port of process 0, with the next two")
    group.add_argument("--num-processes", type=int)
    group.add_argument("--process-id", type=int)


def joined(options: argparse.Namespace, environment: Mapping[str, str]) -> Processes | None:
    """Joins the other processes, if there are any, before JAX looks for devices; this process's
    place among them. ValueError when flags and environment do not say which process this is.
    """
    flags = (options.coordinator, options.num_processes, options.process_id)
    if not options.distributed and all(flag is None for flag in flags):
        return None
    processes = find_processes(environment if options.distributed else {}, *flags)
    if processes is None and not options.distributed:
        raise ValueError("--num-processes and --process-id need --coordinator")
    start(processes)
    return processes


def mesh_and_rules(options: argparse.Namespace) -> tuple[Mesh | None, Rules]:
    """What `load` takes. ValueError for what is no layout, or needs more devices than there are."""
    if options.parallel is None:
        return None, SERVE
    parallel = ParallelConfig.parse(options.parallel)
    mesh = make_mesh(parallel)
    meet(mesh)
    return mesh, with_parallel(SERVE, parallel)
