"""MXFP8 in the registers of a lane: codes and exponents become exact bfloat16 pairs.

The bits of an E4M3 byte, moved to bfloat16's sign and to the low end of its exponent, are the value
times 2^-120, subnormals included: a byte under eight copies of its sign, and one shift. A group's
power of two enters as one exact product. So a decoded value is the true one divided by `DECODED`: 4
significant bits, exact for exponent bytes 19 to 150 (weights up to 2^31; below 2^-108 bits are
lost), infinite or NaN above.
"""

from pallas_kernels.lanes import Word, multiply_bf16, permute_bytes, select, word

DECODED = 65536.0  # a true value divided by a decoded one: 2^16
_BOTH = 0x00800080  # one, in the exponents of two bfloat16
_BIAS = 120 - 16  # of a factor's exponent over the byte of the group
_INFINITE = 255 - _BIAS  # the byte whose factor is infinite


def factor_pair(exponent: Word) -> Word:
    """An exponent byte as the bfloat16 factor of both elements of a pair."""
    at_most = select(exponent.below(_INFINITE), exponent, word(_INFINITE))
    return at_most * _BOTH + _BIAS * _BOTH


def value_pairs(codes: Word, factor: Word) -> list[Word]:
    """Four codes -> bfloat16 pairs of (0, 1) and (2, 3), each value / `DECODED`."""
    pairs = (permute_bytes(codes, codes, selector) for selector in (0x9180, 0xB3A2))
    return [multiply_bf16((pair << 4) & 0x87F087F0, factor) for pair in pairs]
