"""What the model's weights are at the moment, and the adapters beside them."""

from collections.abc import Mapping
from typing import Any

import jax

from minimax_jax.lora import Adapter
from serving.device.adapters import Adapters
from serving.device.steps import Weights


class ServedWeights:
    """Every step takes them as arguments, so others of the same shapes need no new programs."""

    def __init__(self, model: Any, drafter: Any, adapters: Adapters):
        """`drafter` is None if nothing speculates."""
        self._leaves, self.tree = jax.tree.flatten((model, drafter))
        self._drafter, self.adapters = drafter, adapters

    def of(self, adapter: str | None) -> Weights:
        """What a step of rows with this adapter takes."""
        return Weights(leaves=self._leaves, adapter=self.adapters[adapter])

    def update(self, params: Any, adapters: Mapping[str, Adapter]) -> None:
        """Another model if `params` are not None, and these adapters; others stay, and the drafter.
        Raises ValueError before anything is changed.
        """
        leaves = self._leaves if params is None else self._checked(params)
        self.adapters.update(adapters)
        self._leaves = leaves

    def _checked(self, params: Any) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten((params, self._drafter))
        if tree != self.tree:
            raise ValueError("the weights are not those of the model that is served")
        for old, new in zip(self._leaves, leaves, strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"a weight of {new.dtype}{list(new.shape)} cannot take the place of "
                    f"{old.dtype}{list(old.shape)}"
                )
        return leaves
