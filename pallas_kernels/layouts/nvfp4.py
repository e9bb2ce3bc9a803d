"""NVFP4: E2M1 elements, one E4M3 scale per 16 of them, one float32 outer scale per matrix.

    codes    two E2M1 elements a byte, the even one in the low nibble (see `e2m1`)
    scale    one E4M3 byte (see `e4m3`) per 16 consecutive elements of the last axis, in the order
             of the elements, never negative or NaN
    value    e2m1 * scale * outer, or e2m1 * scale / outer for a file whose outer scale divides

Caches use `encode` and `decode` with outer = 1. Weights are an `NVFP4Tensor`. 4.5 bits a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from pallas_kernels.layouts import e2m1, e4m3

GROUP = 16
MAX = e2m1.MAX

_SIXTH = np.float32(1 / 6)
# So that scale * outer, at least 2^-9 * outer, is a normal float32 (subnormals may be flushed).
_MIN_OUTER = 2.0**-100


def encode(
    x: Float[Array, "*axes D"], outer: Float32[Array, "..."] | float = 1.0
) -> tuple[UInt8[Array, "*axes D//2"], Float8e4m3fn[Array, "*axes D//16"]]:
    """Packed codes and scales of x; `outer` > 0 broadcasts against the scales [..., D/16].

    All in float32, in this order (model specification 2.14):

        scale = e4m3((amax * float32(1/6)) / outer)     amax = max |x| over 16 elements
        code  = e2m1(x / (scale * outer))               both round to nearest even and saturate

    The second division is decided by comparison (see `e2m1.round_to`): with outer = 1 the bytes are
    the same on every device.

    amax is *multiplied* by float32(1/6), which is 0.16666667163..., not divided by 6. A scale of 0
    makes all 16 codes 0, -0.0 included; in any other group the sign is kept, so that -0.0 and small
    negative values become code 8. Bounds, with outer = 1: a group with amax up to 6 * 2^-10 =
    0.0059 becomes zeros, a value beyond 6 * 448 = 2688 becomes +-2688. NaN makes its group's scale
    NaN.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"last axis {x.shape[-1]} is not a multiple of {GROUP}")
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    amax = jnp.max(jnp.abs(groups), axis=-1)
    scales = e4m3.round_to(_divide(amax * _SIXTH, outer))
    steps = (e4m3.to_float(scales) * outer)[..., None]
    codes = jnp.where(steps == 0, jnp.uint8(0), e2m1.round_to(groups, steps))
    return e2m1.pack(codes.reshape(x.shape)), scales


def decode(
    codes: UInt8[Array, "*axes W"],
    scales: Float8e4m3fn[Array, "*axes W//8"],
    outer: Float32[Array, "..."] | float = 1.0,
) -> Float32[Array, "*axes 2*W"]:
    """e2m1 * scale * outer in float32: the first product is exact, the second is rounded once.

    `outer` broadcasts against the scales. Exact for every outer that is a power of two.
    """
    outer = jnp.asarray(outer, jnp.float32)
    return (_in_groups(codes, scales) * outer[..., None]).reshape(*codes.shape[:-1], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Tensor:
    """A stack of matrices [..., N, K] in NVFP4, groups along K.

    `outer` is the float32 number of each matrix exactly as its file has it. With `divides` False it
    multiplies (ModelOpt, and `quantize`); with `divides` True it divides (compressed-tensors). One
    convention cannot hold both: the reciprocal of a float32 is rounded, and one number in six does
    not come back from a second reciprocal. With the meaning beside the number, both kinds are
    dequantised with a single rounding and written back bit for bit. A kernel that wants a factor
    reads `multiplier`, never `outer`.
    """

    # Any: a leaf of this tree may also be a sharding or a ShapeDtypeStruct.
    codes: Any  # uint8 [..., N, K/2]
    scales: Any  # float8_e4m3fn [..., N, K/16]
    outer: Any  # float32 [...]
    divides: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., N, K] of the values."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and outer scales."""
        return self.codes.nbytes + self.scales.nbytes + self.outer.nbytes

    @property
    def multiplier(self) -> Float32[Array, "..."]:
        """The outer scale as a factor: `outer`, or its reciprocal, rounded, if `outer` divides."""
        return 1 / self.outer if self.divides else self.outer

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        """The values: e2m1 * scale, exact, then times or divided by `outer` (see `_divide`)."""
        values = _in_groups(self.codes, self.scales)
        outer = self.outer[..., None, None, None]
        values = _divide(values, outer) if self.divides else values * outer
        return values.reshape(self.shape).astype(dtype)


