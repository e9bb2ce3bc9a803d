"""Where what is trained lies on a mesh: parameters, gradients and the optimiser's moments, each by
the logical axes of the weight that it belongs to.

Over `data` they are split along the stream's width, so that no device holds all moments; over
`model` as the weights are. A checkpoint holds whole arrays: another mesh cuts them as it likes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from configs.parallel import ParallelConfig
from minimax_jax.checkpoint import parameters_of
from minimax_jax.model import Model
from sharding.apply import constrain, named_sharding
from sharding.axes import Axes
from sharding.rules import TRAIN, Rules, with_parallel

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Places:
    """The axes of each trained array by name, and the table that says where these lie."""

    axes: tuple[tuple[str, Axes], ...] = ()
    rules: Rules = TRAIN

    @classmethod
    def of(cls, model: Model, parameters: Mapping[str, Any], parallel: ParallelConfig) -> "Places":
        """Those of what is trained of a model, arrays or their shapes."""
        weights = {path: one.axes for path, one in parameters_of(model).items()}
        axes = {name: _axes(name, x.shape, weights) for name, x in parameters.items()}
        return cls(axes=tuple(sorted(axes.items())), rules=with_parallel(TRAIN, parallel))

    def constrained(self, tree: T) -> T:
        """A tree of arrays by these names, parameters or moments, with its places told to the
        compiler.
        """

        def told(path: Any, x: jax.Array) -> jax.Array:
            return constrain(x, *self._of(path, x), rules=self.rules)

        return jax.tree_util.tree_map_with_path(told, tree)

    def placed(self, tree: T, mesh: Mesh | None) -> T:
        """The tree on the mesh; on the first device if there is none."""
        if mesh is None:
            return jax.device_put(tree, jax.devices()[0])

        def put(path: Any, x: jax.Array) -> jax.Array:
            axes = self._of(path, x)
            return jax.device_put(x, named_sharding(mesh, axes, self.rules, x.shape))

        return jax.tree_util.tree_map_with_path(put, tree)

    def _of(self, path: Any, x: jax.Array) -> Axes:
        """The axes of a leaf: those of the parameter that its path names; none of a counter."""
        known = dict(self.axes)
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return next((known[name] for name in names if name in known), (None,) * x.ndim)


def _axes(name: str, shape: tuple[int, ...], weights: Mapping[str, Axes]) -> Axes:
    """Of a weight its own, of an adapter's matrix [R, in] or [out, R] those of the side that it
    shares with its weight. Experts are split as such or by their width, not along the stream.
    """
    path, _, side = name.rpartition(".")
    if name in weights:
        axes = weights[name]
    else:
        *experts, out, into = weights[f"{path}.weight"]
        lead = [one if shape[0] > 1 else None for one in experts]  # 1: what experts share
        axes = (*lead, None, into) if side == "a" else (*lead, out, None)
    of_experts = len(axes) > 2
    return tuple(None if of_experts and one == "embed" else one for one in axes)
