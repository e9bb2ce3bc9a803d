"""The experts that a step chose for its tokens, beside where it wrote their keys: whoever keeps a
record of them by block id needs to know nothing else of the step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from minimax_jax.batch import Batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routes:
    """N tokens, in the order of their batch's rows: the X experts in each of the L layers that have
    some, and the block and the place in it of each token's keys; block -1: a row of padding.

    Arrays of JAX in a step, of numpy once they are on the host.
    """

    experts: UInt8[Array | np.ndarray, "N L X"]
    blocks: Int[Array | np.ndarray, "N"]
    places: Int[Array | np.ndarray, "N"]

    @classmethod
    def of(cls, choices: Int[Array, "L B T X"], batch: Batch, block_size: int) -> "Routes":
        """Those of a batch whose layers made these choices."""
        slots, (L, B, T, X) = batch.slots(block_size), choices.shape
        rows = jnp.moveaxis(choices.reshape(L, B * T, X), 0, 1).astype(jnp.uint8)
        return cls(experts=rows, blocks=slots.block_ids, places=slots.places)
