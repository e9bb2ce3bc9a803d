"""Ids that may not come, or not yet, and biases: allowed ids, bad words, stops before `min_tokens`,
logit bias. One group, so that a batch with any of them is one program.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from minimax_jax.sampling.masks import masked, packed_mask
from minimax_jax.sampling.params import SamplingParams

# Widths are powers of two from these on, so that there are few programs.
LEAST_BIASES, LEAST_WORDS, LEAST_WORD_LENGTH = 16, 16, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Edits:
    """Those of B sequences. Unused places have id -1; a bad word ends in its last column."""

    allowed: UInt32[Array, "B packed"]
    words: Int[Array, "B words length"]
    stops_from: Int[Array, "B"]  # the first position where the sequence may end
    bias_ids: Int[Array, "B biases"]
    biases: Float[Array, "B biases"]

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], prompt_lengths: Sequence[int], vocab_size: int
    ) -> "Edits":
        """One row a sequence."""
        B, V = len(params), vocab_size
        allowed = np.ones((B, V), bool)
        num_biases = max(len(p.logit_bias) for p in params)
        bias_ids = np.full((B, width(num_biases, LEAST_BIASES)), -1, np.int32)
        biases = np.zeros(bias_ids.shape, np.float32)
        for row, one in enumerate(params):
            if one.allowed_token_ids is not None:
                allowed[row] = np.isin(np.arange(V), one.allowed_token_ids)
            bias_ids[row, : len(one.logit_bias)] = list(one.logit_bias)
            biases[row, : len(one.logit_bias)] = list(one.logit_bias.values())
        earliest = [n + p.min_tokens for n, p in zip(prompt_lengths, params, strict=True)]
        return cls(
            allowed=jnp.asarray(packed_mask(allowed)),
            words=jnp.asarray(_word_table(params)),
            stops_from=jnp.asarray(earliest, jnp.int32),
            bias_ids=jnp.asarray(bias_ids),
            biases=jnp.asarray(biases),
        )

    def apply(
        self,
        logits: Float[Array, "B V"],
        positions: Int[Array, "B"],
        stop_ids: Int[Array, "B stops"],
        recent: Int[Array, "B n"],
    ) -> Float[Array, "B V"]:
        """The logits of the tokens at `positions`, after `recent` ones."""
        logits = forbid(masked(logits, self.allowed), self._completing(recent))
        too_early = positions < self.stops_from
        logits = forbid(logits, jnp.where(too_early[:, None], stop_ids, -1))
        rows, beyond = jnp.arange(len(logits))[:, None], logits.shape[1]
        places = jnp.where(self.bias_ids < 0, beyond, self.bias_ids)
        return logits.at[rows, places].add(self.biases, mode="drop")

    def _completing(self, recent: Int[Array, "B n"]) -> Int[Array, "B words"]:
        """The ids that would complete a bad word now; -1 where the word has not begun."""
        begun = self.words[..., :-1]
        matches = jnp.all((begun < 0) | (begun == recent[:, None, :]), axis=-1)
        return jnp.where(matches, self.words[..., -1], -1)


def forbid(logits: Float[Array, "B V"], ids: Int[Array, "B n"]) -> Float[Array, "B V"]:
    """-inf at the ids; -1 is none."""
    rows, beyond = jnp.arange(len(logits))[:, None], logits.shape[1]
    return logits.at[rows, jnp.where(ids < 0, beyond, ids)].set(-jnp.inf, mode="drop")


def width(size: int, least: int) -> int:
    """The smallest power of two, from `least` on, that holds `size`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def _word_table(params: Sequence[SamplingParams]) -> np.ndarray:
    words = [list(one.bad_words) for one in params]
    longest = max((len(word) for some in words for word in some), default=0)
    shape = width(max(map(len, words)), LEAST_WORDS), width(longest, LEAST_WORD_LENGTH)
    table = np.full((len(params), *shape), -1, np.int32)
    for row, some in enumerate(words):
        for column, word in enumerate(some):
            table[row, column, shape[1] - len(word) :] = list(word)
    return table
