"""The settings of a batch as arrays. What no sequence asks for is None, and so no part of the
compiled step: there are four programs at most, with and without edits and penalties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from minimax_jax.sampling.edits import Edits, width
from minimax_jax.sampling.params import SamplingParams
from minimax_jax.sampling.penalties import Penalties

LEAST_STOPS = 4  # places for stop ids; from there on powers of two


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingState:
    """The settings of B sequences."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]
    seed: UInt32[Array, "B 2"]  # high and low 32 bits
    stop_ids: Int[Array, "B stops"]  # unused places are -1
    edits: Edits | None = None
    penalties: Penalties | None = None

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int] | None = None,
        vocab_size: int | None = None,
    ) -> "SamplingState":
        """One row a sequence. Edits need to know where outputs begin and how many logits there are.

        Raises ValueError when that is left out.
        """

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

        edits = None
        if any(p.has_edits for p in params):
            if prompt_lengths is None or vocab_size is None:
                raise ValueError(
                    "logit bias, allowed ids, bad words and min_tokens need to know "
                    "the lengths of the prompts and the size of the vocabulary"
                )
            edits = Edits.of(params, prompt_lengths, vocab_size)
        seeds = np.array([[p.seed >> 32, p.seed & 0xFFFFFFFF] for p in params], np.uint32)
        return cls(
            temperature=column("temperature", np.float32),
            top_p=column("top_p", np.float32),
            top_k=jnp.maximum(column("top_k", np.int32), 0),
            min_p=column("min_p", np.float32),
            seed=jnp.asarray(seeds),
            stop_ids=jnp.asarray(_stop_table(params)),
            edits=edits,
            penalties=Penalties.of(params) if any(p.has_penalties for p in params) else None,
        )

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far have a say."""
        return self.edits is not None or self.penalties is not None

    def at(self, sequences: Int[Array, "M"]) -> "SamplingState":
        """The settings of each row's sequence."""
        return jax.tree.map(lambda x: x[sequences], self)


def is_stop(tokens: Int[Array, "B *n"], stop_ids: Int[Array, "B stops"]) -> Bool[Array, "B *n"]:
    """Which tokens end their sequence."""
    rows = stop_ids.reshape(len(stop_ids), *[1] * (tokens.ndim - 1), -1)
    return jnp.any((tokens[..., None] == rows) & (rows >= 0), axis=-1)


def _stop_table(params: Sequence[SamplingParams]) -> np.ndarray:
    most = max((len(p.stop_token_ids) for p in params), default=0)
    table = np.full((len(params), width(most, LEAST_STOPS)), -1, np.int32)
    for row, one in enumerate(params):
        table[row, : len(one.stop_token_ids)] = list(one.stop_token_ids)
    return table
