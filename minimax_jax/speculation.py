"""The law of speculative decoding: which drafts are kept and what follows them, so that committed
tokens have exactly the target's distribution whatever the drafter does (spec/dspark 2.7).

Draft x of a row is kept with probability min(1, p(x) / q(x)), p being the target's processed
distribution after the drafts before it and q the one that x was drawn from. At the first draft that
is not kept the token is drawn from max(p - q, 0) instead; where all are kept one more comes from p.
It holds if q is exact, if the numbers that decide are independent of those that drafted, and if how
many drafts are tested does not depend on the ones that are not.

Greedy is no case of its own: a distribution at temperature 0 has all its mass on the argmax.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from minimax_jax.sampling import ACCEPT, TOKEN, SamplingState, draw, probabilities, uniform

_LEAST_MASS = 1e-8  # of a residual; less is rounding of p = q, and p is drawn from then


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chances:
    """Of each of T drafts x a sequence: p(x) of the target after the drafts before it, and q(x) of
    what it was drawn from.
    """

    target: Float[Array, "B T"]
    draft: Float[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Uniforms:
    """Random numbers in [0, 1) of the T + 1 positions after each anchor: one decides over the draft
    that is there, one draws the token if it is the last to be committed.
    """

    accept: Float[Array, "B places"]
    token: Float[Array, "B places"]

    @classmethod
    def of(cls, sampling: SamplingState, anchors: Int[Array, "B"], num_drafts: int) -> "Uniforms":
        """Those of sequences whose anchors are at these positions.

        The token's is that of plain decoding: without drafts both draw the same.
        """
        positions = anchors[:, None] + 1 + jnp.arange(num_drafts + 1)
        streams = [
            jax.vmap(lambda at, purpose=purpose: uniform(sampling, at, purpose), 1, 1)(positions)
            for purpose in (ACCEPT, TOKEN)
        ]
        return cls(accept=streams[0], token=streams[1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How many drafts of each sequence are kept, and the token that follows them."""

    accepted: Int[Array, "B"]
    token: Int[Array, "B"]


def distribution(logits: Float[Array, "B V"], sampling: SamplingState) -> Float[Array, "B V"]:
    """What `sampling.sample` draws from: at temperature 0 the argmax alone."""
    likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    greedy = sampling.temperature == 0
    return jnp.where(greedy[:, None], likeliest, probabilities(logits, sampling))


def accepted_drafts(
    chances: Chances, widths: Int[Array, "B"], accept: Float[Array, "B places"]
) -> Int[Array, "B"]:
    """How many of each sequence's first `widths` drafts are kept: each whose u < p(x) / q(x), from
    left to right up to the first that is not. A NaN, a broken drafter's, keeps nothing.
    """
    columns = jnp.arange(chances.draft.shape[1])
    tested = columns < widths[:, None]
    kept = tested & (accept[:, : len(columns)] * chances.draft < chances.target)
    return jnp.sum(jnp.cumprod(kept, axis=1), axis=1)


def token_after(
    p: Float[Array, "B V"],
    q: Float[Array, "B V"],
    rejected: Bool[Array, "B"],
    uniform_token: Float[Array, "B"],
) -> Int[Array, "B"]:
    """The token after the kept drafts, drawn: p is the target's distribution there, q that of the
    draft there, if one was `rejected`. Where q is NaN, p is drawn from.
    """
    return draw(after_drafts(p, q, rejected), uniform_token)


def after_drafts(
    p: Float[Array, "B V"], q: Float[Array, "B V"], rejected: Bool[Array, "B"]
) -> Float[Array, "B V"]:
    """The weights of that token: where a draft was rejected, the part of p that q does not cover;
    p where none was.
    """
    residual = jnp.maximum(p - q, 0.0)
    some = jnp.sum(residual, axis=-1) > _LEAST_MASS
    return jnp.where((rejected & some)[:, None], residual, p)
