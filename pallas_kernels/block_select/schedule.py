"""Which pages are scored for which queries, flattened so that every program gets an equal share.

The T x K rows (query, index head) of a sequence are cut into items of N rows. An item needs the
pages before the newest block of its last query, in steps of `STEP` pages. All steps of all items
stand in one list, item by item, of which program c of G takes the c-th equal part. This depends on
the positions alone, so a program of many layers computes it once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

STEP = 4  # pages that a program scores at once, one a warp
ROWS = (8, 16, 32, 64, 128)  # N, what the tensor cores take as columns
MAX_ITEMS = 2**15 - 1
MAX_STEPS = 2**16 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """The steps to be done: entry = item * 2^16 + step of the item; the first `total` are valid."""

    entries: Int[Array, "S"]
    total: Int[Array, "1"]


def rows_of_item(rows: int) -> int:
    """N for a sequence of that many rows: the least that holds them, else the largest."""
    return next((n for n in ROWS if n >= rows), ROWS[-1])


def items_of_sequence(rows: int) -> int:
    """Items that the rows of one sequence are cut into."""
    return -(-rows // rows_of_item(rows))


def make(positions: Int[Array, "B T"], heads: int, block_size: int, num_blocks: int) -> Schedule:
    """The steps of a batch; padding queries (position -1) need none."""
    batch, queries = positions.shape
    items = items_of_sequence(queries * heads)
    tokens = rows_of_item(queries * heads) // heads  # of an item
    padded = jnp.pad(positions, [(0, 0), (0, items * tokens - queries)], constant_values=-1)
    newest = jnp.max(padded.reshape(batch * items, tokens), axis=-1) // block_size
    steps = -(-jnp.clip(newest, 0, num_blocks) // STEP)
    ends = jnp.cumsum(steps)
    index = jnp.arange(batch * items * -(-num_blocks // STEP), dtype=jnp.int32)
    item = jnp.searchsorted(ends, index, side="right", method="compare_all")
    item = jnp.minimum(item, batch * items - 1)
    entries = (item << 16) | (index - (ends - steps)[item])
    return Schedule(entries.astype(jnp.int32), ends[-1:].astype(jnp.int32))
