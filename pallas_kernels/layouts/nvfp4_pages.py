"""NVFP4 matrices in the order in which a Hopper kernel reads them: the form that experts have in
memory there. Nothing but the order of bits differs from an `NVFP4Tensor`, so both ways are exact.

    pages    [..., R/32, K/128] of 2,304 bytes, each 32 rows x 128 columns
    codes    the first 2,048 bytes: [4 blocks of 8 rows][8 rows g][4 lanes t][16 bytes]; a lane has
             the 32 columns from 32 t, as four words of 8 codes. Of the codes 2 i and 2 i + 1 of a
             word, i < 4, the first is in its low half and the second in its high one, with
                 i        0      1      2      3
                 sign    15     12     14     13
                 rest   8:6    5:3    2:0   11:9
             so that a pair is two bfloat16, times 2^-126, after one AND, the pairs i = 1 after one
             shift more, the others after three instructions more (`PLACES`)
    scales   the last 256 bytes: [4 blocks][8 rows][4 lanes][2], of a lane's two groups of 16
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.layouts import e2m1
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor

ROWS, COLUMNS = 32, 128  # of a page
LINES, LINE = 18, 128  # of its bytes
CODE_BYTES = 2048
PLACES = ((15, 6), (12, 3), (14, 0), (13, 9))  # lowest bits of sign and rest, by i

_BLOCKS, _LANES, _WORDS = 4, 4, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Pages:
    """A stack of matrices [..., R, K] as pages; `outer` and `divides` as in `NVFP4Tensor`."""

    # Any: a leaf of this tree may also be a sharding or a ShapeDtypeStruct.
    pages: Any  # uint8 [..., R/32, K/128, 18, 128]
    outer: Any  # float32 [...]
    divides: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., R, K] of the values."""
        *stack, rows, columns, _, _ = self.pages.shape
        return (*stack, rows * ROWS, columns * COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes of pages and outer scales, as many as the tensor's."""
        return self.pages.nbytes + self.outer.nbytes

    @property
    def multiplier(self) -> Float[Array, "..."]:
        """The outer scale as a factor, as of an `NVFP4Tensor`."""
        return 1 / self.outer if self.divides else self.outer

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        """The values, those of the tensor."""
        return to_tensor(self).dequantize(dtype)


def fits(tensor: NVFP4Tensor) -> bool:
    """Whether the matrices are whole pages, and two of them high."""
    *_, rows, columns = tensor.shape
    return rows % (2 * ROWS) == 0 and columns % COLUMNS == 0


def to_pages(tensor: NVFP4Tensor) -> NVFP4Pages:
    """The same matrices as pages. ValueError unless they are whole pages."""
    if not fits(tensor):
        raise ValueError(
            f"matrices of {list(tensor.shape[-2:])} are no whole pages of {2 * ROWS} x {COLUMNS}"
        )
    *stack, rows, columns = tensor.shape
    high, wide = rows // ROWS, columns // COLUMNS
    codes = e2m1.unpack(tensor.codes).reshape(
        *stack, high, _BLOCKS, 8, wide, _LANES, _WORDS, 4, 2
    )  # ... r b g c t v i e
    halves = _spread(jnp.moveaxis(codes, -2, -1))  # ... r b g c t v e
    halves = jnp.moveaxis(halves, -4, -6)  # ... r c b g t v e
    code_bytes = _bytes_of_halves(halves).reshape(*stack, high, wide, CODE_BYTES)
    scales = jax.lax.bitcast_convert_type(tensor.scales, jnp.uint8)
    scales = scales.reshape(*stack, high, _BLOCKS, 8, wide, _LANES, 2)
    scales = jnp.moveaxis(scales, -3, -5).reshape(*stack, high, wide, LINES * LINE - CODE_BYTES)
    pages = jnp.concatenate([code_bytes, scales], -1).reshape(*stack, high, wide, LINES, LINE)
    return NVFP4Pages(pages, tensor.outer, tensor.divides)


def to_tensor(pages: NVFP4Pages) -> NVFP4Tensor:
    """The inverse of `to_pages`."""
    *stack, high, wide, _, _ = pages.pages.shape
    flat = pages.pages.reshape(*stack, high, wide, LINES * LINE)
    codes, scales = flat[..., :CODE_BYTES], flat[..., CODE_BYTES:]
    halves = codes.reshape(*stack, high, wide, _BLOCKS, 8, _LANES, _WORDS, 2, 2)
    halves = halves[..., 0] | (halves[..., 1].astype(jnp.uint16) << 8)
    unpacked = _gather(jnp.moveaxis(halves, -6, -4))  # ... r b g c t v e i
    unpacked = jnp.moveaxis(unpacked, -1, -2).reshape(*stack, high * ROWS, wide * COLUMNS)
    scales = jnp.moveaxis(scales.reshape(*stack, high, wide, _BLOCKS, 8, _LANES, 2), -5, -3)
    scales = scales.reshape(*stack, high * ROWS, wide * COLUMNS // 16)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    return NVFP4Tensor(e2m1.pack(unpacked), scales, pages.outer, pages.divides)


def _spread(codes: UInt8[Array, "*axes 4"]) -> Array:
    """Four codes as the 16 bits of a half word."""
    codes = codes.astype(jnp.uint16)
    total = jnp.zeros(codes.shape[:-1], jnp.uint16)
    for i, (sign, rest) in enumerate(PLACES):
        total |= ((codes[..., i] >> 3) << sign) | ((codes[..., i] & 7) << rest)
    return total


def _gather(halves: Array) -> UInt8[Array, "*axes 4"]:
    """The inverse of `_spread`."""
    codes = [(((halves >> s) & 1) << 3) | ((halves >> r) & 7) for s, r in PLACES]
    return jnp.stack(codes, -1).astype(jnp.uint8)


def _bytes_of_halves(halves: Array) -> UInt8[Array, "*axes 2"]:
    return jnp.stack([halves & 0xFF, halves >> 8], -1).astype(jnp.uint8)
