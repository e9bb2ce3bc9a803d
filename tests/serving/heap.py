"""What this process has allocated, as glibc (2.33 or newer) counts it.

The resident size says less: it grows when pages that were given back to the system are used again.
After a `malloc_trim` the soak's grew by 55 MB in 90 s, in which this stayed within 11 MB.
"""

import ctypes

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, summed over all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int:
    """Bytes that malloc has handed out and not got back, from its arenas or by mmap."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    counted = mallinfo2()
    return counted.uordblks + counted.hblkhd
