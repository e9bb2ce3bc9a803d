"""One verification from whole tables of probabilities, by the law's own two parts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minimax_jax import speculation
from minimax_jax.speculation import Chances, Uniforms, Verdict


def verify(
    p: Float[Array, "M V"],
    first: Int[Array, "B"],
    tokens: Int[Array, "B T"],
    q: Float[Array, "B T V"],
    widths: Int[Array, "B"],
    uniforms: Uniforms,
) -> Verdict:
    """Row `first + k` of p is a sequence's distribution after k drafts, `q[:, k]` what the next of
    its `tokens` was drawn from.
    """
    columns = jnp.arange(tokens.shape[1])
    of_target = p[first[:, None] + columns, tokens]
    of_draft = jnp.take_along_axis(q, tokens[..., None], axis=-1)[..., 0]
    chances = Chances(target=of_target, draft=of_draft)
    accepted = speculation.accepted_drafts(chances, widths, uniforms.accept)
    refused = jnp.minimum(accepted, len(columns) - 1)[:, None, None]
    token = speculation.token_after(
        p[first + accepted],
        jnp.take_along_axis(q, refused, axis=1)[:, 0],
        accepted < widths,
        jnp.take_along_axis(uniforms.token, accepted[:, None], axis=1)[:, 0],
    )
    return Verdict(accepted=accepted, token=token)


jitted_verify = jax.jit(verify)
