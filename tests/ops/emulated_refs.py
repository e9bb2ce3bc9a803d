"""Pieces of memory that emulated kernels see as references of Pallas."""

import numpy as np


class Ref:
    """A piece of memory: `at` and indexing as references of Pallas have them."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    @property
    def at(self):
        return _At(self)

    def __getitem__(self, where):
        return self.array[where]

    def take(self, values):
        """What the copy engine does; memory in another order than that of its source overrides
        this.
        """
        self.array[...] = values

    def transpose(self, axes):
        return np.transpose(self.matrix(), axes)

    def matrix(self):
        """[N, 64] of a 16-bit operand in tiles of 8 rows with the 128-byte swizzle."""
        rows = self.array.reshape(-1, 8, 8, 8)  # tile, row, 16-byte piece, element
        straight = np.empty_like(rows)
        for row, piece in np.ndindex(8, 8):
            straight[:, row, piece] = rows[:, row, piece ^ row]
        return straight.reshape(-1, 64)


class _At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, where):
        """A block of -1 is read as zeros, as the copy engine does."""
        first = where[0] if isinstance(where, tuple) else where
        if not isinstance(first, slice) and first < 0:
            inside = (0, *where[1:]) if isinstance(where, tuple) else 0
            return type(self.ref)(np.zeros_like(self.ref.array[inside]))
        return type(self.ref)(self.ref.array[where])


def in_one_warp(_number, condition, do):
    """Copies that are started here are there at once."""
    if condition:
        do()
