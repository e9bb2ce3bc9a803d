"""The two steps over slots: chunks of prompts, and one token of each running sequence.

Both are the model over a ragged batch of tiles and then `sampler.next_tokens`. Between steps a
sequence has an anchor, its newest token, whose keys are not in the pages yet: a decode step runs
it and draws the next one, and the last chunk of a prompt draws the first. Everything is an
argument; cache and slots are donated and come back. `programs` compiles them.

`minimax_jax.steps` has the lock-step form of the same: there sequences keep one row and their
logits, here they come and go, and a row is whoever's slot it names.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from minimax_jax.routes import Routes
from minimax_jax.sampling import TokenLogprobs, chunked_logprobs
from minimax_jax.speculative.drafting import DraftMethod, inject
from serving.device.drafts import Drafted, first_drafts
from serving.device.placement import for_host, kept_by_rank, on_each_rank
from serving.device.sampler import Rows, Sampled, next_tokens, no_logprobs
from serving.device.slots import Sent, Slots, anchors_of, tables_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Weights:
    """The leaves of a model and its drafter, which dispatch faster than they, and an adapter."""

    leaves: list[Array]
    adapter: Adapter


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """What a step takes and gives back in place."""

    cache: Cache
    slots: Slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Chunks of R prompts as tiles of T tokens; position -1 is padding.

    `last` is the flat place of a prompt's last token where it is in this chunk, else -1. `targets`
    are the tokens after those of the tiles, where prompts are scored.
    """

    tokens: Int[Sent, "tiles T"]
    positions: Int[Sent, "tiles T"]
    targets: Int[Sent, "tiles T"]
    tile_slots: Int[Sent, "tiles"]
    last: Int[Sent, "R"]
    rows: Rows
    scores_prompts: Bool[Sent, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """The first tokens of the prompts that ended, with drafts of the next ones if there is a
    drafter; and the prompts' own log-probabilities, flat over the tiles, zeros where nobody asked.
    """

    sampled: Sampled
    prompts: TokenLogprobs
    drafted: Drafted | None
    routes: Routes | None  # None unless they are recorded


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The next token of each row."""

    sampled: Sampled
    routes: Routes | None


def prefill(
    weights: Weights,
    state: State,
    masks: UInt32[Array, "S places words"],
    chunks: Chunks,
    *,
    tree: Any,
    pages: int,
    top: int,
    method: DraftMethod | None,
    records: bool,
) -> tuple[State, Prefilled]:
    """Runs the chunks into their pages, and draws the next token where a prompt ends. With a
    drafter, whose `method` it is, drafts follow.
    """
    model, drafter = jax.tree.unflatten(tree, weights.leaves)
    slots, adapter = state.slots, weights.adapter
    layers = () if drafter is None else drafter.config.target_layers
    batch = Batch(
        tokens=chunks.tokens,
        positions=chunks.positions,
        block_table=tables_of(state.cache, slots, chunks.tile_slots, pages),
    )
    walked = model.walk(batch, state.cache.layout, state.cache, adapter, taps=layers)
    cache = walked.cache
    assert cache is not None
    hidden = walked.hidden.reshape(chunks.tokens.size, walked.hidden.shape[-1])
    positions = chunks.positions.reshape(chunks.tokens.size)
    rows, limits = chunks.rows, slots.anchors.limits
    last, places, live = on_each_rank(_ends)(hidden, positions, chunks.last, limits, rows.slots)
    logits = model.logits(last, adapter)
    slots, sampled = next_tokens(logits, slots, masks, rows, places, live, top)
    prompts, drafted = _scored(model, adapter, hidden, chunks, top), None
    if drafter is not None:
        assert method is not None
        cache = inject(drafter, cache, walked.taps, batch)
        ends = jnp.where(chunks.last >= 0, rows.slots, slots.num_slots)
        slots, drafted = first_drafts(model, drafter, cache, slots, ends, pages, method)
    routes = Routes.of(walked.choices, batch, cache.layout.block_size) if records else None
    made = Prefilled(sampled=sampled, prompts=prompts, drafted=drafted, routes=routes)
    return State(cache=cache, slots=kept_by_rank(slots)), for_host(made)


def decode(
    weights: Weights,
    state: State,
    masks: UInt32[Array, "S places words"],
    rows: Rows,
    *,
    tree: Any,
    pages: int,
    top: int,
    records: bool,
) -> tuple[State, Decoded]:
    """Runs each row's anchor and draws the token after it; a sequence that has ended rests. The
    drafter, if there is one, learns of the anchors, so that a later step can draft again.
    """
    model, drafter = jax.tree.unflatten(tree, weights.leaves)
    layers = () if drafter is None else drafter.config.target_layers
    slots, adapter = state.slots, weights.adapter
    anchors = anchors_of(slots, rows.slots)
    live = anchors.running
    batch = Batch(
        tokens=jnp.where(live, anchors.tokens, 0)[:, None],
        positions=jnp.where(live, anchors.positions, -1)[:, None],
        block_table=tables_of(state.cache, slots, rows.slots, pages),
    )
    walked = model.walk(batch, state.cache.layout, state.cache, adapter, taps=layers)
    cache = walked.cache
    assert cache is not None
    if drafter is not None:
        cache = inject(drafter, cache, walked.taps, batch)
    logits = model.logits(walked.hidden[:, 0], adapter)
    positions = anchors.positions + 1
    slots, sampled = next_tokens(logits, slots, masks, rows, positions, live, top)
    routes = Routes.of(walked.choices, batch, cache.layout.block_size) if records else None
    made = Decoded(sampled=sampled, routes=routes)
    return State(cache=cache, slots=kept_by_rank(slots)), for_host(made)


def _ends(
    hidden: Float[Array, "N D"],
    positions: Int[Array, "N"],
    last: Int[Array, "R"],
    limits: Int[Array, "S"],
    at: Int[Array, "R"],
) -> tuple[Float[Array, "R D"], Int[Array, "R"], Bool[Array, "R"]]:
    """Of one rank's prompts the last tokens' hidden states and the positions after them; and the
    prompts that end here, unless they are only scored.
    """
    place = jnp.maximum(last, 0)
    after = positions[place] + 1
    return hidden[place], after, (last >= 0) & (after < limits[at])


def _scored(
    model: Model, adapter: Adapter, hidden: Float[Array, "N D"], chunks: Chunks, top: int
) -> TokenLogprobs:
    targets = chunks.targets.reshape(-1)

    def score(hidden: Float[Array, "N D"]) -> TokenLogprobs:
        return chunked_logprobs(lambda rows: model.logits(rows, adapter), hidden, targets, top)

    return lax.cond(chunks.scores_prompts, score, lambda x: no_logprobs(len(x), top), hidden)
