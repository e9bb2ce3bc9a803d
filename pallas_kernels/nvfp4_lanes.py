"""NVFP4 in the registers of a lane: codes and scales become exact float16 pairs.

A code n is the float16 with the bits `((n & 8) << 12) | ((n & 7) << 9)` times 2^14, its subnormal
0.5 included, and a scale enters as e4m3 * 2^7. So a decoded value is the true one divided by
`DECODED`: 6 significant bits, between 2^-17 and 21, exact in every case (specification kernels
1.5).
"""

from pallas_kernels.lanes import (
    Word,
    bit_select,
    half2_of_e4m3,
    multiply_half2,
    permute_bytes,
    word,
)

DECODED = 128.0  # a true value divided by a decoded one
_TIMES_128 = 0x58005800  # half2 of 128


def code_pairs(codes: Word) -> list[Word]:
    """Eight codes -> half2 of (0, 4), (1, 5), (2, 6), (3, 7), each value * 2^-14.

    Eleven instructions: of every byte, the sign and the magnitude of the upper code are brought to
    where float16 has them (bit 7 and bits 3:1) by one shift and one bitwise choice; the upper and
    the lower byte of each half are then one AND and one shift apart.
    """
    odd = bit_select(0x80808080, codes, codes >> 3)
    even = bit_select(0x80808080, codes << 4, codes << 1)
    mask = 0x8E008E00
    return [(even << 8) & mask, (odd << 8) & mask, even & mask, odd & mask]


def scale_pair(scales: Word) -> Word:
    """Two E4M3 bytes (the low half) -> half2 of them, times 2^7; NaN stays NaN."""
    return multiply_half2(half2_of_e4m3(scales), word(_TIMES_128))


def scale_pairs(scales: Word) -> list[Word]:
    """Two E4M3 bytes (the low half) -> half2 of each one twice, times 2^7; NaN stays NaN."""
    both = scale_pair(scales)
    return [permute_bytes(both, both, selector) for selector in (0x1010, 0x3232)]
