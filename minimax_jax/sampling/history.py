"""What penalties and bad words have to know of the tokens so far, on the device: carried from step
to step, and lengthened by drafts for the rows of a verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from minimax_jax.sampling.state import SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class History:
    """The tokens of B sequences: which ids the prompt has and how often each id was generated (None
    without penalties), and the last generated ones, newest last, -1 where there are fewer (None
    without bad words).
    """

    prompt: Bool[Array, "B V"] | None
    counts: Int[Array, "B V"] | None
    recent: Int[Array, "B n"] | None

    @classmethod
    def of(
        cls,
        sampling: SamplingState,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> "History":
        """That of sequences with these prompts, which have generated `outputs` already."""
        counts = prompt = recent = None
        if sampling.penalties is not None:
            tallies = [np.bincount(np.asarray(p, int), minlength=vocab_size) for p in prompts]
            prompt = jnp.asarray(np.stack(tallies) > 0)
            tallies = [np.bincount(np.asarray(o, int), minlength=vocab_size) for o in outputs]
            counts = jnp.asarray(np.stack(tallies), jnp.int32)
        if sampling.edits is not None:
            length = sampling.edits.words.shape[-1] - 1
            last = np.full((len(outputs), length), -1, np.int32)
            for row, output in enumerate(outputs):
                some = list(output)[-length:]
                last[row, length - len(some) :] = some
            recent = jnp.asarray(last)
        return cls(prompt=prompt, counts=counts, recent=recent)

    def at(self, sequences: Int[Array, "M"]) -> "History":
        """That of each row's sequence."""
        return jax.tree.map(lambda x: x[sequences], self)

    def then(self, tokens: Int[Array, "B n"]) -> "History":
        """After n more tokens of each sequence; from the first -1 on there are none."""
        counts, recent = self.counts, self.recent
        rows = jnp.arange(len(tokens))[:, None]
        if counts is not None:
            beyond = counts.shape[1]
            counts = counts.at[rows, jnp.where(tokens < 0, beyond, tokens)].add(1, mode="drop")
        if recent is not None:
            added = jnp.sum(tokens >= 0, axis=1, keepdims=True)
            all_tokens = jnp.concatenate([recent, tokens.astype(recent.dtype)], axis=1)
            recent = all_tokens[rows, added + jnp.arange(recent.shape[1])]
        return replace(self, counts=counts, recent=recent)
