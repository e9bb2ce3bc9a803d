"""A run of a program as bytes: which, with which adapter, how often, and the host's arrays.

    offset 0   uint16 x 4   length of the program's name; 1 + length of the adapter's, 0: none;
                            how often; 0
    offset 8   both names, then the arrays of the call in the order of its leaves

Names and arrays begin at multiples of 8 bytes. Shapes and dtypes do not travel: the receiver has
the same programs and knows what each one takes.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from serving.device.programs import Call

HEAD = struct.Struct("<HHHH")
STEP = 8  # bytes; no dtype that is sent is wider


def encoded(name: str, adapter: str | None, host: tuple[Any, ...], times: int) -> bytes:
    """The message; `host` is that of the program's `Call`."""
    names = name.encode(), (adapter or "").encode()
    adapter_length = 0 if adapter is None else 1 + len(names[1])
    head = HEAD.pack(len(names[0]), adapter_length, times, 0)
    leaves = (leaf.tobytes() for leaf in jax.tree.leaves(host))
    return b"".join((head, *map(_padded, (*names, *leaves))))


def decoded(body: memoryview, calls: Mapping[str, Call]) -> tuple[Call, int]:
    """One of `calls` with the arrays that were sent, which are views of the message, and how often
    it runs. Raises ValueError with a sentence for what fits none of them.
    """
    pieces = _Pieces(body)
    name_length, adapter_length, times, _ = HEAD.unpack(pieces.take(HEAD.size))
    name = str(pieces.take(name_length), "utf-8")
    adapter = str(pieces.take(max(0, adapter_length - 1)), "utf-8")
    if name not in calls:
        raise ValueError(f"process 0 runs {name!r}, which was not compiled here at the start")
    call = calls[name]
    leaves, tree = jax.tree.flatten(call.host)
    given = list(_arrays(pieces, leaves))
    if pieces.num_left:
        raise ValueError(f"{name!r} comes with {pieces.num_left} bytes more than it takes")
    host = jax.tree.unflatten(tree, given)
    return replace(call, host=host, adapter=adapter if adapter_length else None), times


class _Pieces:
    """Takes a message apart; each piece begins at a multiple of `STEP`."""

    def __init__(self, body: memoryview):
        self._body, self._place = body, 0

    @property
    def num_left(self) -> int:
        """Bytes not taken yet."""
        return max(0, len(self._body) - self._place)

    def take(self, length: int) -> memoryview:
        """The next bytes. Raises ValueError where there are fewer."""
        piece = self._body[self._place : self._place + length]
        if len(piece) < length:
            raise ValueError(f"a message of {len(self._body)} bytes is cut off")
        self._place += -(-length // STEP) * STEP
        return piece


def _arrays(pieces: _Pieces, like: list[np.ndarray]) -> Iterator[np.ndarray]:
    for leaf in like:
        yield np.frombuffer(pieces.take(leaf.nbytes), leaf.dtype).reshape(leaf.shape)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % STEP)
