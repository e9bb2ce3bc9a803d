"""How a wave of answers is decoded once its prompts are in the pages: plainly, or speculating with
a drafter. Both give, dispatch by dispatch, tokens and their log-probabilities at the sampling
temperature, from the program that drew the tokens.

With drafts the log-probabilities are the target's too, each from the row that decided over its
token; what the drafter thought has no part in them. The cache's record of experts follows what is
committed: the row of a refused draft is written over by that of the token in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from minimax_jax.cache import Cache
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from minimax_jax.sampling import SamplingState, token_logprobs
from minimax_jax.speculative.setup import Speculation
from minimax_jax.speculative.stats import SpeculationStats
from minimax_jax.speculative.steps import SpeculationOptions, speculate, start
from minimax_jax.steps import DecodeOptions, DecodeState, bucket, decode
from rl.policy import Policy

DECODE_STEPS = 8  # tokens a dispatch; between two the host sees who goes on


class Found(NamedTuple):
    """What one dispatch found of B rows, on the host: tokens (-1: none), their log-probabilities,
    where a row broke off; and of its drafts how many were tested and kept, if there were any.
    """

    tokens: Int[np.ndarray, "k B"]
    logprobs: Float[np.ndarray, "k B"]
    broken: Bool[np.ndarray, "k B"]
    drafts: Int[np.ndarray, "B 2"] | None = None

    def of_all(self, rows: Int[np.ndarray, "B"], count: int) -> "Found":
        """The same of `count` rows, of which these are some; nothing was found of the others."""

        def spread(part: np.ndarray, nothing: Any) -> np.ndarray:
            whole = np.full((len(part), count), nothing, part.dtype)
            whole[:, rows] = part
            return whole

        drafts = None if self.drafts is None else spread(self.drafts.T, 0).T
        return Found(
            tokens=spread(self.tokens, -1),
            logprobs=spread(self.logprobs, 0.0),
            broken=spread(self.broken, False),
            drafts=drafts,
        )


class Decoded:
    """What all dispatches of a wave found of its rows."""

    def __init__(self, parts: Sequence[Found], num_drafts: int | None):
        """`num_drafts` are tested of a row where there is room; None: there are no drafts."""
        columns = zip(*(part[:3] for part in parts), strict=True)
        self._tokens, self._logprobs, broken = (np.concatenate(column) for column in columns)
        self.broken, self._num_drafts = np.any(broken, axis=0), num_drafts
        self._drafted = [  # of each dispatch: drafts tested and kept, and tokens committed
            (part.drafts, np.sum(part.tokens >= 0, axis=0))
            for part in parts
            if part.drafts is not None
        ]

    def answer(self, row: int) -> tuple[tuple[int, ...], Float[np.ndarray, "n"]]:
        """The tokens of a row and their log-probabilities."""
        there = self._tokens[:, row] >= 0
        tokens = tuple(int(token) for token in self._tokens[there, row])
        return tokens, self._logprobs[there, row].astype(np.float32)

    def speculation(self, row: int) -> SpeculationStats | None:
        """What became of a row's drafts."""
        if self._num_drafts is None:
            return None
        stats = SpeculationStats()
        for drafts, committed in self._drafted:
            tested, accepted, count = *drafts[row].tolist(), int(committed[row])
            if count:
                kept = min(accepted, count)
                how = {"committed": count, "num_drafts": self._num_drafts}
                stats.record(tested=tested, accepted=kept, **how)
        return stats


@dataclass(kw_only=True)
class Prefilled:
    """Where decoding starts, and what it changes: rows whose prompts are in pages of `table`."""

    cache: Cache
    table: Int[Array, "B W"]
    state: Any  # a DecodeState, or once drafts are there a SpeculationState
    sampling: SamplingState

    def keep(self, rows: Int[np.ndarray, "b"]) -> None:
        """Leaves these rows alone, in this order; their pages stay where they are."""
        held = (self.table, self.state, self.sampling)
        self.table, self.state, self.sampling = taken(jnp.asarray(rows), held)


