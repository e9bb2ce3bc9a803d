"""Where the engine's own arrays lie: one copy on each device of the model's mesh."""

from typing import Any

import jax
from jax.sharding import Mesh

from sharding import SERVE, named_sharding
from sharding.axes import DATA


def check_data_ranks(mesh: Mesh | None) -> None:
    """Raises ValueError for several data ranks.

    They would need a pool and slots with a leading axis of ranks, sharded over `data`; the steps
    within `sharding.local` over that axis; a plan's parts stacked into arrays [ranks, rows], and
    results split again. The plan and the shapes are those of several ranks already.
    """
    ranks = 1 if mesh is None else mesh.shape[DATA]
    if ranks != 1:
        raise ValueError(f"the engine runs one data rank, but the mesh has {DATA}={ranks}")


def placed(tree: Any, mesh: Mesh | None) -> Any:
    """The tree with a copy of each array on every device of the mesh."""
    if mesh is None:
        return jax.device_put(tree)

    def place(x: Any) -> jax.Array:
        return jax.device_put(x, named_sharding(mesh, (None,) * x.ndim, SERVE, x.shape))

    return jax.tree.map(place, tree)
