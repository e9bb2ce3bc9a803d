"""Large batches with expert parallelism: each token goes to the devices of its experts, and what
they make of it comes back.

It goes once to a device, however many of its experts are there, and to none where it has none:
with n data ranks `copies_sent` travel each way, where gathering all tokens moves n - 1. Of 128
experts, 4 a token, these are 2.1 and 3 at n = 4, and 2.9 and 7 at n = 8.
There is no capacity: room is kept for every token of every rank, and an expert's rows cost what
they are.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.axes import DATA, MODEL
from sharding.collectives import device_rank, gathered, rank, ranks
from sharding.ragged import ragged_exchange

FEWEST_TOKENS = 64  # of a rank: below, a gather is short enough to be bound by its start alone


def are_sent(num_tokens: int, experts_per_token: int, data_ranks: int) -> bool:
    """The rule: whether a rank's tokens go to their experts (else all are gathered everywhere).

    From `FEWEST_TOKENS` a rank on, and with more data ranks than experts a token, from where on at
    most half of the gathered bytes travel; with fewer, sorting is not worth what is saved.
    """
    return data_ranks > experts_per_token and num_tokens >= FEWEST_TOKENS


def copies_sent(num_experts: int, num_own: int, experts_per_token: int, data_ranks: int) -> float:
    """How often a token travels to another device each way, at an even load: for each of the other
    data ranks the chance that any of its experts is among the `num_own` there.
    """
    elsewhere = math.comb(num_experts - num_own, experts_per_token)
    return (data_ranks - 1) * (1 - elsewhere / math.comb(num_experts, experts_per_token))


def sum_at_experts(
    own_sum: Callable[[Array, Array, Array], Array],
    x: Float[Array, "T D"],
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    num_own: int,
) -> Float[Array, "T D"]:
    """The sum over each token's experts on the devices of all data ranks, of this device's
    tensor-parallel rank; `own_sum` is that of a device's `num_own` experts, counted from 0.
    """
    (T, D), X, n = x.shape, experts.shape[1], ranks(DATA)
    needs = _destinations(experts, num_own, n)  # [n, T]
    sizes = gathered(jnp.sum(needs, axis=1, dtype=jnp.int32)[None], DATA)
    # A token has rows for at most X ranks, in the order of ranks.
    most = T * min(n, X)
    (pairs,) = jnp.nonzero(needs.reshape(-1), size=most, fill_value=n * T)
    tokens = pairs % T
    choice = jnp.concatenate([experts, lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    sent = [ragged_exchange(one[tokens], sizes, DATA, n * T) for one in (x, choice)]
    here = jnp.arange(n * T) < jnp.sum(sizes[:, rank(DATA)])
    ids = jnp.where(here[:, None], sent[1][:, :X] - device_rank() * num_own, -1)
    y = own_sum(sent[0], ids, lax.bitcast_convert_type(sent[1][:, X:], jnp.float32))
    back = ragged_exchange(y, sizes.T, DATA, most).astype(jnp.float32)
    back = jnp.where((pairs < n * T)[:, None], back, 0.0)
    return jnp.zeros((T, D), jnp.float32).at[tokens].add(back).astype(x.dtype)


def _destinations(experts: Int[Array, "T X"], num_own: int, n: int) -> Array:
    """Whether each token has an expert on each data rank's device of this tensor-parallel rank."""
    device = experts // num_own
    data_rank = jnp.where(device % ranks(MODEL) == rank(MODEL), device // ranks(MODEL), -1)
    return jnp.any(data_rank == jnp.arange(n)[:, None, None], axis=-1)
