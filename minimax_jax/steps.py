"""The jitted steps: prefill a chunk, decode k tokens, score a pack. Pure: cache in, cache out,
everything an argument.

The cache is donated; the caller keeps the one that comes back. Serving schedules these steps, RL
runs them in lock-step.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.drafter import Drafter
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from minimax_jax.sampling import (
    History,
    SamplingState,
    is_stop,
    is_undecided,
    masked,
    processed,
    sample,
    token_logprobs,
)
from minimax_jax.shards import whole_rows
from minimax_jax.speculative.drafting import inject
from pallas_kernels.layouts.pool import PoolLayout

Fetched = Array | np.ndarray  # on the device, or already on the host


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """B sequences between two decode steps: the logits of the next token and where it goes.

    `history` is there if the sampling needs one.
    """

    logits: Float[Array, "B V"]
    positions: Int[Array, "B"]  # of the next token
    limits: Int[Array, "B"]  # the first position that is not generated any more
    running: Bool[Array, "B"]
    history: History | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Generated:
    """What k decode steps produced, one row a step; rows of a sequence that had stopped are -1.

    Without the k within a step, and of numpy arrays once they are on the host.
    """

    tokens: Int[Fetched, "*k B"]
    logprobs: Float[Fetched, "*k B"]  # of the raw distribution, a grammar's mask alone applied
    top_tokens: Int[Fetched, "*k B n"]
    top_logprobs: Float[Fetched, "*k B n"]
    broken: Bool[Fetched, "*k B"]  # NaN logits, or nothing may follow: the sequence ends there


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What a decode program is compiled for."""

    steps: int
    top_logprobs: int = 0


@partial(jax.jit, donate_argnames=("cache", "logits"))
def prefill(
    model: Model,
    adapter: Adapter,
    cache: Cache,
    batch: Batch,
    last: Int[Array, "B"],
    logits: Float[Array, "B V"],
    drafter: Drafter | None = None,
) -> tuple[Cache, Float[Array, "B V"]]:
    """Runs one chunk of each sequence's prompt into its pages, those of a drafter too.

    Where a prompt ends in this chunk (`last` is its token's column, -1 otherwise) its row of
    `logits` is replaced. The head sees those rows alone.
    """
    layers = () if drafter is None else drafter.config.target_layers
    hidden, cache_out, taps = model.hidden(batch, cache.layout, cache, adapter, taps=layers)
    assert cache_out is not None
    if drafter is not None:
        cache_out = inject(drafter, cache_out, taps, batch)
    rows = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    return cache_out, jnp.where((last >= 0)[:, None], model.logits(rows, adapter), logits)


@partial(jax.jit, static_argnames=("options",), donate_argnames=("cache", "state"))
def decode(
    model: Model,
    adapter: Adapter,
    cache: Cache,
    block_table: Int[Array, "B P"],
    state: DecodeState,
    sampling: SamplingState,
    options: DecodeOptions,
    allowed: UInt32[Array, "B words"] | None = None,
) -> tuple[Cache, DecodeState, Generated]:
    """Samples and runs `options.steps` tokens of every running sequence in one dispatch.

    `allowed` is a grammar's mask of the next token (`sampling.masks`). Raises ValueError when it
    comes with several steps, since it holds for one.
    """
    if allowed is not None and options.steps != 1:
        raise ValueError(f"steps={options.steps} with a mask, which holds for one step alone")

    def step(carry, _):
        return _decode_one(model, adapter, block_table, sampling, options, allowed, *carry)

    (cache, state), generated = lax.scan(step, (cache, state), None, length=options.steps)
    return cache, state, generated


def next_token(
    state: DecodeState,
    sampling: SamplingState,
    top_logprobs: int,
    allowed: UInt32[Array, "B words"] | None = None,
) -> tuple[Int[Array, "B"], Bool[Array, "B"], Generated]:
    """Each sequence's next token, whether the sequence goes on after it, and what to report."""
    whole = whole_rows(state.logits)
    raw = masked(whole, allowed)
    logits = processed(raw, sampling, state.positions, state.history)
    broken = state.running & is_undecided(whole, logits)
    running = state.running & ~broken & (state.positions < state.limits)
    tokens = sample(logits, sampling, state.positions)
    logprobs = token_logprobs(raw, tokens, top_logprobs)
    generated = Generated(
        tokens=jnp.where(running, tokens, -1),
        logprobs=logprobs.chosen,
        top_tokens=logprobs.top_tokens,
        top_logprobs=logprobs.top,
        broken=broken,
    )
    return tokens, running & ~is_stop(tokens, sampling.stop_ids), generated


def lengthened(history: History | None, tokens: Int[Array, "B n"]) -> History | None:
    """The history after tokens, -1 past the last of a sequence."""
    return None if history is None else history.then(tokens)


def _decode_one(model, adapter, table, sampling, options, allowed, cache: Cache, state):
    tokens, feeding, generated = next_token(state, sampling, options.top_logprobs, allowed)
    batch = Batch(
        tokens=jnp.where(feeding, tokens, 0)[:, None],
        positions=jnp.where(feeding, state.positions, -1)[:, None],
        block_table=table,
    )
    hidden, cache_out, _ = model.hidden(batch, cache.layout, cache, adapter)
    assert cache_out is not None
    state = DecodeState(
        logits=model.logits(hidden[:, 0], adapter),
        positions=state.positions + feeding,
        limits=state.limits,
        running=feeding,
        history=lengthened(state.history, jnp.asarray(generated.tokens)[:, None]),
    )
    return (cache_out, state), generated


@partial(jax.jit, static_argnames=("layout",))
def score(
    model: Model, adapter: Adapter, batch: Batch, layout: PoolLayout
) -> Float[Array, "B Z V"]:
    """Logits of every token of a pack, without a cache."""
    hidden, _, _ = model.hidden(batch, layout, None, adapter)
    return model.logits(hidden, adapter)


def bucket(size: int, smallest: int = 1) -> int:
    """The smallest power of two, from `smallest` on, that holds `size`: the shapes programs are
    compiled for.
    """
    return max(smallest, 1 << max(0, size - 1).bit_length())
