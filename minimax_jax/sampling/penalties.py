"""Penalties for tokens that are there already, as vLLM has them: repetition over prompt and output,
frequency and presence over the output alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from minimax_jax.sampling.params import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Those of B sequences; 1, 0 and 0 change nothing."""

    repetition: Float[Array, "B"]
    frequency: Float[Array, "B"]
    presence: Float[Array, "B"]

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Penalties":
        """One row a sequence."""

        def column(name: str) -> Array:
            return jnp.asarray(np.array([getattr(p, f"{name}_penalty") for p in params], "f4"))

        names = ("repetition", "frequency", "presence")
        return cls(**{name: column(name) for name in names})

    def apply(
        self,
        logits: Float[Array, "B V"],
        prompt: Bool[Array, "B V"],
        counts: Int[Array, "B V"],
    ) -> Float[Array, "B V"]:
        """First the logits of tokens of prompt or output are divided by `repetition` (multiplied
        where negative); then each token of the output costs `frequency`, and having any `presence`.
        """
        repetition = jnp.where(prompt | (counts > 0), self.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = logits - self.frequency[:, None] * counts
        return logits - self.presence[:, None] * (counts > 0)
