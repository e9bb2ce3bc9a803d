"""Next-token cross-entropy in float32, a chunk of rows at a time, so that [T, V] logits never exist
at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minimax_jax.model import Model

CHUNK_ROWS = 8192  # with 512 ids 16 MiB of logits


def token_losses(
    model: Model,
    hidden: Float[Array, "B Z D"],
    targets: Int[Array, "B Z"],
    weights: Float[Array, "B Z"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums over the weighted places: of -log p(target), and of how often the target is the
    likeliest id.
    """
    rows = targets.size
    chunk = min(CHUNK_ROWS, rows)
    padding = -rows % chunk

    def in_chunks(x: Array, width: tuple[int, ...]) -> Array:
        flat = jnp.pad(x.reshape(rows, *width), [(0, padding), *((0, 0) for _ in width)])
        return flat.reshape(-1, chunk, *width)

    @jax.checkpoint  # logits are computed again in the backward pass
    def sums(part: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        return _sums(model, *part)

    parts = (in_chunks(hidden, hidden.shape[-1:]), in_chunks(targets, ()), in_chunks(weights, ()))
    losses, hits = lax.map(sums, parts)
    return jnp.sum(losses), jnp.sum(hits)


def _sums(model: Model, hidden_TD: Array, targets_T: Array, weights_T: Array):
    logits_TV = model.logits(hidden_TD)
    of_target = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits_TV, axis=-1) - of_target
    hits = jnp.argmax(logits_TV, axis=-1) == targets_T
    return jnp.sum(losses * weights_T), jnp.sum(hits * weights_T)
