"""Log-probabilities that are reported: of the raw distribution, as vLLM's default, that is of the
logits after a grammar's mask and before edits, penalties, temperature and cuts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import logsumexp
from jaxtyping import Array, Float, Int

CHUNK = 256  # rows whose logits are there at one time: 205 MB at 200,064 ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of each row's token, and of the n likeliest ids of the row, best first."""

    chosen: Float[Array | np.ndarray, "*rows"]
    top_tokens: Int[Array | np.ndarray, "*rows n"]
    top: Float[Array | np.ndarray, "*rows n"]


def token_logprobs(
    logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], top: int
) -> TokenLogprobs:
    """Log-probabilities of one token a row (a token below 0 counts as 0), float32."""
    logits = logits.astype(jnp.float32)
    total = logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    best, ids = lax.top_k(logits, top)
    return TokenLogprobs(chosen=chosen - total, top_tokens=ids, top=best - total[..., None])


def chunked_logprobs(
    head: Callable[[Float[Array, "C D"]], Float[Array, "C V"]],
    hidden: Float[Array, "T D"],
    tokens: Int[Array, "T"],
    top: int,
    chunk: int = CHUNK,
) -> TokenLogprobs:
    """Those of `tokens`, each after its row of `hidden`, the residual stream that a prefill leaves;
    `head` makes logits of rows. At no time are there logits of more than `chunk` rows.
    """
    T, D = hidden.shape
    chunk = min(chunk, T)
    num = -(-T // chunk)
    rows = jnp.pad(hidden, ((0, num * chunk - T), (0, 0))).reshape(num, chunk, D)
    targets = jnp.pad(tokens, (0, num * chunk - T)).reshape(num, chunk)
    found = lax.map(lambda part: token_logprobs(head(part[0]), part[1], top), (rows, targets))
    return jax.tree.map(lambda x: x.reshape(num * chunk, *x.shape[2:])[:T], found)
