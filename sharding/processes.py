"""Several processes that make one mesh: who leads, how many there are, which one this is.

One process a GPU or one a host; each is started with the same command. Its place comes from flags,
or from what started it:

    LeaderWorkerSet  LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX (Kubernetes)
    Open MPI         OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK; the leader from flags, as MPI does
                     not say where rank 0 runs, or this host if all ranks are here
    SLURM            SLURM_NTASKS, SLURM_PROCID, the first host of SLURM_STEP_NODELIST

After `start` JAX sees the devices of all processes, and `make_mesh` takes them all.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sharding.apply import named_sharding
from sharding.rules import SERVE

PORT = 8476  # of the leader, if nothing names another
_FLAGS = "--coordinator, --num-processes and --process-id"


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those of one mesh."""

    coordinator: str  # host:port of process 0
    count: int
    index: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"process {self.index} is not one of 0..{self.count - 1}")
        if not re.fullmatch(r".+:[0-9]+", self.coordinator):
            raise ValueError(f"coordinator {self.coordinator!r} is not a host:port")


def find_processes(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
) -> Processes | None:
    """This process's place: of the flags where given, else of the environment. None: it is alone.

    Raises ValueError when the two together do not say all three things.
    """
    leader, started, place = _from_launcher(environment)
    count = started if count is None else count
    index = place if index is None else index
    if coordinator is None and count in (None, 1):
        return None
    leader = leader if coordinator is None else coordinator
    if leader is None or count is None or index is None:
        known = f"coordinator={leader}, number of processes {count}, this one {index}"
        raise ValueError(f"nothing says all of {_FLAGS}: {known}")
    leader = leader if ":" in leader else f"{leader}:{PORT}"
    return Processes(coordinator=leader, count=count, index=index)


def start(processes: Processes | None) -> None:
    """Joins the others; to be called before anything asks JAX for its devices."""
    if processes is not None:
        jax.distributed.initialize(
            coordinator_address=processes.coordinator,
            num_processes=processes.count,
            process_id=processes.index,
        )


def meet(mesh: Mesh) -> None:
    """Adds up one number a device, so that the processes' connections are made while all of them
    are here: after long compilations they may come too far apart for the waiting time of a
    transport (30 s with Gloo, on CPUs). Nothing where this process is alone.
    """
    if jax.process_count() == 1:
        return
    sharding = named_sharding(mesh, ("ranks",), SERVE, (mesh.size,))
    ones = jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.ones(1))
    jax.block_until_ready(jax.jit(jnp.sum)(ones))


def _from_launcher(environment: Mapping[str, str]) -> tuple[str | None, int | None, int | None]:
    """Leader, number and place. A job inside another's (mpirun under SLURM) is the inner one's."""
    get = environment.get

    def number(name: str) -> int | None:
        return int(environment[name]) if name in environment else None

    if "LWS_GROUP_SIZE" in environment:
        return get("LWS_LEADER_ADDRESS"), number("LWS_GROUP_SIZE"), number("LWS_WORKER_INDEX")
    if "OMPI_COMM_WORLD_SIZE" in environment:
        count, here = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_LOCAL_SIZE")
        return "localhost" if here == count else None, count, number("OMPI_COMM_WORLD_RANK")
    if "SLURM_PROCID" in environment:
        hosts = get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST")
        leader = None if hosts is None else first_host(hosts)
        return leader, number("SLURM_NTASKS"), number("SLURM_PROCID")
    return None, None, None


def first_host(hosts: str) -> str:
    """The first of SLURM's list: node[003-007,9],other is node003."""
    found = re.match(r"([^,\[]+)(?:\[([0-9]+))?", hosts)
    if found is None:
        raise ValueError(f"{hosts!r} is not a list of hosts")
    return found[1] + (found[2] or "")
