"""FP4 E2M1: four bits `s ee m`, two elements a byte.

    code & 7    0    1    2    3    4    5    6    7
    magnitude   0   0.5   1   1.5   2    3    4    6      bit 3 is the sign, so 8 is -0.0

There is no NaN and no infinity. Two neighbours of the last axis share a byte: the even element is
in the low nibble, the odd one in the high nibble.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

MAX = 6.0

# Halfway points of neighbouring magnitudes. A tie goes to the even code, so the point between codes
# k and k + 1 moves up exactly when k is odd.
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_DOUBLED_MAGNITUDES = 0xC8643210  # hex digit k is twice the magnitude of code k


def round_to(
    x: Float32[Array, "*axes"], step: Float32[Array, "..."] | float = 1.0
) -> UInt8[Array, "*axes"]:
    """Codes of x / step, one a byte: nearest, ties to the even code, saturating at +-6.

    The sign is kept: -0.0, and negative values that round to zero, become 8. NaN becomes 0 or 8.

    Nothing is divided (see `nvfp4`): |x| is compared with the halfway points times the step. These
    products are exact if the step has at most 21 significant bits, such as every E4M3 scale times a
    power of two, and x / step in float32 then rounds to the same codes. For other steps the two may
    differ where x is within a float32 rounding of a tie.
    """
    magnitude = jnp.abs(x)
    codes = jnp.zeros(x.shape, jnp.uint32)
    for k, tie in enumerate(TIES):
        above = magnitude >= tie * step if k % 2 else magnitude > tie * step
        codes = codes + above.astype(jnp.uint32)
    sign = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 28) & 8
    return (codes | sign).astype(jnp.uint8)


def to_float(codes: UInt8[Array, "*axes"]) -> Float32[Array, "*axes"]:
    """The value of each code (one a byte, 0..15), exact."""
    codes = codes.astype(jnp.uint32)
    doubled = (jnp.uint32(_DOUBLED_MAGNITUDES) >> ((codes & 7) * 4)) & 15
    return doubled.astype(jnp.int32).astype(jnp.float32) * jnp.where(codes < 8, 0.5, -0.5)


def pack(codes: UInt8[Array, "*axes D"]) -> UInt8[Array, "*axes D//2"]:
    """Two codes a byte, the even element in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"last axis {codes.shape[-1]} is not a multiple of 2")
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: UInt8[Array, "*axes W"]) -> UInt8[Array, "*axes 2*W"]:
    """One code a byte: the inverse of `pack`."""
    nibbles = (packed[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
    return nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
