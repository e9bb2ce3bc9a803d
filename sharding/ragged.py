"""Rows of uneven numbers from each rank to each: nothing is padded on the wire, nothing dropped.

`sizes[i, j]` rows go from rank i to rank j, and every rank knows all of `sizes`. A rank holds its
rows in the order of their destinations, and gets those for it in the order of their sources; the
way back is the same with `sizes` transposed.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from sharding.collectives import rank, ranks

RAGGED_SCOPE = "ragged_exchange"  # of what it sends, in a program


@jax.named_scope(RAGGED_SCOPE)
def ragged_exchange(x: Array, sizes: Int[Array, "n n"], axis: str, capacity: int) -> Array:
    """The rows for this rank, at the start of `capacity` rows; the rest is unspecified.

    `capacity` must hold what can come at most. Where the platform has no ragged all-to-all (a CPU)
    all rows are gathered and those for this rank are taken.
    """
    if jax.default_backend() == "gpu":
        return _sent(x, sizes, axis, capacity)
    return _taken(x, sizes, axis, capacity)


def _sent(x: Array, sizes: Int[Array, "n n"], axis: str, capacity: int) -> Array:
    me = rank(axis)
    output = jnp.zeros((capacity, *x.shape[1:]), x.dtype)
    return lax.ragged_all_to_all(
        x,
        output,
        _before(sizes, 1)[me],  # where the rows for each rank begin here
        sizes[me],
        _before(sizes, 0)[me],  # where this rank's rows begin at each other
        sizes[:, me],
        axis_name=axis,
    )


def _taken(x: Array, sizes: Int[Array, "n n"], axis: str, capacity: int) -> Array:
    me, places = rank(axis), jnp.arange(capacity)
    everywhere = lax.all_gather(x, axis)
    ends = jnp.cumsum(sizes[:, me])
    source = jnp.minimum(jnp.searchsorted(ends, places, side="right"), ranks(axis) - 1)
    row = places - (ends - sizes[:, me])[source] + _before(sizes, 1)[source, me]
    return everywhere[source, jnp.clip(row, 0, len(x) - 1)]


def _before(sizes: Int[Array, "n n"], axis: int) -> Int[Array, "n n"]:
    """The sum of what comes before each entry along an axis."""
    return jnp.cumsum(sizes, axis=axis) - sizes
