"""Log-probabilities and entropies at the sampling temperature, a chunk of rows at a time, so that
[T, V] logits never exist at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
    rows = targets.size
    chunk = min(CHUNK_ROWS, rows)
    padding = -rows % chunk
    flat_TD = jnp.pad(hidden.reshape(rows, hidden.shape[-1]), [(0, padding), (0, 0)])
    flat_T = jnp.pad(targets.reshape(rows), [(0, padding)])

    @jax.checkpoint  # logits are computed again in the backward pass
    def of_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return _statistics(model.logits(part[0], adapter) / temperature, part[1])

    parts = flat_TD.reshape(-1, chunk, hidden.shape[-1]), flat_T.reshape(-1, chunk)
    logprobs, entropies = lax.map(of_chunk, parts)
    return logprobs.reshape(-1)[:rows], entropies.reshape(-1)[:rows]


def _statistics(
    logits: Float[Array, "C V"], targets: Int[Array, "C"]
) -> tuple[Float[Array, "C"], Float[Array, "C"]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    # A sum, of one term, has a gradient that joins the softmax's; that of a look-up is a scatter.
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    of_target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    detached = lax.stop_gradient(logits)
    probabilities = jax.nn.softmax(detached, axis=-1)
    # ids beyond the vocabulary have logits of -inf and no part in the mean
    terms = jnp.where(probabilities > 0, probabilities * detached, 0.0)
    return of_target - total, lax.stop_gradient(total) - jnp.sum(terms, axis=-1)
