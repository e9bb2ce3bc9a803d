"""The law applied to a step's rows: from the target's raw logits to a verdict, without whole tables
of probabilities.

A verdict needs two numbers of each row, p(x) and q(x) of its draft, and whole distributions of one
row a sequence only. So rows are processed some at a time, in order: beside the logits themselves
and the drafts' there are never more than `most_values` numbers of each kind at once, or [B, V] of
them, as in plain decoding. 256 sequences, 8 rows each and 200,064 ids are 1.6 GB a table otherwise,
and edits, penalties and cuts make several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minimax_jax.sampling import (
    History,
    SamplingState,
    TokenLogprobs,
    is_undecided,
    processed,
    token_logprobs,
)
from minimax_jax.shards import whole_rows
from minimax_jax.speculation import (
    Chances,
    Uniforms,
    Verdict,
    accepted_drafts,
    distribution,
    token_after,
)
from minimax_jax.speculative.drafting import Proposal
from minimax_jax.speculative.verify_rows import VerifyRows

MOST_VALUES = 1 << 26  # 256 MB of float32; 335 rows of 200,064 ids

Rows = Int[Array, "rows"] | slice
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What decides over the drafts of B sequences: the raw logits of M rows, and how each sequence
    is sampled and was drafted.
    """

    raw: Float[Array, "M V"]  # a grammar's mask applied
    rows: VerifyRows
    proposal: Proposal
    anchors: Int[Array, "B"]  # their positions
    history: History | None
    sampling: SamplingState
    drawn: SamplingState  # how the drafts were drawn
    most_values: int

    def verdict(self, widths: Int[Array, "B"]) -> tuple[Verdict, Bool[Array, "B"]]:
        """What is kept of each sequence's first `widths` drafts and what follows, and where a row
        that decided that had no best token.
        """
        B, T, _ = self.proposal.logits.shape
        p_M, undecided_M = self._by_rows(self._of_target, len(self.raw))
        q = self._by_rows(self._of_draft, B * T).reshape(B, T)
        p = p_M[self.rows.first[:, None] + jnp.arange(T)]
        uniforms = Uniforms.of(self.sampling, self.anchors, T)
        accepted = accepted_drafts(Chances(target=p, draft=q), widths, uniforms.accept)
        last = self.rows.first + accepted
        refused = jnp.arange(B) * T + jnp.minimum(accepted, T - 1)
        token = token_after(
            distribution(self._processed(last), self.sampling),
            distribution(self._of_drafts(refused), self.drawn),
            accepted < widths,
            jnp.take_along_axis(uniforms.token, accepted[:, None], axis=1)[:, 0],
        )
        verdict = Verdict(accepted=accepted, token=token)
        return verdict, self._spoiled(undecided_M, verdict)

    def logprobs(
        self, tokens: Int[Array, "M"], top: int, *, at_temperature: bool = False
    ) -> TokenLogprobs:
        """Log-probabilities of a token after each row, and of the likeliest ones: raw, or at the
        sampling temperature (greedy: at 1).
        """
        temperature = self.sampling.temperature
        heat_M = jnp.where(temperature == 0, 1.0, temperature)[self.rows.sequences, None]

        def of_rows(at: Rows) -> TokenLogprobs:
            raw = whole_rows(self.raw[at])
            raw = raw / heat_M[at] if at_temperature else raw
            return token_logprobs(raw, tokens[at], top)

        return self._by_rows(of_rows, len(tokens))

    def _of_target(self, at: Rows) -> tuple[Float[Array, "rows"], Bool[Array, "rows"]]:
        """p of the draft after each row, and whether the row has no best token."""
        sequences, T = self.rows.sequences[at], self.proposal.tokens.shape[1]
        after = jnp.clip(self.rows.offsets[at], 0, T - 1)
        drafts = self.proposal.tokens[sequences, after]
        logits = self._processed(at)
        p = distribution(logits, self.sampling.at(sequences))
        return _at(p, drafts), is_undecided(whole_rows(self.raw[at]), logits)

    def _of_draft(self, at: Rows) -> Float[Array, "rows"]:
        """q of each draft, the drafts of all sequences in one list."""
        B, T, _ = self.proposal.logits.shape
        drawn = self.drawn.at(jnp.repeat(jnp.arange(B), T)[at])
        q = distribution(self._of_drafts(at), drawn)
        return _at(q, self.proposal.tokens.reshape(B * T)[at])

    def _of_drafts(self, at: Rows) -> Float[Array, "rows V"]:
        """The logits that drafts were drawn from."""
        B, T, V = self.proposal.logits.shape
        return whole_rows(self.proposal.logits.reshape(B * T, V)[at])

    def _processed(self, at: Rows) -> Float[Array, "rows V"]:
        """The rows' logits, as those of the token after their drafts."""
        sequences, offsets, history = self.rows.sequences[at], self.rows.offsets[at], None
        if self.history is not None:
            drafts = self.proposal.tokens[sequences]
            before = jnp.arange(drafts.shape[1]) < offsets[:, None]
            history = self.history.at(sequences).then(jnp.where(before, drafts, -1))
        positions = self.anchors[sequences] + offsets + 1
        return processed(whole_rows(self.raw[at]), self.sampling.at(sequences), positions, history)

    def _spoiled(self, undecided_M: Bool[Array, "M"], verdict: Verdict) -> Bool[Array, "B"]:
        sequences, offsets = self.rows.sequences, self.rows.offsets
        decided = (offsets >= 0) & (offsets <= verdict.accepted[sequences])
        return jnp.zeros(len(verdict.token), bool).at[sequences].max(undecided_M & decided)

    def _by_rows(self, function: Callable[[Rows], Out], num_rows: int) -> Out:
        """`function` of all rows, some at a time where all are too many."""
        most = max(1, self.most_values // self.raw.shape[-1])
        if num_rows <= most:
            return function(slice(None))
        num = -(-num_rows // most)
        size = -(-num_rows // num)
        chunks = jnp.minimum(jnp.arange(num * size), num_rows - 1).reshape(num, size)
        found = lax.map(function, chunks)
        return jax.tree.map(lambda x: x.reshape(num * size, *x.shape[2:])[:num_rows], found)


def _at(table: Float[Array, "rows V"], tokens: Int[Array, "rows"]) -> Float[Array, "rows"]:
    return jnp.take_along_axis(table, tokens[:, None], axis=1)[:, 0]
