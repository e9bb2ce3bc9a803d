"""(query, slot) pairs of a tile in the order of the blocks that they name: how attention comes to
have its blocks outside and its queries inside.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

END = 2**31 - 1  # the key of a slot without a block, behind all others


@dataclass(frozen=True)
class Pair:
    """How a sort key holds (block, query, slot), in this order from the top."""

    slot_bits: int
    bits: int  # of query and slot

    @classmethod
    def of(cls, queries: int, slots: int) -> "Pair":
        """For tiles of so many queries with so many slots each."""
        slot_bits = (slots - 1).bit_length()
        return cls(slot_bits=slot_bits, bits=slot_bits + (queries - 1).bit_length())

    def refuse(self, blocks: int) -> str | None:
        """A sentence if the keys of so many blocks do not fit."""
        if blocks << self.bits < END:
            return None
        return f"{blocks} blocks and {self.bits} bits of query and slot do not fit 31-bit keys"

    def sort(
        self, ids: Int[Array, "*tiles T C"], some: Bool[Array, "*tiles T C"]
    ) -> Int[Array, "*tiles pairs"]:
        """The keys of a tile's pairs in order; those of unused slots are `END`."""
        T, C = ids.shape[-2:]
        number = (jnp.arange(T) << self.slot_bits)[:, None] | jnp.arange(C)
        keys = jnp.where(some, (ids.astype(jnp.int32) << self.bits) | number, END)
        return jnp.sort(keys.reshape(*ids.shape[:-2], T * C), axis=-1)

    def query_and_slot(self, keys: Int[Array, "*pairs"]) -> tuple[Array, Array]:
        """What a key says beside its block."""
        number = keys & ((1 << self.bits) - 1)
        return number >> self.slot_bits, number & ((1 << self.slot_bits) - 1)


def merge_slots(
    out: Float[Array, "*queries C G H"], lse: Float[Array, "*queries C G"]
) -> tuple[Float[Array, "*queries G H"], Float[Array, "*queries G"]]:
    """The partial results of a query's slots become one, float32, in the slots' own order; slots
    with a log-sum-exp of -inf hold anything.
    """
    top = jnp.max(lse, axis=-2, keepdims=True)
    weights = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-2)
    some = total > 0
    weights = weights / jnp.where(some, total, 1.0)[..., None, :]
    values = jnp.where(weights[..., None] > 0, out.astype(jnp.float32), 0.0)
    merged = jnp.sum(values * weights[..., None], axis=-3)
    return merged, jnp.log(total) + jnp.where(some, top[..., 0, :], 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Equal numbers of pairs of one block: I groups of R pairs, the places behind a block's last
    pair unused.
    """

    block: Int[Array, "I"]
    query: Int[Array, "I R"]
    slot: Int[Array, "I R"]
    used: Bool[Array, "I R"]


def group(keys: Int[Array, "pairs"], pair: Pair, num_blocks: int, size: int) -> Groups:
    """Sorted keys of one tile in groups of `size`: as many as the worst distribution needs."""
    most = keys.shape[0] // size + min(num_blocks, keys.shape[0])
    bounds = count_below(keys, jnp.arange(num_blocks + 1, dtype=jnp.int32) << pair.bits)
    counts = -(-jnp.diff(bounds) // size)  # groups of each block
    ends = jnp.cumsum(counts)
    number = jnp.arange(most)
    block = jnp.minimum(count_below(ends, number + 1), num_blocks - 1)
    first = bounds[block] + (number - (ends - counts)[block]) * size
    at = first[:, None] + jnp.arange(size)
    used = (number < ends[-1])[:, None] & (at < bounds[block + 1][:, None])
    query, slot = pair.query_and_slot(keys[jnp.where(used, at, 0)])
    return Groups(block=block, query=jnp.where(used, query, 0), slot=slot, used=used)


def count_below(numbers: Int[Array, "n"], bounds: Int[Array, "m"]) -> Int[Array, "m"]:
    """How many numbers are less than each bound: n x m comparisons in one pass, where a search
    would be a loop of launches.
    """
    return jnp.sum(numbers < bounds[:, None], axis=1, dtype=jnp.int32)
