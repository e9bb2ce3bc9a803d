"""A prefill chunk as two micro-batches whose layers alternate: while the ranks exchange what one of
them made, the other computes.

    first   attention | sums travel | experts   | sums travel | attention ...
    second            | attention   | travel    | experts     | travel    ...

Nothing is scheduled here. The layers of the two are traced in turn, and depend on one another by
the pool alone, so a latency-hiding scheduler is free to run a collective of one beside the work of
the other. The price is that each weight is read twice a step.

Rows of a data rank are cut in two, in order, since a row may continue one before it (a prompt's
tiles); a lone row is cut by its columns. Either way the second half sees what the first one wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from minimax_jax.batch import Batch
from minimax_jax.context_blocks import MOST_TOKENS
from minimax_jax.shards import token_axis
from sharding.apply import num_shards
from sharding.rules import Rules


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How [B, T, ...] falls apart: behind `at` rows of each of `data_ranks`, or behind `at` columns
    where `by_row` is off; not at all where `at` is 0.
    """

    at: int = 0
    by_row: bool = True
    data_ranks: int = 1

    @property
    def count(self) -> int:
        """1 or 2."""
        return 2 if self.at else 1

    def parts(self, x: Array) -> list[Array]:
        """What each micro-batch has of x, [B, T, ...]."""
        if not self.at:
            return [x]
        if not self.by_row:
            return jnp.split(x, [self.at], axis=1)
        of_ranks = x.reshape(self.data_ranks, len(x) // self.data_ranks, *x.shape[1:])
        return [
            half.reshape(self.data_ranks * half.shape[1], *x.shape[1:])
            for half in jnp.split(of_ranks, [self.at], axis=1)
        ]

    def joined(self, parts: Sequence[Array]) -> Array:
        """The [B, T, ...] that `parts` took apart."""
        if not self.at:
            return parts[0]
        if not self.by_row:
            return jnp.concatenate(parts, axis=1)
        n, rest = self.data_ranks, parts[0].shape[1:]
        of_ranks = [part.reshape(n, len(part) // n, *rest) for part in parts]
        return jnp.concatenate(of_ranks, axis=1).reshape(sum(map(len, parts)), *rest)

    def batches(self, batch: Batch) -> list[Batch]:
        """The micro-batches of a batch, with the tables of their own rows."""
        tables = self.parts(batch.block_table) if self.by_row else [batch.block_table] * self.count
        made = zip(self.parts(batch.tokens), self.parts(batch.positions), tables, strict=True)
        return [Batch(tokens=t, positions=p, block_table=table) for t, p, table in made]


def micro_batches(batch: Batch, block_size: int, rules: Rules) -> MicroBatches:
    """The rule: two where `rules.overlap` asks for them, a data rank has at least two blocks of
    tokens, and a row has more than a step that decodes or verifies (such steps are bound by the
    weights that they read). A lone row has to be even, in a way that leaves halves split over
    tokens where it was.
    """
    B, T = batch.tokens.shape
    data_ranks = num_shards("batch", B, rules)
    rows = B // data_ranks
    if not rules.overlap or T <= MOST_TOKENS or rows * T < 2 * block_size:
        return MicroBatches()
    if rows > 1:
        return MicroBatches(at=rows // 2, data_ranks=data_ranks)
    if T % 2 or token_axis(T // 2, rules) != token_axis(T, rules):
        return MicroBatches()
    return MicroBatches(at=T // 2, by_row=False)


def after_read(
    pool: UInt8[Array, "1 P lines 128"], out: Array, line: Int[Array, ""]
) -> UInt8[Array, "1 P lines 128"]:
    """The same pool as a value that exists when `out`, which was read from it, does: so the next
    write into it, which is the other micro-batch's, comes after this read, and in place. Left free
    to write first, the compiler keeps a copy of the whole pool for the read.

    One byte is written back, with a zero added that only arithmetic knows to be one: an
    `optimization_barrier` is gone by the time that buffers are assigned.
    """
    bits = jax.lax.bitcast_convert_type(out[0, 0, 0, 0].astype(jnp.float32), jnp.uint32)
    zero = ((bits >> 31) >> 1).astype(jnp.uint8)
    # Two places, of which the second does not exist: of one alone XLA makes an updated slice, fuses
    # it with what it waits for, and copies the pool for that.
    blocks = jnp.array([0, pool.shape[1]])
    return pool.at[0, blocks, line, 0].add(jnp.stack([zero, zero]), mode="drop")