def quantize(w: Float[Array, "*axes N K"]) -> NVFP4Tensor:
    """Each matrix with outer = amax / (6 * 448), which maps its largest group to the scale 448.

    An all-zero matrix has outer = 1, and outer is at least 2^-100. A group whose amax is at most
    2^-10 / 448 = 2.2e-6 of its matrix's amax may become zeros (error: that amax, at most); no other
    value moves by more than a third of its group's amax. A non-finite w makes the matrix NaN.
    """
    amax = jnp.max(jnp.abs(w.astype(jnp.float32)), axis=(-2, -1))
    outer = jnp.where(amax == 0, 1.0, jnp.maximum(_divide(amax, MAX * e4m3.MAX), _MIN_OUTER))
    codes, scales = encode(w, outer[..., None, None])
    return NVFP4Tensor(codes, scales, outer)


def from_encode_scale(codes: Any, scales: Any, global_scale: ArrayLike) -> NVFP4Tensor:
    """compressed-tensors' weight_packed, weight_scale, weight_global_scale: the last one divides.

    value = e2m1 * scale / global_scale, rounded once. `global_scale` has one number per matrix, in
    any shape ([1] and [] both occur for one matrix).
    """
    return NVFP4Tensor(codes, scales, _one_per_matrix(global_scale, codes.shape), divides=True)


def from_decode_scale(codes: Any, scales: Any, weight_scale_2: ArrayLike) -> NVFP4Tensor:
    """ModelOpt's weight, weight_scale, weight_scale_2: the last one multiplies."""
    return NVFP4Tensor(codes, scales, _one_per_matrix(weight_scale_2, codes.shape))


def encode_scale(tensor: NVFP4Tensor) -> Float32[Array, "..."]:
    """The number to write as `weight_global_scale`, inverse of `from_encode_scale`.

    Bit for bit what was read; for a tensor whose outer scale multiplies, its reciprocal, rounded:
    the values read back are then within 2 units in the last place, and equal for powers of two.
    """
    return tensor.outer if tensor.divides else 1 / tensor.outer


def refuse_nan_scales(scales: np.ndarray, outer: ArrayLike = 1.0, name: str = "") -> None:
    """Host-side check of a file: ValueError at the first scale that is NaN or negative.

    -0.0 counts as negative, since kernels rely on a clear sign bit. An outer scale (of either
    convention) has to be positive and finite.
    """
    bits, outer = np.asarray(scales).view(np.uint8), np.asarray(outer)
    for at in map(tuple, np.argwhere(bits >= e4m3.NAN).tolist()):
        kind = "NaN" if bits[at] & 0x7F == e4m3.NAN else "negative"
        raise ValueError(f"NVFP4 scale {name}{list(at)} is {kind} (byte {bits[at]:#04x})")
    for at in map(tuple, np.argwhere(~((outer > 0) & (outer < np.inf))).tolist()):
        raise ValueError(f"NVFP4 outer scale {name}{list(at)} is {outer[at]}, not positive finite")


def _divide(x: Float32[Array, "*axes"], divisor: ArrayLike) -> Float32[Array, "*axes"]:
    """x / divisor, rounded once.

    XLA multiplies by the rounded reciprocal where the divisor is a constant or is broadcast (a
    quarter of all results are then one unit off, ties among them), also across an
    `optimization_barrier`. By a divisor that depends on each element of x it has to divide: exactly
    on a CPU; a GPU's own division is within 2 units in the last place.
    """
    return x / jnp.where(jnp.isnan(x), jnp.float32(1), jnp.float32(divisor))


def _in_groups(codes: Array, scales: Array) -> Float32[Array, "..."]:
    """e2m1 * scale [..., K/16, 16], exact: at most 2 + 4 significant bits."""
    if codes.shape[-1] * 2 != scales.shape[-1] * GROUP:
        needed = codes.shape[-1] * 2 / GROUP
        raise ValueError(
            f"{codes.shape[-1]} bytes of codes need {needed:g} scales, got {scales.shape[-1]}"
        )
    values = e2m1.to_float(e2m1.unpack(codes)).reshape(*scales.shape, GROUP)
    return values * e4m3.to_float(scales)[..., None]


def _one_per_matrix(outer: ArrayLike, codes_shape: tuple[int, ...]) -> Float32[Array, "..."]:
    outer = jnp.asarray(outer, jnp.float32)
    matrices = codes_shape[:-2]
    if outer.size != int(np.prod(matrices)):
        raise ValueError(f"{outer.size} outer scales for matrices of shape {matrices}")
    return outer.reshape(matrices)