class PlainSteps:
    """Some tokens of each row a dispatch."""

    def __init__(self, held: Prefilled, policy: Policy, max_tokens: int):
        self._held, self._policy = held, policy
        self._steps = min(DECODE_STEPS, bucket(max_tokens))

    def advance(self) -> tuple[Found, Bool[np.ndarray, "B"]]:
        """One dispatch: what it found, and whose answers go on."""
        held, policy = self._held, self._policy
        held.cache, held.state, found = decode_with_logprobs(
            policy.model,
            policy.adapter,
            held.cache,
            held.table,
            held.state,
            held.sampling,
            self._steps,
        )
        state: DecodeState = held.state
        found, running, at, limits = jax.device_get(
            (found, state.running, state.positions, state.limits)
        )
        return Found(*found), running & (at < limits)


class SpeculativeSteps:
    """The first token of each row, then 1 to all drafts and one token more a dispatch. All drafts
    that there is room for are tested.
    """

    def __init__(self, held: Prefilled, policy: Policy, speculation: Speculation):
        self._held, self._policy, self._speculation = held, policy, speculation

    def advance(self) -> tuple[Found, Bool[np.ndarray, "B"]]:
        """One dispatch: what it found, and whose answers go on."""
        first = isinstance(self._held.state, DecodeState)
        found = self._first() if first else self._verified()
        running = np.asarray(self._held.state.anchors.running)
        return found, running

    def _first(self) -> Found:
        held, model = self._held, self._policy.model
        state, options = held.state, self._options()
        logprobs = partial(scaled_logprobs, state.logits, held.sampling)
        drafter = self._speculation.drafter
        held.state, out = start(
            model, drafter, held.cache, held.table, state, held.sampling, options
        )
        found = out.tokens, logprobs(out.tokens), out.broken
        return Found(*(one[None] for one in jax.device_get(found)))

    def _verified(self) -> Found:
        held, policy, options = self._held, self._policy, self._options()
        widths = jnp.full(len(held.table), self._speculation.num_drafts, jnp.int32)
        held.cache, held.state, done = speculate(
            policy.model,
            self._speculation.drafter,
            policy.adapter,
            held.cache,
            held.table,
            held.state,
            widths,
            held.sampling,
            options,
        )
        out = done.generated
        drafts = jnp.stack([jnp.asarray(done.tested), jnp.asarray(done.accepted)], axis=1)
        found = jax.device_get((out.tokens, out.logprobs, out.broken, drafts))
        return Found(*found)

    def _options(self) -> SpeculationOptions:
        return SpeculationOptions(
            rows=len(self._held.table) * (self._speculation.num_drafts + 1),
            method=self._speculation.config.draft_sample_method,
            at_temperature=True,
        )


Steps = PlainSteps | SpeculativeSteps


@partial(jax.jit, static_argnames=("steps",), donate_argnames=("cache", "state"))
def decode_with_logprobs(
    model: Model,
    adapter: Adapter,
    cache: Cache,
    table: Int[Array, "B W"],
    state: DecodeState,
    sampling: SamplingState,
    steps: int,
) -> tuple[Cache, DecodeState, tuple[Int[Array, "k B"], Float[Array, "k B"], Bool[Array, "k B"]]]:
    """Some decode steps: tokens (-1: none), their log-probabilities at the sampling temperature,
    and where a sequence broke off.
    """
    one = DecodeOptions(steps=1)

    def step(carry: tuple[Cache, DecodeState], _: None):
        cache, state, out = decode(model, adapter, carry[0], table, carry[1], sampling, one)
        tokens = jnp.asarray(out.tokens)[0]
        logprobs = scaled_logprobs(carry[1].logits, sampling, tokens)
        return (cache, state), (tokens, logprobs, jnp.asarray(out.broken)[0])

    (cache, state), found = jax.lax.scan(step, (cache, state), None, length=steps)
    return cache, state, found


@jax.jit
def scaled_logprobs(
    logits: Float[Array, "B V"], sampling: SamplingState, tokens: Int[Array, "B"]
) -> Float[Array, "B"]:
    """Log-probabilities of the tokens at the sampling temperature (greedy: at 1)."""
    temperature = jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)
    return jnp.asarray(token_logprobs(logits / temperature[:, None], tokens, 0).chosen)


@jax.jit
def taken(rows: Int[Array, "b"], tree: Any) -> Any:
    """Some rows of each array."""
    return jax.tree.map(lambda x: x[rows], tree)
