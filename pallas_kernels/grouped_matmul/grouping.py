"""Which rows a kernel multiplies with which expert: (token, choice) pairs sorted by expert, in
places of which every expert's first is a multiple of 8, and cut into groups of at most N places.

All of it is small integers on the device; nothing is read back. The order of an expert's rows is
that of the tokens.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

EIGHT = 8  # rows that the copy engine moves as one tile
_COMPARED = 1024  # pairs up to which all are compared with all; sorting costs more launches
_COMPUTE_BOUND = 80  # rows of a group from which on products take longer than reading
_LARGEST_GROUP = 152  # tokens whose sums fit in the registers beside the decoded weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Grouping:
    """Places 0 .. S - 1 of the pairs, and the groups; the arrays are int32."""

    place: Int[Array, "M"]  # of each pair; S if its expert is not here
    token: Int[Array, "S"]  # at each place, -1 where it is empty
    num_groups: Int[Array, "1"]
    expert: Int[Array, "groups"]  # of each group,
    first: Int[Array, "groups"]  # its first place, in units of 8,
    count: Int[Array, "groups"]  # and how many places it has
    widths: tuple[int, ...] = field(metadata={"static": True})  # see `group_widths`

    @property
    def operands(self) -> tuple[Array, ...]:
        """What a kernel reads."""
        return self.num_groups, self.expert, self.first, self.count


def group_widths(num_pairs: int, num_experts: int) -> tuple[int, ...]:
    """Rows that groups have room for, the most last, from shapes alone: the mean of an expert and
    two standard deviations, in as many parts as it takes. Where the tensor cores count, two lower
    widths spare them rows that nobody has.
    """
    mean = num_pairs / num_experts
    spread = math.sqrt(mean)
    parts = math.ceil((mean + 2 * spread) / _LARGEST_GROUP)
    wanted = [(mean + n * spread) / parts for n in (-0.5, 0.5, 2)]
    widths = [EIGHT * max(1, math.ceil(one / EIGHT)) for one in wanted]
    return tuple(sorted(set(widths))) if widths[-1] >= _COMPUTE_BOUND else (widths[-1],)


def make(
    experts: Int[Array, "T X"], num_experts: int, widths: tuple[int, ...] | None = None
) -> Grouping:
    """Groups of the pairs, by default of `group_widths`; ids outside of 0 .. E - 1 are nowhere."""
    widths = widths or group_widths(experts.size, num_experts)
    T, X = experts.shape
    M, E = T * X, num_experts
    places = _round_up(M + (EIGHT - 1) * min(E, M), EIGHT)
    is_here = (experts >= 0) & (experts < E)
    flat = jnp.where(is_here, experts, E).reshape(M).astype(jnp.int32)
    counts = jnp.sum(flat[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    first = _before(-(-counts // EIGHT))  # of each expert, in units of 8
    rank = _ranks_compared(flat) if M <= _COMPARED else _ranks_sorted(flat, counts)
    first_of_pair = jnp.take(first, jnp.minimum(flat, E - 1))
    place = jnp.where(flat < E, EIGHT * first_of_pair + rank, places)
    token = jnp.full(places, -1, jnp.int32)
    token = token.at[place].set(jnp.arange(M, dtype=jnp.int32) // X, mode="drop")
    groups = _groups(counts, first, widths[-1], M // widths[-1] + min(E, M))
    num_groups, expert, start, count = groups
    return Grouping(place, token, num_groups, expert, start, count, widths)


def _groups(counts, first, rows: int, most: int) -> tuple[Array, ...]:
    """How many groups there are, and each one's expert, first place and count: an expert's are
    alike, but for the last.
    """
    parts = -(-counts // rows)
    start = _before(parts)
    group = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum((start + parts)[None] <= group[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(counts) - 1)  # of groups past the last
    eights = -(-counts // (EIGHT * jnp.maximum(parts, 1)))[expert]
    skipped = (group - start[expert]) * eights
    count = jnp.clip(counts[expert] - skipped * EIGHT, 0, eights * EIGHT)
    return jnp.sum(parts, keepdims=True), expert, first[expert] + skipped, count


def _before(sizes: Int[Array, "E"]) -> Int[Array, "E"]:
    """The sum of all sizes before each: one small fused sum, where a scan is many kernels."""
    at = jnp.arange(len(sizes))
    earlier = jnp.where(at[None] < at[:, None], sizes[None], 0)
    return jnp.sum(earlier, axis=1, dtype=jnp.int32)


def _ranks_compared(flat: Int[Array, "M"]) -> Int[Array, "M"]:
    """How many earlier pairs have the same expert."""
    at = jnp.arange(len(flat))
    earlier = (flat[None] == flat[:, None]) & (at[None] < at[:, None])
    return jnp.sum(earlier, axis=1, dtype=jnp.int32)


def _ranks_sorted(flat: Int[Array, "M"], counts: Int[Array, "E"]) -> Int[Array, "M"]:
    order = jnp.argsort(flat, stable=True)
    starts = jnp.append(_before(counts), jnp.sum(counts))
    ranks = jnp.arange(len(flat), dtype=jnp.int32) - starts[flat[order]]
    return jnp.zeros(len(flat), jnp.int32).at[order].set(ranks, unique_indices=True)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
