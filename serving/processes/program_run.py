"""A run of a program as bytes: which, with which adapter, how often, and the host's arrays.

    offset 0   uint16 x 4   length of the program's name; 1 + length of the adapter's, 0: none;
                            how often; 0
    offset 8   both names, then the arrays of the call in the order of its leaves

Of a large array, such as the masks of rows without a grammar, only the rows that are not all zero
bits travel: uint32 how many, uint32 x so many which, and then they. Names, arrays and rows begin at
multiples of 8 bytes. Shapes and dtypes do not travel: the receiver has the same programs and knows
what each one takes.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import jax
import numpy as np

from serving.device.programs import Call

HEAD = struct.Struct("<HHHH")
STEP = 8  # bytes; no dtype that is sent is wider
LARGE = 4096  # bytes of an array from which on its rows, the last axis, are looked at


def encoded(name: str, adapter: str | None, host: tuple[Any, ...], times: int) -> bytes:
    """The message; `host` is that of the program's `Call`."""
    names = name.encode(), (adapter or "").encode()
    adapter_length = 0 if adapter is None else 1 + len(names[1])
    head = HEAD.pack(len(names[0]), adapter_length, times, 0)
    leaves = chain.from_iterable(map(_bytes_of, jax.tree.leaves(host)))
    return b"".join((head, *map(_padded, (*names, *leaves))))


def decoded(body: memoryview, calls: Mapping[str, Call]) -> tuple[Call, int]:
    """One of `calls` with the arrays that were sent, small ones as views of the message, and how
    often it runs. Raises ValueError with a sentence for what fits none of them.
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

    def take_numbers(self) -> np.ndarray:
        """The next run of uint32, the first of which is how many others there are."""
        count = int.from_bytes(self._body[self._place : self._place + 4], "little")
        return np.frombuffer(self.take(4 + 4 * count), np.uint32)[1:]


def _bytes_of(leaf: np.ndarray) -> Iterator[bytes]:
    if leaf.nbytes < LARGE:
        yield leaf.tobytes()
        return
    rows = _rows(leaf)
    kept = np.flatnonzero(np.ascontiguousarray(rows).view(np.uint8).max(axis=1)).astype(np.uint32)
    yield np.array([len(kept), *kept], np.uint32).tobytes()
    yield rows[kept].tobytes()


def _arrays(pieces: _Pieces, like: list[np.ndarray]) -> Iterator[np.ndarray]:
    for leaf in like:
        if leaf.nbytes < LARGE:
            yield np.frombuffer(pieces.take(leaf.nbytes), leaf.dtype).reshape(leaf.shape)
        else:
            yield _from_rows(pieces, leaf)


def _from_rows(pieces: _Pieces, like: np.ndarray) -> np.ndarray:
    made = np.zeros(like.shape, like.dtype)
    rows = _rows(made)
    kept = pieces.take_numbers()
    if len(kept) and kept.max() >= len(rows):
        raise ValueError(f"an array of {len(rows)} rows comes with a row {kept.max()}")
    sent = pieces.take(len(kept) * rows.shape[1] * like.itemsize)
    rows[kept] = np.frombuffer(sent, like.dtype).reshape(len(kept), rows.shape[1])
    return made


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.size // x.shape[-1], x.shape[-1])


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % STEP)
