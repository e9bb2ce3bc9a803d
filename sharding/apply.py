"""From logical axes to shardings: of arrays at rest, of values inside a jitted step, of shards.

The mesh of `constrain` and `local` is the one that `jax.set_mesh` made current; within a step
they read it while tracing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding.axes import Axes
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


def splits(axis: str, size: int, rules: Rules = SERVE) -> bool:
    """Whether the current mesh splits this logical axis where an array has this size."""
    return num_shards(axis, size, rules) > 1


def num_shards(axis: str, size: int, rules: Rules = SERVE) -> int:
    """Into how many parts the current mesh splits this logical axis of this size; 1: it is whole,
    or does not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return 1
    shards = math.prod(mesh.shape[name] for name in as_tuple(mesh_axes((axis,), rules)[0]))
    return shards if size % shards == 0 else 1


def local(
    function: Callable,
    *,
    in_axes: Sequence[Any],
    out_axes: Axes | list[Axes],
    rules: Rules = SERVE,
) -> Callable:
    """`function` run by every device on its own shards: the one door to `shard_map`.

    `in_axes` holds the logical axes of each argument, `out_axes` those of the result, or a list
    of them for a tuple of results. The axes of a pytree hold for the first dimensions of all its
    leaves; or they are a pytree of axes like it. An axis of `REPLICATED_IF_UNEVEN` whose size the
    mesh does not divide in some argument is whole everywhere. Within `function` the collectives
    of `sharding.collectives` know the mesh. Where there is one device it is `function` itself.
    """

    return partial(_run, function, in_axes, out_axes, rules)


def _run(
    function: Callable, in_axes: Sequence[Any], out_axes: Any, rules: Rules, *args: Any
) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return function(*args)
    # Leaves, since a dataclass with annotated shapes cannot be made of partitions.
    leaves, tree = jax.tree.flatten(args)
    axes = [one for arg, some in zip(args, in_axes, strict=True) for one in _axes_of(arg, some)]
    fitting = replace(rules, **dict.fromkeys(_whole_axes(mesh, leaves, axes, rules)))
    results = out_axes if isinstance(out_axes, list) else [out_axes]
    out_specs = tuple(spec(one, fitting) for one in results)
    return jax.shard_map(
        lambda *shards: function(*jax.tree.unflatten(tree, shards)),
        mesh=mesh,
        in_specs=tuple(spec(one, fitting) for one in axes),
        out_specs=out_specs if isinstance(out_axes, list) else out_specs[0],
        check_vma=False,  # Pallas and Triton calls do not say over which axes their results vary
    )(*leaves)


def _axes_of(tree: Any, axes: Any) -> list[Axes]:
    """The axes of each array of an argument, in order."""

    def fit(one: Axes, leaf: jax.Array) -> Axes:
        return (*one[: leaf.ndim], *[None] * (leaf.ndim - len(one)))

    def fit_all(one: Axes, part: Any) -> list[Axes]:
        return [fit(one, leaf) for leaf in jax.tree.leaves(part)]

    fitted = jax.tree.map(fit_all, axes, tree, is_leaf=_is_axes)
    return jax.tree.leaves(fitted, is_leaf=_is_axes)


def _whole_axes(
    mesh: AbstractMesh, leaves: Sequence[Any], axes: Sequence[Axes], rules: Rules
) -> set[str]:
    """The axes that some array's shape keeps whole; ValueError as `named_sharding`."""
    whole = set()
    for leaf, names in zip(leaves, axes, strict=True):
        found = _fitting_spec(mesh, names, rules, leaf.shape)
        entries = zip(names, mesh_axes(names, rules), found, strict=True)
        whole |= {name for name, wanted, entry in entries if name and wanted != entry}
    return whole


def _is_axes(value: Any) -> bool:
    return isinstance(value, tuple) and all(one is None or isinstance(one, str) for one in value)


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
