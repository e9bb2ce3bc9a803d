"""FP8 E4M3FN: one byte `s eeee mmm`, exponent bias 7.

    eeee > 0:  value = (-1)^s * 2^(eeee-7) * (1 + mmm/8)      2^-6 ... 448
    eeee = 0:  value = (-1)^s * 2^-6 * mmm/8                  0, 2^-9 ... 7 * 2^-9
    0x7F, 0xFF are NaN; there is no infinity.

Both directions work on the bits, in integers. A float cast is a different function on each platform
(some go through float16 and round twice, overflow is NaN or 448), and compilers may drop a pair of
casts as excess precision or contract a multiply and an add around the usual magic-number rounding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8, UInt32

MAX = 448.0
NAN = 0x7F

_MAX_BITS = 0x43E00000  # float32 bits of 448
_INFINITY_BITS = 0x7F800000
_MIN_NORMAL = 121  # biased float32 exponent of 2^-6
_DROPPED = 20  # mantissa bits that float32 has and E4M3 has not


def round_to(x: Float[Array, "..."]) -> Float8e4m3fn[Array, "..."]:
    """Nearest E4M3 value, ties to the even code, saturating at +-448 (infinities too).

    NaN stays NaN and -0.0 stays -0.0; a negative value that rounds to zero becomes -0.0.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    finite = jnp.minimum(magnitude, jnp.uint32(_MAX_BITS))
    exponent = finite >> 23
    significand = (finite & 0x7FFFFF) | 0x800000
    # Below 2^-6 the grid is fixed: drop one bit more per binade, 25 at most (all 24, below a tie).
    dropped = jnp.clip(_MIN_NORMAL + _DROPPED - exponent.astype(jnp.int32), _DROPPED, 25)
    rounded = _shift_right_to_even(significand, dropped.astype(jnp.uint32))
    # `rounded` contains the leading one (8) of a normal value; a carry moves on to the exponent.
    code = ((jnp.maximum(exponent, jnp.uint32(_MIN_NORMAL)) - _MIN_NORMAL) << 3) + rounded
    code = jnp.where(magnitude > _INFINITY_BITS, jnp.uint32(NAN), code)
    code = (code | ((bits >> 24) & 0x80)).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn)


def to_float(codes: Float8e4m3fn[Array, "..."] | UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """The float32 value of each code, exact; NaN for 0x7F and 0xFF only.

    The seven low bits, moved to the top of a float16's exponent and mantissa, are the value * 2^-8.
    """
    bits = to_bits(codes).astype(jnp.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 2.0**8
    return jnp.where((bits & 0x7F) == NAN, jnp.nan, value)


def to_bits(codes: Array) -> UInt8[Array, "..."]:
    """The bytes of E4M3 codes (bytes are returned as they are); ValueError otherwise."""
    if codes.dtype not in (jnp.float8_e4m3fn, jnp.uint8):
        raise ValueError(f"expected float8_e4m3fn or uint8 codes, got {codes.dtype}")
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def _shift_right_to_even(n: UInt32[Array, "..."], shift: UInt32[Array, "..."]) -> Array:
    """n / 2^shift, rounded to nearest, ties to even; shift >= 1."""
    below_half = (jnp.uint32(1) << (shift - 1)) - 1
    return (n + below_half + ((n >> shift) & 1)) >> shift
