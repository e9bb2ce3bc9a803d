"""The lanes of a kernel on a CPU: what `pallas_kernels.lanes` says, for 128 threads in step, in
numpy, with masks in place of branches (`lane_emulator` runs kernels on it).
"""

import contextlib

import ml_dtypes
import numpy as np

from pallas_kernels import lanes
from tests.ops.emulated_refs import Ref, in_one_warp  # noqa: F401 (lanes have it)

THREADS, WARP = 128, 32
_E4M3 = ml_dtypes.float8_e4m3fn
_active = np.ones(THREADS, bool)  # the threads that the branches around have left


class Word(lanes.Word):
    """128 words of 32 bits."""

    def __init__(self, value):
        wide = np.broadcast_to(np.asarray(value), (THREADS,)).astype(np.int64)
        object.__setattr__(self, "value", (wide & 0xFFFFFFFF).astype(np.uint32))

    def _of(self, function, other):
        return Word(function(self.value.astype(np.int64), word(other).value.astype(np.int64)))

    def __and__(self, other):
        return self._of(np.bitwise_and, other)

    def __or__(self, other):
        return self._of(np.bitwise_or, other)

    def __xor__(self, other):
        return self._of(np.bitwise_xor, other)

    def __add__(self, other):
        return self._of(np.add, other)

    def __mul__(self, other):
        return self._of(np.multiply, other)

    def __floordiv__(self, by):
        return Word(self.value // np.uint32(by))

    def __lshift__(self, by):
        return self >> -by if by < 0 else Word(self.value.astype(np.int64) << by)

    def __rshift__(self, by):
        return Word(self.value >> np.uint32(by))

    def below(self, bound):
        return self.value.view(np.int32) < word(bound).value.view(np.int32)

    def above(self, bound):
        return self.value > word(bound).value

    def equals(self, other):
        return self.value == word(other).value


class Real(lanes.Real):
    """128 float32 values."""

    def __init__(self, value):
        wide = np.broadcast_to(np.asarray(value, np.float32), (THREADS,))
        object.__setattr__(self, "value", wide)

    def __add__(self, other):
        return Real(self.value + other.value)

    def __sub__(self, other):
        return Real(self.value - other.value)

    def __mul__(self, other):
        return Real(self.value * other.value)

    def __truediv__(self, other):
        with np.errstate(divide="ignore"):
            return Real(self.value / other.value)

    def above(self, other):
        return self.value > other.value

    def differs(self, other):
        return self.value != other.value


def word(x):
    return x if isinstance(x, Word) else Word(x)


def scalar(x):
    return Word(int(x))


def thread():
    return Word(np.arange(THREADS))


def lane():
    return thread() & 31


def warp():
    return thread() >> 5


def code(*_arguments, returns=None):
    return lambda function: lambda *values: function(None, *values)


# ---- memory: a pointer is (bytes, an offset of each thread)


def address(ref, offset=0):
    if isinstance(ref, Ref):
        flat = ref.array.reshape(-1)
        assert np.shares_memory(flat, ref.array), "a piece of memory is contiguous"
        return flat.view(np.uint8), word(offset).value.astype(np.int64)
    return ref[0], ref[1] + word(offset).value.view(np.int32)


at = address


def element(pointer, index, size):
    return pointer[0], pointer[1] + index.value.view(np.int32).astype(np.int64) * size


def _where(pointer, offset, size):
    memory, at = address(pointer, offset)
    at = np.where(_active, at, 0)
    assert (at >= 0).all() and (at + size <= memory.size).all(), "outside the memory"
    assert (at % size == 0).all(), f"not aligned to {size} bytes"
    return memory, at


def load_words(pointer, offset, count):
    memory, at = _where(pointer, offset, 4 * count)
    words = memory[at[:, None] + np.arange(4 * count)].view(np.uint32)
    return [Word(words[:, i]) for i in range(count)]


def load_bits(pointer, offset, bits):
    memory, at = _where(pointer, offset, bits // 8)
    parts = memory[at[:, None] + np.arange(bits // 8)].astype(np.uint32)
    return Word((parts << (8 * np.arange(bits // 8))).sum(1))


def store_words(pointer, offset, words):
    memory, at = _where(pointer, offset, 4 * len(words))
    data = np.stack([one.value for one in words], 1).view(np.uint8)
    memory[(at[:, None] + np.arange(data.shape[1]))[_active]] = data[_active]


def store_bits(pointer, offset, x, bits):
    memory, at = _where(pointer, offset, bits // 8)
    data = x.value[:, None].view(np.uint8)[:, : bits // 8]
    memory[(at[:, None] + np.arange(bits // 8))[_active]] = data[_active]


def load_reals(pointer, offset, count):
    return [real_of_bits(x) for x in load_words(pointer, offset, count)]


def store_reals(pointer, offset, reals):
    store_words(pointer, offset, [bits_of_real(x) for x in reals])


def store_bf16(pointer, offset, x):
    bits = x.value.astype(ml_dtypes.bfloat16).view(np.uint16)
    store_bits(pointer, offset, Word(bits), 16)


def take_ticket(pointer):
    before = np.zeros(THREADS, np.uint32)
    memory, at = _where(pointer, 0, 4)
    for i in np.flatnonzero(_active):
        counter = memory[at[i] : at[i] + 4].view(np.uint32)
        before[i] = counter[0]
        counter += 1
    return Word(before)


def real(x):
    return Real(x)


def real_of_bits(x):
    return Real(x.value.view(np.float32))


def bits_of_real(x):
    return Word(np.ascontiguousarray(x.value).view(np.uint32))


def maximum(a, b):
    return Real(np.fmax(a.value, b.value))


def minimum(a, b):
    return Real(np.fmin(a.value, b.value))


def multiply_add(a, b, c):
    return Real(a.value.astype(np.float64) * b.value + c.value)


def absolute(x):
    return Real(np.abs(x.value))


def exp2(x):
    return Real(np.exp2(x.value))


def log2(x):
    with np.errstate(divide="ignore"):
        return Real(np.log2(x.value))


def rsqrt(x):
    return Real(1 / np.sqrt(x.value))


def select(condition, yes, no):
    return type(yes)(np.where(condition, yes.value, no.value))


def both(a, b):
    return a & b


def either(a, b):
    return a | b


def negate(a):
    return ~a


def bit_select(mask, ones, zeros):
    return (ones & mask) | (zeros & ~mask)


def permute_bytes(a, b, selector):
    pool = np.concatenate([x.value[:, None].view(np.int8) for x in (a, b)], 1)
    picked = np.concatenate([pool, pool >> 7], 1)[:, [(selector >> (4 * i)) & 15 for i in range(4)]]
    return Word(np.ascontiguousarray(picked).view(np.uint32)[:, 0])


def pair_of(x, dtype):
    return x.value[:, None].view(dtype).astype(np.float32)


def _word_of(pair):
    return Word(np.ascontiguousarray(pair).view(np.uint32)[:, 0])


def multiply_half2(a, b):
    return _word_of((pair_of(a, np.float16) * pair_of(b, np.float16)).astype(np.float16))


def multiply_bf16(a, b):
    product = pair_of(a, ml_dtypes.bfloat16) * pair_of(b, ml_dtypes.bfloat16)
    return _word_of(product.astype(ml_dtypes.bfloat16))


def half2_of_e4m3(x):
    two = x.value[:, None].view(np.uint8)[:, :2].view(_E4M3)
    return _word_of(two.astype(np.float16))


def e4m3_of_reals(low, high):
    pair = np.clip(np.stack([low.value, high.value], 1), -448, 448)
    codes = pair.astype(_E4M3).view(np.uint8).astype(np.uint32)
    return Word(codes[:, 0] | (codes[:, 1] << 8))


def half2_of_reals(low, high):
    return _word_of(np.stack([low.value, high.value], 1).astype(np.float16))


def bf16_of_reals(low, high):
    return _word_of(np.stack([low.value, high.value], 1).astype(ml_dtypes.bfloat16))


def reals_of_pair(x, halves):
    pair = pair_of(x, np.float16 if halves else ml_dtypes.bfloat16)
    return [Real(pair[:, 0]), Real(pair[:, 1])]


def reals_of_half2(x):
    return reals_of_pair(x, True)


def shuffle_xor(x, distance):
    return type(x)(x.value[np.arange(THREADS) ^ distance])


def multiply_tile(sums, a, b):
    """mma.m16n8k16 of four warps: fragments as the PTX manual draws them."""
    g, t = np.arange(WARP) // 4, np.arange(WARP) % 4
    out = [np.empty(THREADS, np.float32) for _ in range(4)]
    for first in range(0, THREADS, WARP):
        part = slice(first, first + WARP)
        left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        for e in (0, 1):
            for i in range(4):
                row, column = g + 8 * (i % 2), 2 * t + e + 8 * (i // 2)
                left[row, column] = pair_of(a[i], np.float16)[part, e]
            for i in range(2):
                right[2 * t + e + 8 * i, g] = pair_of(b[i], np.float16)[part, e]
        product = left @ right
        for i in range(4):
            out[i][part] = product[g + 8 * (i // 2), 2 * t + i % 2]
    return [Real(one.value + more) for one, more in zip(sums, out, strict=True)]


# ---- control: in step, so that a barrier has nothing to wait for


@contextlib.contextmanager
def _only(condition):
    global _active
    before = _active
    _active = before & condition
    yield
    _active = before


def when(condition, do):
    with _only(condition):
        if _active.any():
            do()


def branch(condition, changed, same):
    """Both ways, and a choice for each thread."""
    return [select(condition, a, b) for a, b in zip(changed(), same, strict=True)]


def any_lane(conditions):
    found = np.logical_or.reduce(conditions).reshape(-1, WARP).any(1)
    return np.repeat(found, WARP)


def first_lane(condition):
    held = (condition & _active).reshape(-1, WARP)
    first = np.where(held.any(1), held.argmax(1), WARP)
    return Word(np.repeat(first, WARP))


def _bits_of_warps(condition):
    """Per thread the word with a bit for each lane of its warp."""
    held = (condition & _active).reshape(-1, WARP).astype(np.int64)
    return Word(np.repeat((held << np.arange(WARP)).sum(1), WARP))


lanes_where = _bits_of_warps


def lanes_alike(x):
    rows = x.value.reshape(-1, WARP)
    same = (rows[:, :, None] == rows[:, None]).astype(np.int64)
    return Word((same << np.arange(WARP)).sum(-1).reshape(THREADS))


def lanes_before():
    return Word((np.int64(1) << (np.arange(THREADS) % WARP)) - 1)


def count_bits(x):
    return Word(np.unpackbits(x.value[:, None].view(np.uint8), axis=1).sum(1))


def repeat(start, stop, step, body, carry=()):
    i, carry = word(start), list(carry)
    while (running := _active & i.below(stop)).any():
        with _only(running):
            new = body(i, *carry)
        carry = [select(running, a, b) for a, b in zip(new, carry, strict=True)]
        i = i + step
    return carry


def sync_warpgroup():
    """All threads are here already."""


sync_block = sync_warp = sync_warpgroup


def tiles_of(array, values=None):
    """An array of a warpgroup is kept as its registers; `with_rows` names others."""
    return values or array


array_of = half_accumulator = bf16_accumulator = half_fragments = rows_of = with_rows = tiles_of
