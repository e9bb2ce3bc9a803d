"""Which places of a pack blocks of drafts start at, and what such a block is asked for
(spec/dspark 5.2).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rl.packing import Pack

NO_ANCHOR = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DraftBlocks:
    """A blocks of T rows. Row k stands at position `positions + k`, follows `previous[:, k]`, is
    asked for `labels[:, k]`, and the target's own answer is that of place `teachers[:, k]`.
    """

    positions: Int[Array, "A"]  # -1: no block
    block_table: Int[Array, "A P"]
    previous: Int[Array, "A T"]  # its first column is the anchor
    labels: Int[Array, "A T"]
    teachers: Int[Array, "A T"]  # places of the flattened pack
    valid: Bool[Array, "A T"]

    @classmethod
    def of(cls, pack: Pack, anchors: Int[Array, "A"], num_rows: int) -> "DraftBlocks":
        """The blocks at these places of a flattened pack. A row is valid if its label and all
        labels before it are of the answer.
        """
        real = anchors != NO_ANCHOR
        places = jnp.where(real, anchors, 0)
        rows = places[:, None] + jnp.arange(num_rows)
        counted = jnp.append(pack.weights.reshape(-1) > 0, jnp.zeros(num_rows, bool))[rows]
        rows = jnp.minimum(rows, pack.tokens.size - 1)
        return cls(
            positions=jnp.where(real, pack.positions.reshape(-1)[places], -1),
            block_table=pack.block_table[places // pack.tokens.shape[1]],
            previous=pack.tokens.reshape(-1)[rows],
            labels=pack.targets.reshape(-1)[rows],
            teachers=rows,
            valid=jnp.cumprod(counted & real[:, None], axis=1).astype(bool),
        )


def choose_anchors(
    pack: Pack, rng: np.random.Generator, *, per_sequence: int, total: int
) -> Int[np.ndarray, "total"]:
    """Places of a flattened pack, in order: of each sequence at most `per_sequence` candidates,
    drawn without replacement, and of those at most `total`; the rest of the array is NO_ANCHOR.

    A candidate is a token of an answer that another one follows.
    """
    ends = np.asarray(pack.weights).reshape(-1) > 0  # the next token counts
    positions = np.asarray(pack.positions).reshape(-1)
    candidates = np.flatnonzero(ends & np.append(False, ends[:-1]) & (positions > 0))
    # in random order, the first of each sequence
    shuffled = rng.permutation(candidates)
    sequences = np.asarray(pack.block_table)[shuffled // pack.tokens.shape[1], 0]
    chosen = shuffled[_rank_within(sequences) < per_sequence][:total]
    anchors = np.full(total, NO_ANCHOR, np.int32)
    anchors[: len(chosen)] = np.sort(chosen)
    return anchors


def _rank_within(groups: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """How many entries before each are of the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(np.append(starts, len(ordered)))
    ranks = np.empty(len(groups), int)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, counts)
    return ranks
