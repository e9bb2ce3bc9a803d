"""Arrays of a warpgroup as the registers that a lane has of them, and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.lanes.registers import Real, Word, element, i32, pair_of


def tiles_of(array: Any) -> list[list[Real]]:
    """Per 8 columns of a float32 (64, n) array in `Layout.WGMMA`, this lane's 4 values: two
    neighbouring columns of row g = lane / 4, then of row g + 8, of the warp's 16 rows.
    """
    return [
        [Real(x) for half in (0, 1) for x in pair_of(array.registers[0, i, 0, 0, half, 0, 0, 0, 0])]
        for i in range(array.registers.shape[1])
    ]


def array_of(tiles: Sequence[Sequence[Real]]) -> Any:
    """The inverse of `tiles_of`."""
    registers = np.empty((1, len(tiles), 1, 1, 2, 1, 1, 1, 1), dtype=object)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for i, values in enumerate(tiles):
        for half in (0, 1):
            both = [x.value for x in values[2 * half : 2 * half + 2]]
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = vector.from_elements(pair, both)
    return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def half_accumulator(tiles: Sequence[Sequence[Word]]) -> Any:
    """The inverse of `half_fragments`."""
    return _of_words(tiles, ir.F16Type.get())


def bf16_accumulator(tiles: Sequence[Sequence[Word]]) -> Any:
    """The same of bfloat16 pairs."""
    return _of_words(tiles, ir.BF16Type.get())


def _of_words(tiles: Sequence[Sequence[Word]], dtype: Any) -> Any:
    registers = np.empty((1, len(tiles), 1, 1, 2, 1, 1, 1, 1), dtype=object)
    pair = ir.VectorType.get((2,), dtype)
    for i, words in enumerate(tiles):
        for half, one in enumerate(words):
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = llvm.bitcast(pair, one.value)
    return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def half_fragments(array: Any) -> list[list[Word]]:
    """Per 8 columns of a float16 (64, n) array in `Layout.WGMMA`, this lane's two half2 words: row
    g, row g + 8. Two neighbouring tiles are the A fragment of one `multiply_tile`.
    """
    tiles = array.registers.shape[1]
    return [
        [
            Word(llvm.bitcast(i32(), array.registers[0, i, 0, 0, half, 0, 0, 0, 0]))
            for half in (0, 1)
        ]
        for i in range(tiles)
    ]


def rows_of(array: Any) -> list[Real]:
    """This lane's two values, rows g and g + 8, of a float32 (64,) array in
    `Layout.WGMMA.reduce(1)`.
    """
    flat = list(array.registers.flat)
    assert len(flat) == 2, array.registers.shape
    return [Real(element(x, 0)) if isinstance(x.type, ir.VectorType) else Real(x) for x in flat]


def with_rows(array: Any, values: Sequence[Real]) -> Any:
    """The inverse of `rows_of`, for an array that lies as this one does."""
    registers = np.empty_like(array.registers)
    for place, old, new in zip(
        np.ndindex(registers.shape), array.registers.flat, values, strict=True
    ):
        is_vector = isinstance(old.type, ir.VectorType)
        registers[place] = vector.from_elements(old.type, [new.value]) if is_vector else new.value
    return fa.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)
