"""MXFP8: E4M3 elements and one power of two (E8M0) per 32 of them, along the last axis.

    element   one E4M3 byte (see `e4m3`)
    exponent  one byte b per 32 consecutive elements, linear: 2^(b - 127), b in 0..254; 255 is NaN
    value     e4m3 * 2^(b - 127)

This is the public MXFP8 checkpoint's `weight` [N, K] and `weight_scale_inv` uint8 [N, K/32], which
multiplies in spite of its name. 8.25 bits a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

from pallas_kernels.layouts import e4m3

GROUP = 32
NAN = 255

_BIAS = 127
_MAX_EXPONENT = 8  # floor(log2(448))


def encode(
    x: Float[Array, "*axes K"],
) -> tuple[Float8e4m3fn[Array, "*axes K"], UInt8[Array, "*axes K//32"]]:
    """Codes and exponent bytes by the floor rule of the OCP MX specification.

        b    = clamp(floor(log2(amax)) - 8 + 127, 0, 254)    amax = max |x| over 32 elements
        code = e4m3(x / 2^(b - 127))                         nearest even, saturating

    The logarithm is read from amax's exponent bits, so it is exact, and every amax below 2^-118
    (zero and subnormals too) has b = 0. An all-zero group has b = 0 and zero codes that keep their
    sign. Elements beyond 448/512 of the group's binade saturate: at most 1/8 of amax is lost. The
    largest float32 has b = 246. A group with a NaN or an infinity has b = 247, which leaves only
    its values above 2^110: NaN stays NaN, and infinity decodes to 448 * 2^120, which is infinite
    again in float32. Subnormal x may be taken for zero (XLA on a CPU does so).
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"last axis {x.shape[-1]} is not a multiple of {GROUP}")
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    amax = jnp.max(jnp.abs(groups), axis=-1)
    biased = (jax.lax.bitcast_convert_type(amax, jnp.uint32) >> 23) & 0xFF
    exponents = jnp.maximum(biased, _MAX_EXPONENT) - _MAX_EXPONENT  # at most 255 - 8
    inverse = _power_of_two(2 * _BIAS - exponents.astype(jnp.int32))
    codes = e4m3.round_to((groups * inverse[..., None]).reshape(x.shape))
    return codes, exponents.astype(jnp.uint8)


def decode(
    codes: Float8e4m3fn[Array, "*axes K"], exponents: UInt8[Array, "..."]
) -> Float[Array, "*axes K"]:
    """e4m3 * 2^(b - 127) in float32; NaN for b = 255 and for NaN codes.

    Exact in float32's normal range. Results below 2^-126 (only b <= 9 has any) may be flushed to
    zero; those beyond float32's range (only b >= 247 has any, which `encode` never gives a finite
    x) are infinite.
    """
    if codes.shape[-1] != exponents.shape[-1] * GROUP:
        raise ValueError(
            f"{codes.shape[-1]} elements need {codes.shape[-1] / GROUP:g} exponents, "
            f"got {exponents.shape[-1]}"
        )
    # 2^-127 is no normal float32: multiply by two halves of the exponent, both in range.
    b = exponents.astype(jnp.int32)
    first = _power_of_two(_BIAS + (b - _BIAS) // 2)
    second = _power_of_two(_BIAS + (b - _BIAS) - (b - _BIAS) // 2)
    second = jnp.where(b == NAN, jnp.nan, second)
    groups = e4m3.to_float(codes).reshape(*exponents.shape, GROUP)
    return (groups * first[..., None] * second[..., None]).reshape(codes.shape)


def scale_to_float(exponents: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """2^(b - 127) in float32, NaN for 255. Made of bits: b = 0 is the subnormal 2^-127."""
    b = exponents.astype(jnp.uint32)
    bits = jnp.where(b == 0, jnp.uint32(0x400000), b << 23)
    bits = jnp.where(b == NAN, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP8Tensor:
    """A stack of matrices [..., N, K] in MXFP8, groups along K."""

    # Any: a leaf of this tree may also be a sharding or a ShapeDtypeStruct.
    codes: Any  # float8_e4m3fn [..., N, K]
    exponents: Any  # uint8 [..., N, K/32]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., N, K] of the values."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and exponents."""
        return self.codes.nbytes + self.exponents.nbytes

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        """The values, exact in float32 (see `decode`) and in bfloat16."""
        return decode(self.codes, self.exponents).astype(dtype)


def quantize(w: Float[Array, "*axes N K"]) -> MXFP8Tensor:
    """w in MXFP8, by `encode`."""
    return MXFP8Tensor(*encode(w))


def refuse_nan_scales(exponents: np.ndarray, name: str = "") -> None:
    """Host-side check of a file's exponents: ValueError with the position of the first 255."""
    for position in np.argwhere(np.asarray(exponents) == NAN)[:1]:
        raise ValueError(f"MXFP8 scale {name}{position.tolist()} is NaN (byte 255)")


def _power_of_two(biased: Array) -> Float[Array, "..."]:
    """2^(biased - 127) in float32, for biased in 1..254."""
    return jax.lax.bitcast_convert_type(biased.astype(jnp.uint32) << 23, jnp.float32)
