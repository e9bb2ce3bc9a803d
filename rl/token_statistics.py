"""Log-probabilities and entropies at the sampling temperature, a chunk of rows at a time, so that
[T, V] logits never exist at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minimax_jax.lora import Adapter
from minimax_jax.model import Model

CHUNK_ROWS = 2048  # with 200,064 ids 1.6 GB of logits, with 512 ids 4 MiB


def token_statistics(
    model: Model,
    adapter: Adapter,
    hidden: Float[Array, "B Z D"],
    targets: Int[Array, "B Z"],
    temperature: float,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Of each place: log p(target), and the entropy of p in nats, where p is the softmax of the
    logits divided by the temperature. The entropy has no gradient.
    """

    @jax.checkpoint  # logits are computed again in the backward pass
    def of_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return _statistics(model.logits(part[0], adapter) / temperature, part[1])

    logprobs, entropies = _by_chunks(of_chunk, hidden, targets)
    return logprobs, entropies


def frozen_head_statistics(
    model: Model, hidden: Float[Array, "B Z D"], targets: Int[Array, "B Z"], temperature: float
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """The same where neither norm nor head are trained: the gradient, of `hidden` alone, is made
    with the logits at hand, which are not computed again (the head's product twice, not thrice).
    """
    found: Any = _beside_frozen_head(model, hidden, targets, temperature)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _beside_frozen_head(model, hidden, targets, temperature):
    return token_statistics(model, None, hidden, targets, temperature)


def _forward(model, hidden, targets, temperature):
    def of_chunk(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        rows, ids = part
        logits, pull = jax.vjp(lambda rows: model.logits(rows) / temperature, rows)
        (of_rows,) = pull(_is_target(logits, ids) - jax.nn.softmax(logits, axis=-1))
        return *_statistics(logits, ids), of_rows

    logprobs, entropies, of_hidden = _by_chunks(of_chunk, hidden, targets)
    return (logprobs, entropies), of_hidden.reshape(hidden.shape)


def _backward(_, of_hidden, gradients):
    of_logprobs = gradients[0].reshape(*of_hidden.shape[:-1], 1)
    return None, (of_logprobs * of_hidden).astype(of_hidden.dtype), None


_beside_frozen_head.defvjp(_forward, _backward)


def _by_chunks(of_chunk: Callable, hidden: Float[Array, "B Z D"], targets: Int[Array, "B Z"]):
    """The results of some rows and targets at a time, of all rows."""
    rows = targets.size
    chunk = min(CHUNK_ROWS, rows)
    padding = -rows % chunk
    flat_TD = jnp.pad(hidden.reshape(rows, hidden.shape[-1]), [(0, padding), (0, 0)])
    flat_T = jnp.pad(targets.reshape(rows), [(0, padding)])
    parts = flat_TD.reshape(-1, chunk, hidden.shape[-1]), flat_T.reshape(-1, chunk)
    found = lax.map(of_chunk, parts)
    return [one.reshape(-1, *one.shape[2:])[:rows] for one in found]


def _statistics(
    logits: Float[Array, "C V"], targets: Int[Array, "C"]
) -> tuple[Float[Array, "C"], Float[Array, "C"]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    # A sum, of one term, has a gradient that joins the softmax's; that of a look-up is a scatter.
    of_target = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    detached = lax.stop_gradient(logits)
    probabilities = jax.nn.softmax(detached, axis=-1)
    # ids beyond the vocabulary have logits of -inf and no part in the mean
    terms = jnp.where(probabilities > 0, probabilities * detached, 0.0)
    return of_target - total, lax.stop_gradient(total) - jnp.sum(terms, axis=-1)


def _is_target(logits: Float[Array, "C V"], targets: Int[Array, "C"]) -> Bool[Array, "C V"]:
    return jnp.arange(logits.shape[-1]) == targets[:, None]
