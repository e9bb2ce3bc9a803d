"""The experts of every token in the pages, on the host: a mirror of the pool by block id.

A step's choices are written where the step wrote the keys, in the order in which steps ran. So a
record is right whenever the keys are: a prefix that is found brings its own, what is computed again
after a preemption is written again, and that of a draft which was not kept is overwritten by the
token in its place. An evicted block's record goes with it; the mirror never grows.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from configs.model import ModelConfig
from configs.parts import check
from minimax_jax.cache import NO_ROUTE
from minimax_jax.routes import Routes


class RoutingRecords:
    """X experts of L layers for each token of each data rank's blocks, a byte each."""

    def __init__(self, config: ModelConfig, num_ranks: int, num_blocks: int, page_ranks: int = 1):
        """A block of whoever owns the pages is `page_ranks` blocks of the model, one after another.
        Raises ValueError for a model whose experts have no record.
        """
        moe, layers = config.moe, sum(config.moe_layers)
        flag = "enable_return_routed_experts"
        check(layers > 0, f"{flag}: this model has no layer with experts")
        check(moe.num_experts <= NO_ROUTE, f"{flag}: {moe.num_experts} experts do not fit a byte")
        size = config.indexer.block_size
        shape = (num_ranks, num_blocks, page_ranks, size, layers, moe.experts_per_token)
        self._experts = np.full(shape, NO_ROUTE, np.uint8)

    @property
    def num_bytes(self) -> int:
        """Of the host's memory."""
        return self._experts.nbytes

    def write(self, routes: Routes) -> None:
        """Takes down what a program chose; its rows are those of all ranks, rank after rank."""
        rows = np.flatnonzero(np.asarray(routes.blocks) >= 0)
        rank = rows * len(self._experts) // len(routes.blocks)
        owned, part = np.divmod(routes.blocks[rows], self._experts.shape[2])
        self._experts[rank, owned, part, routes.places[rows]] = routes.experts[rows]

    def of(self, rank: int, block_ids: Sequence[int], count: int) -> UInt8[np.ndarray, "n L X"]:
        """Those of the first `count` tokens in some blocks of a rank, in memory of their own."""
        parts, size, *per_token = self._experts.shape[2:]
        size *= parts
        blocks = np.asarray(block_ids[: -(-count // size)], int)
        found = self._experts[rank, blocks].reshape(len(blocks) * size, *per_token)[:count]
        assert (found[:, 0, 0] != NO_ROUTE).all(), "a token has run and left no record"
        return found
