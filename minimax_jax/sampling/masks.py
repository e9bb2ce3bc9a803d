"""Sets of token ids as bits: id i is bit i % 32 of word i // 32, 25 KB a row of 200,064 ids. A
grammar's mask has this form, as guidance libraries fill it.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

BITS = 32


def packed_mask(mask: Bool[np.ndarray, "*rows V"]) -> UInt32[np.ndarray, "*rows words"]:
    """The bits of a mask, on the host; those beyond V are 0."""
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % BITS)]
    packed = np.packbits(np.pad(mask, padding), axis=-1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)


def masked(
    logits: Float[Array, "*rows V"], allowed: UInt32[Array, "*rows words"] | None
) -> Float[Array, "*rows V"]:
    """The logits, -inf where a bit is not set. None allows everything."""
    if allowed is None:
        return logits
    V = logits.shape[-1]
    bits = allowed[..., None] >> jnp.arange(BITS, dtype=jnp.uint32) & 1
    bits = bits.reshape(*allowed.shape[:-1], allowed.shape[-1] * BITS)[..., :V]
    return jnp.where(bits == 1, logits, -jnp.inf)
