"""Training's work, blocks outside: groups of (query, slot) pairs of one block, pieces of groups.

All queries of a pack, whatever their tables, are sorted by the physical block that they name, for
each KV head on its own. `TOGETHER` pairs of one block make a group, the rows of one matrix product;
at most `GROUPS` groups of one block, one behind the other, make a piece, which one program takes:
work is even however often a block is chosen, and what is added to what is fixed.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_attention.pairs import Pair, count_below, group

TOGETHER = 4  # pairs of a group
GROUPS = 64  # of a piece: about 0.2 ms of a program, and 1,152 pieces for 4,096 tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """n pieces and I groups of R pairs for each KV head; block b owns `counts` pieces from
    `starts` on.

    A place is `query << slot_bits | slot`. Behind the last pair of a block the complement of the
    group's first place stands, which is negative. `last` is the last token of the block that a
    pair sees, -1 where there is no pair.
    """

    pair: Pair = field(metadata={"static": True})
    slots: int = field(metadata={"static": True})  # of a query
    block: Int[Array, "*K n"]
    first: Int[Array, "*K n"]  # group
    groups: Int[Array, "*K n"]  # 0 behind the last piece
    starts: Int[Array, "*K P"]
    counts: Int[Array, "*K P"]
    place: Int[Array, "*K I R"]
    last: Int[Array, "*K I R"]

    def of_rows(self, x: Float[Array, "T K G"]) -> Float[Array, "K I rows"]:
        """A number of each query's heads, in the order of the groups."""
        queries = jnp.maximum(self.place, ~self.place) >> self.pair.slot_bits
        found = jax.vmap(lambda x, some: x[some])(x.swapaxes(0, 1), queries)
        return found.reshape(*queries.shape[:2], -1)


def pieces_of(
    ids: Int[Array, "T K C"],
    pages: Int[Array, "T K C"],
    positions: Int[Array, "T"],
    num_blocks: int,
    tokens: int,
) -> Pieces:
    """The work of all pairs: their logical blocks, and the physical ones, -1 where there is none,
    of so many tokens.
    """
    pair = Pair.of(ids.shape[0], ids.shape[2])

    def of_head(ids, pages):
        groups = group(pair.sort(pages, pages >= 0), pair, num_blocks, TOGETHER)
        seen = positions[groups.query] - ids[groups.query, groups.slot] * tokens
        last = jnp.where(groups.used, jnp.clip(seen, -1, tokens - 1), -1)
        place = (groups.query << pair.slot_bits) | groups.slot
        place = jnp.where(groups.used, place, ~place[:, :1])
        numbers = jnp.arange(num_blocks)
        own = jnp.where(groups.used[:, 0], groups.block, num_blocks)
        starts, ends = count_below(own, numbers), count_below(own, numbers + 1)
        block, first, taken, starts, counts = _cut(starts, ends - starts, own.shape[0])
        return Pieces(
            pair=pair, slots=ids.shape[1], block=block, first=first, groups=taken,
            starts=starts, counts=counts, place=place, last=last,
        )  # fmt: skip

    return jax.vmap(of_head)(ids.swapaxes(0, 1), pages.swapaxes(0, 1))


def _cut(starts: Int[Array, "P"], counts: Int[Array, "P"], groups: int) -> tuple[Array, ...]:
    """(block, first group, groups) of each piece, (first piece, pieces) of each block."""
    num_blocks = counts.shape[0]
    most = groups // GROUPS + min(num_blocks, groups)
    pieces = -(-counts // GROUPS)
    ends = jnp.cumsum(pieces)
    number = jnp.arange(most)
    block = jnp.minimum(count_below(ends, number + 1), num_blocks - 1)
    behind = (number - (ends - pieces)[block]) * GROUPS
    taken = jnp.where(number < ends[-1], jnp.clip(counts[block] - behind, 0, GROUPS), 0)
    found = block, starts[block] + behind, taken, ends - pieces, pieces
    return tuple(x.astype(jnp.int32) for x in found)
