"""What the drafter does in a step: inject the context of committed tokens, propose the next ones
(spec/dspark 1.3, 2.3). Pure functions, everything an argument; `speculate` jits them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.drafter import Drafter
from minimax_jax.model import Model
from minimax_jax.sampling import DRAFT, SamplingState, sample
from minimax_jax.shards import whole_rows

DraftMethod = Literal["probabilistic", "greedy"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Proposal:
    """T drafts a sequence. Draft k + 1 was drawn from `logits[:, k]` at its draft temperature, and
    from these very numbers, Markov bias and rounding included: verification divides by them.
    """

    tokens: Int[Array, "B T"]
    logits: Float[Array, "B T V"]  # in the model's dtype, temperature not applied
    confidence: Float[Array, "B T"] | None  # logit: is it kept if all before it are? None: no head


def inject(
    drafter: Drafter, cache: Cache, taps: Sequence[Float[Array, "B T D"]], batch: Batch
) -> Cache:
    """The cache with the draft context of the batch's tokens, whose `drafter.config.target_layers`
    left these residual streams. Only tokens that are committed may have a position; -1 writes
    nothing.
    """
    return drafter.insert(cache, drafter.fused(taps), batch)


def propose(
    model: Model,
    drafter: Drafter,
    cache: Cache,
    block_table: Int[Array, "B P"],
    anchors: Int[Array, "B"],
    positions: Int[Array, "B"],
    sampling: SamplingState,
) -> Proposal:
    """Drafts of the tokens after each anchor, the newest token, which is at `positions`.

    The context of all tokens before the anchor has to be in the pages. A sequence at position -1 is
    padding: it sees nothing of any page, and its drafts mean nothing. `sampling` is that of
    `draft_sampling`.
    """
    x = model.embedded(drafter.block(anchors))
    hidden = drafter.hidden(x, cache, block_table, positions)
    tokens, logits, embedded = chain(model, drafter, hidden, anchors, positions, sampling)
    head = drafter.confidence
    return Proposal(
        tokens=tokens,
        logits=logits,
        confidence=None if head is None else head(hidden, embedded),
    )


def draft_sampling(sampling: SamplingState, method: DraftMethod) -> SamplingState:
    """How drafts are drawn for sequences that are sampled so: at the same temperature, without any
    cut, edit or penalty, or all greedily. Where the target's law has one token only, so has the
    draft's.
    """
    zeros = jnp.zeros_like(sampling.temperature)
    certain = sampling.top_k == 1
    drawn = jnp.where(certain, 0.0, sampling.temperature)
    return replace(
        sampling,
        temperature=drawn if method == "probabilistic" else zeros,
        top_p=zeros + 1,
        top_k=jnp.zeros_like(sampling.top_k),
        min_p=zeros,
        edits=None,
        penalties=None,
    )


def chain(model, drafter: Drafter, hidden_BTD, anchors, positions, sampling):
    """Drafts left to right, each from the head's logits and the Markov bias of the one before."""
    base_BTV = model.headed(hidden_BTD)
    tokens, logits, embedded, previous = [], [], [], anchors
    for k in range(hidden_BTD.shape[1]):
        embedded.append(drafter.markov.embedded(previous))
        corrected = base_BTV[:, k] + drafter.markov(embedded[-1])
        logits.append(_rounded(corrected, model.dtype))
        drawn = sample(whole_rows(logits[-1]), sampling, positions, DRAFT + k)
        previous = drawn.astype(anchors.dtype)
        tokens.append(previous)
    return tuple(jnp.stack(rows, axis=1) for rows in (tokens, logits, embedded))


def _rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """x in a dtype, by a rounding that no compiler takes back: XLA on a GPU drops a float32 ->
    bfloat16 -> float32 pair, and then the draft would be drawn from other numbers than are kept.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(dtype)
