"""What devices tell one another inside `local`. Outside of it, and on one device, there is nothing
to tell, so that one function serves all meshes.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.axes import DATA, MODEL


def ranks(axis: str) -> int:
    """How many devices a mesh axis has, as seen here."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def rank(axis: str) -> Int[Array, ""] | int:
    """This device's place on a mesh axis."""
    return lax.axis_index(axis) if ranks(axis) > 1 else 0


def device_rank() -> Int[Array, ""] | int:
    """This device's place among all, those of one data rank together: experts are laid out so."""
    return rank(DATA) * ranks(MODEL) + rank(MODEL)


def total(x: Float[Array, "..."], axes: Sequence[str] = (DATA, MODEL)) -> Float[Array, "..."]:
    """The sum of x over the devices of mesh axes, on each of them."""
    axes = tuple(axis for axis in axes if ranks(axis) > 1)
    return lax.psum(x, axes) if axes else x


def gathered(x: Array, axis: str, group: int | None = None) -> Array:
    """The x of all devices of a mesh axis, or of each `group` neighbours among them, one after
    another along the first dimension.
    """
    if ranks(axis) == 1:
        return x
    return lax.all_gather(x, axis, tiled=True, axis_index_groups=_groups(axis, group))


def scattered_total(x: Float[Array, "..."], axis: str, dimension: int = 0) -> Float[Array, "..."]:
    """The sum of x over a mesh axis, of which each device keeps its share of a dimension."""
    if ranks(axis) == 1:
        return x
    return lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def exchanged(x: Array, axis: str, dimension: int = 0, group: int | None = None) -> Array:
    """Every device's part of x for this one, of all or of `group` neighbours, stacked in a new
    first dimension by rank: the parts for the ranks follow one another along `dimension`.
    """
    count = ranks(axis) if group is None else min(group, ranks(axis))
    if count == 1:
        return x[None]
    shape = list(x.shape)
    shape[dimension : dimension + 1] = [count, shape[dimension] // count]
    groups = _groups(axis, group)
    return lax.all_to_all(x.reshape(shape), axis, dimension, 0, axis_index_groups=groups)


def _groups(axis: str, group: int | None) -> list[list[int]] | None:
    """The ranks of an axis in groups of neighbours; None: they are one."""
    if group is None or group == ranks(axis):
        return None
    return [list(range(first, first + group)) for first in range(0, ranks(axis), group)]
