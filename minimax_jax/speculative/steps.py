"""The jitted steps of speculative decoding: `start` after a prefill, then `speculate`: verify,
accept, inject, propose (spec/dspark 2.3). Pure, as those of `steps`: everything is an argument.

Between steps each sequence has an anchor, its newest token, which the target has not run yet, and
drafts of the tokens after it. One `speculate` commits 1 to T + 1 tokens of each running sequence;
with no drafts tested it is a step of plain decoding, down to the same random numbers.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from minimax_jax.cache import Cache
from minimax_jax.drafter import Drafter
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from minimax_jax.routes import Routes
from minimax_jax.sampling import (
    History,
    SamplingState,
    masked,
)
from minimax_jax.speculative.commit import Anchors, Committed, commit
from minimax_jax.speculative.drafting import DraftMethod, Proposal, draft_sampling, inject, propose
from minimax_jax.speculative.judge import MOST_VALUES, Judge
from minimax_jax.speculative.verify_rows import VerifyRows, fitting_widths, verify_rows
from minimax_jax.steps import DecodeState, Fetched, Generated, lengthened, next_token


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SpeculationState:
    """B sequences between two steps. The history ends with the anchors: drafts are not in it."""

    anchors: Anchors
    proposal: Proposal
    history: History | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Speculated:
    """What one step committed: row k of `generated` is each sequence's token k, -1 past its last.

    `tested` drafts of each sequence were verified, and `accepted` of them are committed.
    """

    generated: Generated
    tested: Int[Fetched, "B"]
    accepted: Int[Fetched, "B"]
    routes: Routes | None = None  # of all rows that were verified, kept or not


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """What a program is compiled for. `rows` is how many tokens the target runs in a step, at least
    one a sequence; `method` is how drafts are drawn; `most_values` bounds tables of rows times
    vocabulary (see `judge`); with `records` the step gives the experts of its rows, and with
    `at_temperature` the log-probabilities of committed tokens are those at the sampling
    temperature (greedy: at 1) instead of raw ones.
    """

    rows: int
    method: DraftMethod = "probabilistic"
    top_logprobs: int = 0
    most_values: int = MOST_VALUES
    records: bool = False
    at_temperature: bool = False


@partial(jax.jit, static_argnames=("options",))
def start(
    model: Model,
    drafter: Drafter,
    cache: Cache,
    block_table: Int[Array, "B P"],
    state: DecodeState,
    sampling: SamplingState,
    options: SpeculationOptions,
) -> tuple[SpeculationState, Generated]:
    """Samples each sequence's first token, from what prefill left, and proposes the next ones."""
    tokens, going, generated = next_token(state, sampling, options.top_logprobs)
    anchors = Anchors(
        tokens=tokens,
        positions=state.positions,
        limits=state.limits,
        running=going & (state.positions + 1 < state.limits),
    )
    drawn = draft_sampling(sampling, options.method)
    proposal = _proposed(model, drafter, cache, block_table, anchors, drawn)
    history = lengthened(state.history, jnp.asarray(generated.tokens)[:, None])
    return SpeculationState(anchors=anchors, proposal=proposal, history=history), generated


@partial(jax.jit, static_argnames=("options",), donate_argnames=("cache", "state"))
def speculate(
    model: Model,
    drafter: Drafter,
    adapter: Adapter,
    cache: Cache,
    block_table: Int[Array, "B P"],
    state: SpeculationState,
    widths: Int[Array, "B"],
    sampling: SamplingState,
    options: SpeculationOptions,
    allowed: UInt32[Array, "B places words"] | None = None,
) -> tuple[Cache, SpeculationState, Speculated]:
    """Verifies the first `widths` drafts of each running sequence, commits the kept ones and one
    token more, injects the context of the rows that were kept, and proposes anew.

    Widths are cut to the drafts there are, and to what the limits and `options.rows` allow.
    `allowed` is a grammar's mask after the anchor and after each draft (`sampling.masks`). Rows of
    a sequence that is not running write nothing.
    """
    anchors, drafts = state.anchors, state.proposal.tokens
    most = jnp.minimum(anchors.room, drafts.shape[1])
    widths = fitting_widths(widths, anchors.running, most, options.rows)
    rows = verify_rows(widths, anchors.running, options.rows, drafts.shape[1])
    chain = jnp.concatenate([anchors.tokens[:, None], drafts], axis=1)
    batch = rows.batch(chain, anchors.positions, block_table)
    layers = drafter.config.target_layers
    walked = model.walk(batch, cache.layout, cache, adapter, taps=layers)
    verified = walked.cache
    assert verified is not None
    raw = model.logits(walked.hidden.reshape(options.rows, -1), adapter)
    drawn = draft_sampling(sampling, options.method)
    judge = Judge(
        raw=masked(raw, _of_rows(allowed, rows)),
        rows=rows,
        proposal=state.proposal,
        anchors=anchors.positions,
        history=state.history,
        sampling=sampling,
        drawn=drawn,
        most_values=options.most_values,
    )
    verdict, spoiled = judge.verdict(widths)
    broken = anchors.running & spoiled
    committed = commit(drafts, verdict, anchors.running & ~broken, sampling.stop_ids)
    kept = rows.at(anchors.positions, committed.keeps(rows)).reshape(batch.positions.shape)
    cache = inject(drafter, verified, walked.taps, replace(batch, positions=kept))
    newest = committed.anchors(anchors)
    after = SpeculationState(
        anchors=newest,
        proposal=_proposed(model, drafter, cache, block_table, newest, drawn),
        history=lengthened(state.history, committed.tokens),
    )
    routes = Routes.of(walked.choices, batch, cache.layout.block_size) if options.records else None
    made = Speculated(
        generated=_report(judge, committed, broken, options),
        tested=widths,
        accepted=committed.accepted,
        routes=routes,
    )
    return cache, after, made


def _proposed(
    model, drafter, cache, block_table, anchors: Anchors, drawn: SamplingState
) -> Proposal:
    tokens = jnp.where(anchors.running, anchors.tokens, 0)
    positions = jnp.where(anchors.running, anchors.positions, -1)
    return propose(model, drafter, cache, block_table, tokens, positions, drawn)


def _of_rows(
    allowed: UInt32[Array, "B places words"] | None, rows: VerifyRows
) -> UInt32[Array, "M words"] | None:
    return None if allowed is None else allowed[rows.sequences, jnp.maximum(rows.offsets, 0)]


def _report(judge: Judge, committed: Committed, broken, options: SpeculationOptions) -> Generated:
    """Log-probabilities of the committed tokens, each from the row before it."""
    rows = judge.rows
    tokens = committed.tokens[rows.sequences, jnp.maximum(rows.offsets, 0)]
    logprobs = judge.logprobs(tokens, options.top_logprobs, at_temperature=options.at_temperature)
    columns = jnp.arange(committed.tokens.shape[1])
    before = rows.first[:, None] + columns  # [B, places]
    return Generated(
        tokens=committed.tokens.T,
        logprobs=logprobs.chosen[before].T,
        top_tokens=logprobs.top_tokens[before].swapaxes(0, 1),
        top_logprobs=logprobs.top[before].swapaxes(0, 1),
        broken=(broken[:, None] & (columns == 0)).T,
    )
