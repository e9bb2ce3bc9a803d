"""The rows of a verification: each running sequence's anchor and the drafts that are tested, as one
flat, ragged list of a fixed length.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from minimax_jax.batch import Batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class VerifyRows:
    """M rows. Row `first` of a sequence is its anchor, row `first + k` its draft k.

    `offsets` is that k, -1 where a row is padding; `sequences` says whose row it is.
    """

    sequences: Int[Array, "M"]
    offsets: Int[Array, "M"]
    first: Int[Array, "B"]

    def batch(
        self,
        chain: Int[Array, "B places"],
        anchors: Int[Array, "B"],
        block_table: Int[Array, "B P"],
    ) -> Batch:
        """What the target runs: `chain` is each sequence's anchor and drafts, `anchors` where the
        anchors are. All rows of one sequence are a tile if every sequence has room for all of its;
        else a row is a tile.
        """
        tokens = chain[self.sequences, jnp.maximum(self.offsets, 0)]
        positions = self.at(anchors, self.offsets >= 0)
        (B, places), M = chain.shape, len(self.offsets)
        whole = B * places == M
        shape = (B, places) if whole else (M, 1)
        table = block_table if whole else block_table[self.sequences]
        return Batch(
            tokens=tokens.reshape(shape), positions=positions.reshape(shape), block_table=table
        )

    def at(self, anchors: Int[Array, "B"], live: Bool[Array, "M"]) -> Int[Array, "M"]:
        """The position of each live row, -1 of all others."""
        return jnp.where(live, anchors[self.sequences] + self.offsets, -1)


def verify_rows(
    widths: Int[Array, "B"], running: Bool[Array, "B"], num_rows: int, num_drafts: int
) -> VerifyRows:
    """The rows that test the first `widths` of `num_drafts` drafts of each running sequence.

    With B (num_drafts + 1) rows each sequence has its own stretch, else they are packed.
    """
    B, index, places = len(widths), jnp.arange(num_rows), num_drafts + 1
    counts = jnp.where(running, widths + 1, 0)
    if num_rows == B * places:
        sequences, first = index // places, jnp.arange(B) * places
    else:
        ends = jnp.cumsum(counts)
        first = ends - counts
        sequences = jnp.minimum(jnp.searchsorted(ends, index, side="right"), B - 1)
    offsets = index - first[sequences]
    live = (offsets >= 0) & (offsets < counts[sequences])
    return VerifyRows(sequences=sequences, offsets=jnp.where(live, offsets, -1), first=first)


def fitting_widths(
    widths: Int[Array, "B"], running: Bool[Array, "B"], most: Int[Array, "B"], num_rows: int
) -> Int[Array, "B"]:
    """The widths as far as each sequence's `most` and all rows together allow, earlier sequences
    first; 0 where nothing runs. No draft has a say in it.

    Raises ValueError when there are not even rows for the anchors.
    """
    if num_rows < len(widths):
        raise ValueError(f"{num_rows} rows are fewer than one for each of {len(widths)} sequences")
    widths = jnp.where(running, jnp.clip(widths, 0, jnp.maximum(most, 0)), 0)
    spare = num_rows - jnp.sum(running)
    before = jnp.cumsum(widths) - widths
    return jnp.clip(spare - before, 0, widths)
