"""Where the engine's own arrays lie on the model's mesh, and how a step sees those of a data rank.

The rows and the slots of all data ranks lie one after another along the first axis, split over
`data`, as the model's tiles are: [ranks x n, ...]. A row names a slot of its own rank, and that
slot's block table the blocks of its own rank, so nothing of one rank reaches another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sharding import SERVE, constrain, named_sharding
from sharding.axes import DATA


def num_data_ranks(mesh: Mesh | None) -> int:
    """How many data ranks a mesh has."""
    return 1 if mesh is None else mesh.shape[DATA]


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """The tree with a copy of each array on every device of the mesh."""
    return _placed(tree, mesh, None)


def by_rank(tree: Any, mesh: Mesh | None) -> Any:
    """The tree with each data rank's part of the first axes on its own devices."""
    return _placed(tree, mesh, "batch")


def kept_by_rank(tree: Any) -> Any:
    """The same of what a step gives, so that the next step finds it where it takes it from."""
    return jax.tree.map(lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)), tree)


def for_host(tree: Any) -> Any:
    """What a step gives the host: on every device, so that each process can read all of it."""
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), tree)


def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one data rank's arrays [n, ...], for those of all ranks [ranks x n, ...]; a
    scalar is the same for all of them. The mesh is the one that the step is traced on.
    """
    return partial(_run, function)


def _run(function: Callable[..., Any], *args: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    ranks = 1 if mesh.empty else mesh.shape[DATA]
    if ranks == 1:
        return function(*args)
    leaves, tree = jax.tree.flatten(args)
    trees = []

    # Leaves, since a dataclass with annotated shapes has no axis of ranks.
    def of_one(*own: jax.Array) -> list[jax.Array]:
        made, made_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, own)))
        trees.append(made_tree)
        return made

    axes = [0 if leaf.ndim else None for leaf in leaves]
    made = jax.vmap(of_one, in_axes=axes)(*[_cut(leaf, ranks) for leaf in leaves])
    return jax.tree.unflatten(trees[0], map(_joined, made))


def _cut(x: jax.Array, ranks: int) -> jax.Array:
    return x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:]) if x.ndim else x


def _joined(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _placed(tree: Any, mesh: Mesh | None, first: str | None) -> Any:
    if mesh is None:
        return jax.device_put(tree)
    return jax.tree.map(partial(_place, mesh, first), tree)


def _place(mesh: Mesh, first: str | None, x: Any) -> jax.Array:
    axes = (first, *[None] * (x.ndim - 1)) if x.ndim else ()
    sharding = named_sharding(mesh, axes, SERVE, x.shape)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # Each process has the whole and takes its shards, which needs no word of the others.
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
