"""Which pages are scored for which queries, dealt out so that every program gets an equal share.

The T x K rows (query, index head) of a sequence are cut into items of N rows. An item needs the
pages before the newest block of its last query, in steps of `STEP` pages. All steps of all items
stand in one list, item by item, of which program c of G takes the c-th equal part. This depends on
positions and block tables alone, so a program of many layers computes it once; and it names the
pages themselves, so that a kernel is one load away from its first copy.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

STEP = 4  # pages that a program scores at once, one a warp
ROWS = (8, 16, 32, 64, 128)  # N, what the tensor cores take as columns
MAX_STEPS = 2**22  # of a batch, since G times their number is an int32
ITEM, PAGE, IDS, FIELDS = 0, 1, 4, 8  # of an entry: 32 bytes, one sector of memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Each program's steps: how many, and for each its item, its first page (by logical id), and
    the pool's blocks of its four pages, -1 for none.
    """

    counts: Int[Array, "G"]
    entries: Int[Array, "G S 8"]


def rows_of_item(rows: int) -> int:
    """N for a sequence of that many rows: the least that holds them, else the largest."""
    return next((n for n in ROWS if n >= rows), ROWS[-1])


def items_of_sequence(rows: int) -> int:
    """Items that the rows of one sequence are cut into."""
    return -(-rows // rows_of_item(rows))


def rows_of(item: Any, rows: int, num_rows: int) -> tuple[Any, Any]:
    """An item's first row, and the end of its sequence, in the rows of all sequences."""
    items = items_of_sequence(rows)
    sequence = item // items if items > 1 else item
    return sequence * rows + (item + sequence * -items) * num_rows, (sequence + 1) * rows


def max_steps(batch: int, rows: int, blocks: int) -> int:
    """The most steps that a batch of such sequences can need."""
    return batch * items_of_sequence(rows) * -(-blocks // STEP)


def make(
    positions: Int[Array, "B T"],
    block_table: Int[Array, "B P"],
    *,
    heads: int,
    block_size: int,
    programs: int,
) -> Schedule:
    """The steps of a batch; padding queries (position -1) need none."""
    (batch, queries), blocks = positions.shape, block_table.shape[1]
    items = items_of_sequence(queries * heads)
    tokens = rows_of_item(queries * heads) // heads  # of an item
    padded = jnp.pad(positions, [(0, 0), (0, items * tokens - queries)], constant_values=-1)
    newest = jnp.max(padded.reshape(batch * items, tokens), axis=-1) // block_size
    pages = jnp.clip(newest, 0, blocks)
    steps = -(-pages // STEP)
    ends = jnp.cumsum(steps)
    firsts = jnp.arange(programs + 1) * ends[-1] // programs
    longest = -(-max_steps(batch, queries * heads, blocks) // programs)
    index = firsts[:-1, None] + jnp.arange(longest)  # [G, S]
    item = jnp.searchsorted(ends, index, side="right", method="compare_all")
    item = jnp.minimum(item, batch * items - 1)
    page = (index - (ends - steps)[item]) * STEP
    wanted = page[..., None] + jnp.arange(STEP)  # [G, S, STEP]
    ids = block_table[item[..., None] // items, jnp.clip(wanted, 0, blocks - 1)]
    ids = jnp.where(wanted < pages[item][..., None], ids, -1)
    unused = jnp.zeros((*item.shape, IDS - PAGE - 1), ids.dtype)
    entries = jnp.concatenate([item[..., None], page[..., None], unused, ids], axis=-1)
    return Schedule(jnp.diff(firsts).astype(jnp.int32), entries.astype(jnp.int32))
