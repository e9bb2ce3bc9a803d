"""Loads and stores at byte addresses, in memory of the device or of the block."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.lanes.registers import Real, Word, bits_of_real, i32, real_of_bits, word


def address(ref: Any, offset: Word | int = 0) -> Any:
    """A pointer `offset` bytes into a reference, in its own address space."""
    return _advance(utils.memref_ptr(ref), offset)


def at(pointer: Any, offset: Word | int) -> Any:
    """A pointer some bytes further on."""
    return _advance(pointer, offset)


def element(pointer: Any, index: Word, size: int) -> Any:
    """A pointer `index` pieces of `size` bytes further on, however many bytes these are together
    (an offset of the other functions stays below 2^31).
    """
    return utils.getelementptr(pointer, [index.value], ir.Type.parse(f"!llvm.array<{size} x i8>"))


def load_words(pointer: Any, offset: Word | int, count: int) -> list[Word]:
    """`count` (1, 2 or 4) consecutive words, as one load; the address is aligned alike."""
    at = _advance(pointer, offset)
    if count == 1:
        return [Word(llvm.load(i32(), at))]
    loaded = llvm.load(ir.VectorType.get((count,), i32()), at)
    return [Word(llvm.extractelement(loaded, word(i).value)) for i in range(count)]


def load_bits(pointer: Any, offset: Word | int, bits: int) -> Word:
    """8 or 16 bits, zero-extended."""
    loaded = llvm.load(ir.IntegerType.get_signless(bits), _advance(pointer, offset))
    return Word(arith.extui(i32(), loaded))


def load_reals(pointer: Any, offset: Word | int, count: int) -> list[Real]:
    """`count` (1, 2 or 4) consecutive float32 values, as one load."""
    return [real_of_bits(x) for x in load_words(pointer, offset, count)]


def store_words(pointer: Any, offset: Word | int, words: Sequence[Word]) -> None:
    """1, 2 or 4 consecutive words, as one store."""
    at = _advance(pointer, offset)
    if len(words) == 1:
        llvm.store(words[0].value, at)
        return
    packed = vector.from_elements(
        ir.VectorType.get((len(words),), i32()), [one.value for one in words]
    )
    llvm.store(packed, at)


def store_reals(pointer: Any, offset: Word | int, reals: Sequence[Real]) -> None:
    """1, 2 or 4 consecutive float32 values, as one store."""
    store_words(pointer, offset, [bits_of_real(x) for x in reals])


def store_bf16(pointer: Any, offset: Word | int, x: Real) -> None:
    """One value rounded to bfloat16."""
    llvm.store(arith.truncf(ir.BF16Type.get(), x.value), _advance(pointer, offset))


def store_bits(pointer: Any, offset: Word | int, x: Word, bits: int) -> None:
    """The low 8 or 16 bits."""
    narrow = arith.trunci(ir.IntegerType.get_signless(bits), x.value)
    llvm.store(narrow, _advance(pointer, offset))


def take_ticket(pointer: Any) -> Word:
    """Adds one to a word of shared memory, atomically among its readers; its value before."""
    one = word(1).value
    kind, order = llvm.AtomicBinOp.add, llvm.AtomicOrdering.monotonic
    return Word(llvm.atomicrmw(kind, pointer, one, order))


def in_cluster(pointer: Any, rank: Word | int) -> Any:
    """The address of the same shared memory in another CTA of the cluster."""
    return nvvm.mapa(llvm.PointerType.get(7), pointer, word(rank).value)


def _advance(pointer: Any, offset: Word | int) -> Any:
    if isinstance(offset, int) and offset == 0:
        return pointer
    return utils.getelementptr(pointer, [word(offset).value], ir.IntegerType.get_signless(8))
