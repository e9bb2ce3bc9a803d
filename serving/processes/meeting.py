"""How process 0 and the others find one another: process 0 listens on a free port and tells it,
with a secret of this run, through the devices that they share. Who brings the secret is let in.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from serving.processes.link import Link
from sharding import SERVE, constrain, named_sharding
from sharding.processes import Processes

SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sI")  # the secret and who it is
PATIENCE_S = 60.0  # for the others, after they have all met on the devices
HELLO_S = 5.0  # for one that has connected to say who it is
LOOPBACK = ("localhost", "127.0.0.1")


def links_to_others(processes: Processes, mesh: Mesh) -> dict[int, Link]:
    """On process 0: a connection to each other process. Raises ValueError with a sentence when one
    does not come.
    """
    address = LOOPBACK[1] if host_of(processes) in LOOPBACK else ""
    with socket.create_server((address, 0)) as server:
        secret = secrets.token_bytes(SECRET_BYTES)
        told_by_first(mesh, [server.getsockname()[1], *np.frombuffer(secret, np.uint32)])
        deadline, links = time.monotonic() + PATIENCE_S, {}
        while len(links) < processes.count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, processes.count)) - set(links))
                raise ValueError(f"processes {missing} did not connect to process 0") from error
            index = _let_in(connection, secret)
            if index is not None:
                links[index] = Link(connection, f"process {index}")
        return links


def link_to_first(processes: Processes, mesh: Mesh) -> Link:
    """On another process: the connection to process 0. Raises ValueError with a sentence."""
    port, *words = told_by_first(mesh, [0] * (1 + SECRET_BYTES // 4))
    host = host_of(processes)
    try:
        connection = socket.create_connection((host, port), PATIENCE_S)
        connection.sendall(HELLO.pack(np.array(words, np.uint32).tobytes(), processes.index))
    except OSError as error:
        raise ValueError(f"process 0 cannot be reached at {host}:{port}: {error}") from error
    return Link(connection, "process 0")


def host_of(processes: Processes) -> str:
    """Where process 0 is."""
    return processes.coordinator.rpartition(":")[0].strip("[]")


def told_by_first(mesh: Mesh, numbers: Sequence[int]) -> list[int]:
    """What process 0 says, below 2^32, on every process; the others say as many numbers that do
    not count. It is a sum over the devices to which all but one of them add zeros.
    """
    speaker = [device.process_index for device in mesh.devices.flat].index(0)
    said = np.zeros((mesh.size, len(numbers)), np.uint32)
    if jax.process_index() == 0:
        said[speaker] = numbers
    sharding = named_sharding(mesh, ("ranks", None), SERVE, said.shape)
    rows = jax.make_array_from_callback(said.shape, sharding, lambda index: said[index])
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(lambda x: constrain(x.sum(0), None))(rows)).tolist()


def _let_in(connection: socket.socket, secret: bytes) -> int | None:
    """Who it is, if it brings the secret; else it is turned away."""
    connection.settimeout(HELLO_S)
    try:
        hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        hello = b""
    if len(hello) == HELLO.size:
        brought, index = HELLO.unpack(hello)
        if hmac.compare_digest(brought, secret):
            return index
    connection.close()
    return None
