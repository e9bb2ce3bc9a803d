"""The distribution that is drawn from, and the draw."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minimax_jax.sampling.cuts import within_top_k, within_top_p
from minimax_jax.sampling.draws import TOKEN, draw, uniform
from minimax_jax.sampling.history import History
from minimax_jax.sampling.state import SamplingState


def processed(
    logits: Float[Array, "B V"],
    state: SamplingState,
    positions: Int[Array, "B"],
    history: History | None,
) -> Float[Array, "B V"]:
    """The logits of the tokens at `positions` after edits and then penalties: what greedy takes the
    best of, and what `probabilities` goes on with.
    """
    if not state.needs_history:
        return logits
    assert history is not None, "edits and penalties need the tokens so far"
    logits = logits.astype(jnp.float32)
    if state.edits is not None:
        assert history.recent is not None
        logits = state.edits.apply(logits, positions, state.stop_ids, history.recent)
    if state.penalties is not None:
        assert history.prompt is not None and history.counts is not None
        logits = state.penalties.apply(logits, history.prompt, history.counts)
    return logits


def is_undecided(logits: Float[Array, "B V"], done: Float[Array, "B V"]) -> Bool[Array, "B"]:
    """Rows whose token cannot be told: NaN among the logits, or nothing left of them when `done`,
    that is masked and processed.
    """
    return jnp.isnan(jnp.max(logits, axis=-1)) | ~jnp.isfinite(jnp.max(done, axis=-1))


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    positions: Int[Array, "B"],
    purpose: int = TOKEN,
) -> Int[Array, "B"]:
    """The token at each sequence's next position, from processed logits: argmax (lower id on a tie)
    at temperature 0, else a draw from `probabilities`. A batch of temperature 0 draws nothing.
    """
    greedy = jnp.argmax(logits, axis=-1)

    def drawn(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
        token = draw(probabilities(logits, state), uniform(state, positions, purpose))
        return jnp.where(state.temperature == 0, greedy, token).astype(greedy.dtype)

    return lax.cond(jnp.any(state.temperature > 0), drawn, lambda _: greedy, logits)


def probabilities(logits: Float[Array, "B V"], state: SamplingState) -> Float[Array, "B V"]:
    """The distribution that is sampled, float32: softmax(logits / T) cut by min-p, then top-k, then
    top-p, renormalised; the logits are processed ones.

    min-p keeps tokens of at least min_p times the best probability; top-p keeps the fewest best of
    what is left whose mass reaches top_p. Equal logits: the lower id is kept first. At temperature
    0 the row is that of temperature 1.
    """
    temperature = jnp.where(state.temperature == 0, 1.0, state.temperature)[:, None]
    logits = logits.astype(jnp.float32)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    scaled = jnp.where(jnp.exp(scaled) < state.min_p[:, None], -jnp.inf, scaled)
    scaled = jnp.where(within_top_k(scaled, state.top_k), scaled, -jnp.inf)
    scaled = jnp.where(within_top_p(scaled, state.top_p), scaled, -jnp.inf)
    return jax.nn.softmax(scaled, axis=-1)
