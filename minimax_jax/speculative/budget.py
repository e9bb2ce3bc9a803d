"""Which of a step's drafts are tested, chosen on the device, so that the host need not wait for
their confidences: the likeliest, as many as the host's budget says (spec/dspark 4.3).

`serving.scheduling.speculation.widths_within` is the same choice in plain Python. Whether draft j
is tested depends on confidences up to its own alone, and these on the drafts before it: what a
draft is does not decide over its own test.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def survivals(
    confidence: Float[Array, "B T"], temperatures: Float[Array, "T"]
) -> Float[Array, "B T"]:
    """The probability that each draft is committed if all are tested, from the confidence head's
    logits and their calibrated temperatures (spec/dspark 3). NaN, a broken drafter's, becomes 0.

    Multiplied from left to right: a product in another order could round above its predecessor.
    """
    chances = jax.nn.sigmoid(confidence.astype(jnp.float32) / temperatures)
    chances = jnp.where(jnp.isnan(chances), 0.0, chances)
    survival = [chances[:, 0]]
    for k in range(1, chances.shape[1]):
        survival.append(survival[-1] * chances[:, k])
    return jnp.stack(survival, axis=1)


def widths_within(
    survival: Float[Array, "B T"], room: Int[Array, "B"], budget: Int[Array, ""]
) -> Int[Array, "B"]:
    """How many drafts of each sequence are tested if all together may test `budget`: the likeliest
    of each one's first `room`. Of equals the lower place goes first, then the earlier sequence.
    """
    B, T = survival.shape
    places = jnp.arange(T)[:, None]
    wanted_TB = jnp.where(places < room, survival.T, 0.0)
    keys = wanted_TB.reshape(T * B)  # lower places first
    likeliest = jnp.argsort(keys, stable=True, descending=True)
    ranks = jnp.zeros(T * B, jnp.int32).at[likeliest].set(jnp.arange(T * B, dtype=jnp.int32))
    return jnp.sum((wanted_TB > 0) & (ranks.reshape(T, B) < budget), axis=0)
