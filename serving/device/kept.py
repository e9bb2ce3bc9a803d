"""What stays on the devices between calls, and the one way to run a program on it.

Calls of kind "slots" change the slots, those of kind "masks" the grammars' masks, and those of kind
"rows" run rows of a plan through the model. With several processes each has its shards of all
this, and process 0 tells the others of every call before it makes its own (`device_api.Others`).
"""

from dataclasses import replace
from math import prod
from typing import Any

import jax
from jaxtyping import Array, UInt32

from serving.device.programs import Arguments, Call, Programs
from serving.device.steps import State
from serving.device.weights import ServedWeights
from serving.device_api import Others


class Kept:
    """The state that programs take and give back. Nothing here waits for the devices."""

    def __init__(
        self,
        programs: Programs,
        weights: ServedWeights,
        state: State,
        masks: UInt32[Array, "S places words"],
        others: Others | None,
    ):
        self._programs, self._weights = programs, weights
        self._state, self._masks, self._others = state, masks, others

    @property
    def num_bytes(self) -> int:
        """What each device keeps beside the weights and the pool."""
        leaves = jax.tree.leaves((self._state.slots, self._masks))
        return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    def arguments(self, call: Call) -> Arguments:
        """What the call's program is called with at the moment."""
        if call.kind == "slots":
            return Arguments(values=(self._state.slots, *call.host), donated=0)
        if call.kind == "masks":
            return Arguments(values=(self._masks, *call.host), donated=0)
        weights = self._weights.of(call.adapter)
        return Arguments(values=(weights, self._state, self._masks, *call.host), donated=1)

    def run(self, call: Call, times: int = 1) -> list[Any]:
        """Runs it so often, one after the other; what each run gives the host."""
        if self._others is not None:
            self._others.run(call.name, call.adapter, call.host, times)
        return [self._run(call) for _ in range(times)]

    def free(self) -> None:
        """Gives the memory back; nothing can be run any more."""
        for leaf in jax.tree.leaves((self._state, self._masks)):
            leaf.delete()

    def _run(self, call: Call) -> Any:
        made = self._programs.run(call, self.arguments(call))
        if call.kind == "slots":
            self._state = replace(self._state, slots=made)
        elif call.kind == "masks":
            self._masks = made
        else:
            self._state, given = made
            return given
        return None
