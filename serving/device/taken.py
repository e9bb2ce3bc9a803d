"""What one program gave, on its way to the host, and as lists once it is there."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from minimax_jax.routes import Routes
from minimax_jax.sampling import TokenLogprobs
from serving.device.drafts import Drafted
from serving.device.sampler import Sampled
from serving.device.speculative_step import Committed
from serving.scheduling.plan import RowLogprobs


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one program gave that is wanted, on its way to the host; None is not wanted."""

    tokens: Any  # [B], or [k, B] of a speculative step
    logprobs: TokenLogprobs | None
    prompts: TokenLogprobs | None = None
    drafted: Drafted | None = None
    routes: Routes | None = None

    @classmethod
    def of(
        cls,
        sampled: Sampled | Committed,
        *,
        logprobs: bool,
        prompts: TokenLogprobs | None = None,
        drafted: Drafted | None = None,
        routes: Routes | None = None,
    ) -> "Taken":
        """Begins to copy it to the host."""
        taken = cls(
            tokens=sampled.tokens,
            logprobs=sampled.logprobs if logprobs else None,
            prompts=prompts,
            drafted=drafted,
            routes=routes,
        )
        for leaf in taken.leaves():
            leaf.copy_to_host_async()
        return taken

    def leaves(self) -> list[jax.Array]:
        """All arrays."""
        return jax.tree.leaves(list(vars(self).values()))

    def fetched(self) -> "Taken":
        """The same in numpy arrays; waits for them."""
        return Taken(**jax.device_get(vars(self)))

    def places(self, top: int) -> "list[Place]":
        """What is on the host as lists, place by place, with the `top` likeliest at each."""
        if self.tokens.ndim == 1:
            return [Place.of(self.tokens, self.logprobs, top)]
        return [
            Place.of(row, jax.tree.map(lambda x, k=k: x[k], self.logprobs), top)
            for k, row in enumerate(self.tokens)
        ]


class Place(NamedTuple):
    """One token of each row, -1 and less where there is none, with its log-probability and the
    likeliest tokens there, where anyone wants them.
    """

    tokens: list[int]
    logprobs: RowLogprobs | None

    @classmethod
    def of(cls, tokens: np.ndarray, logprobs: TokenLogprobs | None, top: int) -> "Place":
        """All rows at once: element by element takes several times as long."""
        found = None if logprobs is None else as_lists(logprobs, top)
        return cls(tokens.tolist(), found)


def as_lists(found: TokenLogprobs, top: int) -> RowLogprobs:
    """Log-probabilities that are on the host, with the `top` likeliest at each place."""
    return RowLogprobs(
        values=np.asarray(found.chosen).tolist(),
        top_ids=np.asarray(found.top_tokens)[:, :top].tolist(),
        top_values=np.asarray(found.top)[:, :top].tolist(),
    )
