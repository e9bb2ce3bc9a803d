"""A connection between process 0 and one of the others: messages of a kind and some bytes.

    offset 0   uint32   kind
    offset 4   uint32   length of the body
    offset 8   the body

A process that ends closes its connections, and one whose machine is gone is missed after
`SILENT_S`; either is a `LostError` for who reads.
"""

import socket
import struct
from enum import IntEnum

HEADER = struct.Struct("<II")
MOST_BYTES = 1 << 30  # of a body: far more than any step's, and than most adapters
# A machine that says nothing: asked after 10 s of silence, then every 5 s, given up after three.
SILENT_S, ASK_EVERY_S, ASKS = 10, 5, 3


class Kind(IntEnum):
    """What a message is."""

    FACTS = 1  # JSON, while processes start
    RUN = 2  # a program, see `program_run`
    ADAPTERS = 3  # see `adapter_arrays`
    PROFILE = 4  # JSON: begin one
    PROFILE_END = 5
    END = 6  # all is over
    DRAIN = 7  # from another process: it was asked to end
    FAULT = 8  # from another process: the sentence it ends with


class LostError(ConnectionError):
    """The other process is gone; the text says which."""


class Link:
    """One end of a connection; `name` is who is at the other. One thread may read while another
    sends.
    """

    def __init__(self, connection: socket.socket, name: str):
        self.name, self._connection = name, connection
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", SILENT_S),
            ("TCP_KEEPINTVL", ASK_EVERY_S),
            ("TCP_KEEPCNT", ASKS),
            ("TCP_USER_TIMEOUT", 1000 * (SILENT_S + ASKS * ASK_EVERY_S)),
        ):
            if hasattr(socket, option):  # Linux has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Hands a message to the kernel; waits only where the other reads much too slowly. Raises
        LostError.
        """
        if len(body) > MOST_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is more than {MOST_BYTES}")
        try:
            self._connection.sendall(HEADER.pack(kind, len(body)) + body)
        except OSError as error:
            raise LostError(f"{self.name} has ended") from error

    def receive(self) -> tuple[Kind, memoryview]:
        """The next message, in memory of its own. Raises LostError."""
        kind, length = HEADER.unpack(self._exactly(HEADER.size))
        if length > MOST_BYTES:
            raise LostError(f"{self.name} sends what is no message")
        return Kind(kind), self._exactly(length)

    def close(self) -> None:
        """Ends the connection, at both ends."""
        self._connection.close()

    def _exactly(self, length: int) -> memoryview:
        found = memoryview(bytearray(length))
        place = 0
        while place < length:
            try:
                count = self._connection.recv_into(found[place:])
            except OSError:
                count = 0
            if count == 0:
                raise LostError(f"{self.name} has ended")
            place += count
        return found
