"""The end of every step: from the logits of B rows to their slots' next tokens.

One program does it all. What no row of a dispatch asks for is skipped while it runs (`Asks`), so
edits, penalties, grammars and log-probabilities cost nothing then and need no programs of their
own.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from minimax_jax.sampling import (
    TokenLogprobs,
    is_stop,
    is_undecided,
    masked,
    processed,
    sample,
    token_logprobs,
)
from serving.device.placement import on_each_rank
from serving.device.slots import ALL_BITS, Sent, Slots

NO_TOKEN, BROKEN = -1, -2  # in place of a token


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Asks:
    """What at least one row of a dispatch asks for."""

    edits: Bool[Sent, ""]
    penalties: Bool[Sent, ""]
    masks: Bool[Sent, ""]
    logprobs: Bool[Sent, ""]

    @property
    def any(self) -> bool:
        """Whether there is anything, as the host knows it."""
        return bool(self.edits or self.penalties or self.masks or self.logprobs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """B rows of a step: whose they are (S: nobody's), and whether their grammar has a mask."""

    slots: Int[Sent, "B"]
    has_mask: Bool[Sent, "B"]
    asks: Asks


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Each row's token, or `NO_TOKEN`, or `BROKEN` where none could be told."""

    tokens: Int[Array | np.ndarray, "B"]
    logprobs: TokenLogprobs  # of the raw distribution, a grammar's mask alone applied


def next_tokens(
    raw: Float[Array, "B V"],
    slots: Slots,
    masks: UInt32[Array, "S places words"],
    rows: Rows,
    positions: Int[Array, "B"],
    live: Bool[Array, "B"],
    top: int,
) -> tuple[Slots, Sampled]:
    """Draws the token at `positions` of each row that is `live`, and the slots after it; of the
    rows of all ranks.

    A row that is not goes on no more: it ended before, or its prompt has not ended.
    """
    draw = on_each_rank(partial(_next_tokens, top=top))
    return draw(raw, slots, masks, rows, positions, live)


def _next_tokens(raw, slots: Slots, masks, rows: Rows, positions, live, *, top: int):
    logits = _allowed(raw, masks, rows)
    edited = _processed(logits, slots, rows, positions)
    settings = replace(slots.sampling, edits=None, penalties=None).at(rows.slots)
    broken = live & is_undecided(raw, edited)
    live = live & ~broken
    tokens = sample(edited, settings, positions).astype(jnp.int32)
    reported = jnp.where(broken, BROKEN, jnp.where(live, tokens, NO_TOKEN))
    going = live & ~is_stop(tokens, settings.stop_ids)
    sampled = Sampled(tokens=reported, logprobs=_logprobs(logits, tokens, rows.asks, top))
    return _after(slots, rows.slots, tokens, positions, live, going), sampled


def _allowed(raw, masks, rows: Rows) -> Float[Array, "B V"]:
    def with_masks(raw: Float[Array, "B V"]) -> Float[Array, "B V"]:
        mask = jnp.where(rows.has_mask[:, None], masks[rows.slots, 0], jnp.uint32(ALL_BITS))
        return masked(raw, mask)

    return lax.cond(rows.asks.masks, with_masks, lambda raw: raw, raw)


def _processed(logits, slots: Slots, rows: Rows, positions) -> Float[Array, "B V"]:
    """First edits, then penalties, each where a row asks for it."""
    sampling, history = slots.sampling, slots.history

    def edited(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        settings = replace(sampling, penalties=None).at(rows.slots)
        recent = replace(history, prompt=None, counts=None).at(rows.slots)
        return processed(logits, settings, positions, recent)

    def penalised(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        settings = replace(sampling, edits=None).at(rows.slots)
        return processed(logits, settings, positions, history.at(rows.slots))

    logits = lax.cond(rows.asks.edits, edited, lambda x: x, logits)
    return lax.cond(rows.asks.penalties, penalised, lambda x: x, logits)


def no_logprobs(num_rows: int, top: int) -> TokenLogprobs:
    """In place of those that nobody asked for."""
    return TokenLogprobs(
        chosen=jnp.zeros(num_rows),
        top_tokens=jnp.zeros((num_rows, top), jnp.int32),
        top=jnp.zeros((num_rows, top)),
    )


def _logprobs(logits, tokens, asks: Asks, top: int) -> TokenLogprobs:
    return lax.cond(
        asks.logprobs,
        lambda x: token_logprobs(x, tokens, top),
        lambda x: no_logprobs(len(x), top),
        logits,
    )


def _after(
    slots: Slots,
    at: Int[Array, "B"],
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    live: Bool[Array, "B"],
    going: Bool[Array, "B"],
) -> Slots:
    """The slots with the new tokens of their live rows."""
    anchors, history, S = slots.anchors, slots.history, slots.num_slots
    assert history.counts is not None and history.recent is not None
    into = jnp.where(live, at, S)
    going = going & (positions + 1 < anchors.limits[at])
    anchors = replace(
        anchors,
        tokens=anchors.tokens.at[into].set(tokens, mode="drop"),
        positions=anchors.positions.at[into].set(positions, mode="drop"),
        running=anchors.running.at[at].set(going, mode="drop"),
    )
    recent = replace(history, prompt=None, counts=None).at(at).then(tokens[:, None]).recent
    history = replace(
        history,
        counts=history.counts.at[into, tokens].add(1, mode="drop"),
        recent=history.recent.at[into].set(recent, mode="drop"),
    )
    return replace(slots, anchors=anchors, history=history)
