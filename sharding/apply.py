"""From logical axes to shardings: of arrays at rest, of values inside a jitted step, of shards.

The mesh of `constrain` and `local` is the one that `jax.set_mesh` made current; within a step
they read it while tracing.
"""

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from configs.parallel import ParallelConfig
from sharding.axes import Axes
from sharding.mesh import make_mesh
from sharding.rules import REPLICATED_IF_UNEVEN, SERVE, Rules, as_tuple, mesh_axes


def spec(axes: Axes, rules: Rules = SERVE) -> PartitionSpec:
    """The partition of an array with these logical axes; `ValueError` as `rules.mesh_axes`."""
    return PartitionSpec(*mesh_axes(axes, rules))


def named_sharding(
    mesh: Mesh | AbstractMesh, axes: Axes, rules: Rules, shape: Sequence[int]
) -> NamedSharding:
    """The sharding of an array of this shape on a mesh, which may be one without devices.

    A dimension that the mesh does not divide is replicated if its axis is one of
    `REPLICATED_IF_UNEVEN`; otherwise ValueError names it.
    """
    return NamedSharding(mesh, _fitting_spec(mesh, axes, rules, shape))


def constrain(x: jax.Array, *axes: str | None, rules: Rules = SERVE) -> jax.Array:
    """`x` with its sharding stated to the compiler, one logical axis or None a dimension.

    Returns `x` as it is when no mesh is current, when the mesh has one device, and within
    `local`, where `x` is one shard. Raises ValueError as `named_sharding` does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting_spec(mesh, axes, rules, x.shape))


def local(
    function: Callable,
    *,
    in_axes: Sequence[Axes],
    out_axes: Axes | list[Axes],
    rules: Rules = SERVE,
) -> Callable:
    """`function` run by every device on its own shards: the one door to `shard_map`.

    `in_axes` holds the logical axes of each argument, `out_axes` those of the result, or a list
    of them for a tuple of results; the axes of a pytree hold for all its leaves. Within
    `function` the mesh axes `data` and `model` name collectives. With no current mesh it runs on
    a mesh of one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    several = isinstance(out_axes, list)
    return jax.shard_map(
        function,
        mesh=make_mesh(ParallelConfig()) if mesh.empty else mesh,
        in_specs=tuple(spec(axes, rules) for axes in in_axes),
        out_specs=tuple(spec(a, rules) for a in out_axes) if several else spec(out_axes, rules),
        check_vma=False,  # Pallas and Triton calls do not say over which axes their results vary
    )


def _fitting_spec(
    mesh: Mesh | AbstractMesh, axes: Axes, rules: Rules, shape: Sequence[int]
) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(
            f"axes {axes} name {len(axes)} dimensions, but the shape is {tuple(shape)}"
        )
    entries = []
    for axis, size, mesh_axis in zip(axes, shape, mesh_axes(axes, rules), strict=True):
        num_shards = math.prod(mesh.shape[name] for name in as_tuple(mesh_axis))
        if size % num_shards == 0:
            entries.append(mesh_axis)
        elif axis in REPLICATED_IF_UNEVEN:
            entries.append(None)
        else:
            raise ValueError(
                f"axis {axis!r} of size {size} is not a multiple of its {num_shards} shards "
                f"over {mesh_axis!r}"
            )
    return PartitionSpec(*entries)
