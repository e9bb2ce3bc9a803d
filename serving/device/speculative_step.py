"""The speculative step over slots: gathers its rows' state, runs `minimax_jax.speculative`'s step,
and puts back what came of it.

It has two forms: rows that only draw, and rows of which one at least asks for edits, penalties, a
mask or log-probabilities, which then carry their history along ([B, V] a row).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from minimax_jax.routes import Routes
from minimax_jax.sampling import History, SamplingState, TokenLogprobs
from minimax_jax.speculative.steps import (
    Speculated,
    SpeculationOptions,
    SpeculationState,
    speculate,
)
from serving.device.drafts import Drafted
from serving.device.placement import for_host, kept_by_rank, on_each_rank
from serving.device.sampler import BROKEN, Rows
from serving.device.slots import ALL_BITS, Sent, Slots, anchors_of, put, tables_of
from serving.device.steps import State, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """B rows and how many of their drafts are tested."""

    rows: Rows
    widths: Int[Sent, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Committed:
    """Up to k tokens of each row, one a place as in `sampler.Sampled`, and the next drafts."""

    tokens: Int[Array | np.ndarray, "k B"]
    logprobs: TokenLogprobs
    drafted: Drafted
    routes: Routes | None


def speculative(
    weights: Weights,
    state: State,
    masks: UInt32[Array, "S places words"],
    drafting: DraftRows,
    *,
    tree: Any,
    pages: int,
    options: SpeculationOptions,
    with_options: bool,
) -> tuple[State, Committed]:
    """Tests drafts, commits what is kept and one token more, and drafts anew."""
    model, drafter = jax.tree.unflatten(tree, weights.leaves)
    slots, rows = state.slots, drafting.rows
    at = rows.slots
    sampling = slots.sampling
    if not with_options:
        sampling = replace(sampling, edits=None, penalties=None)
    cache, after, made = speculate(
        model,
        drafter,
        weights.adapter,
        state.cache,
        tables_of(state.cache, slots, at, pages),
        _rows_of(slots, at, with_options),
        drafting.widths,
        on_each_rank(SamplingState.at)(sampling, at),
        options,
        on_each_rank(_allowed)(masks, rows) if with_options else None,
    )
    slots = replace(
        slots,
        anchors=on_each_rank(put)(slots.anchors, at, after.anchors),
        proposal=on_each_rank(put)(slots.proposal, at, after.proposal),
    )
    if after.history is not None:
        kept, new = (replace(one, prompt=None) for one in (slots.history, after.history))
        history = replace(on_each_rank(put)(kept, at, new), prompt=slots.history.prompt)
        slots = replace(slots, history=history)
    state = State(cache=cache, slots=kept_by_rank(slots))
    return state, for_host(_committed(made, Drafted.of(after.proposal)))


def _rows_of(slots: Slots, at: Int[Array, "B"], with_history: bool) -> SpeculationState:
    """The state of these slots."""
    return SpeculationState(
        anchors=anchors_of(slots, at),
        proposal=on_each_rank(_at)(slots.proposal, at),
        history=on_each_rank(History.at)(slots.history, at) if with_history else None,
    )


def _at(tree: Any, at: Int[Array, "B"]) -> Any:
    return jax.tree.map(lambda x: x[at], tree)


def _allowed(masks, rows: Rows) -> UInt32[Array, "B places words"]:
    return jnp.where(rows.has_mask[:, None, None], masks[rows.slots], jnp.uint32(ALL_BITS))


def _committed(made: Speculated, drafted: Drafted) -> Committed:
    generated = made.generated
    tokens = jnp.where(generated.broken, BROKEN, generated.tokens)
    logprobs = TokenLogprobs(
        chosen=generated.logprobs, top_tokens=generated.top_tokens, top=generated.top_logprobs
    )
    return Committed(tokens=tokens, logprobs=logprobs, drafted=drafted, routes=made.routes)
