"""The time of a speculative step: the target verifies an anchor and all drafts of each sequence,
what is kept is injected into the draft cache, and the drafter proposes anew.

Random weights agree on nothing, so how many tokens a step commits is no result here but a number
that is assumed: the program is the same whatever is kept, and its time is too.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.bench.calls import num_calls, steady, timed
from minimax_jax.bench.steps import (
    Measured,
    distinct_experts,
    on_a_rank,
    on_mesh,
    random_cache,
    tables,
)
from minimax_jax.bench.work import decode_bytes
from minimax_jax.drafter import Drafter
from minimax_jax.model import Model
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.speculative.commit import Anchors
from minimax_jax.speculative.drafting import Proposal
from minimax_jax.speculative.steps import SpeculationOptions, SpeculationState, speculate
from pallas_kernels.layouts.pool import LINE, PoolLayout

_DISPATCHES = 8  # in one measurement


@dataclass(frozen=True, kw_only=True)
class Speculate:
    """B sequences of `context` tokens, of which a step is assumed to commit so many tokens."""

    batch: int
    context: int
    committed: int | float


def measure_speculation(
    model: Model, drafter: Drafter, layout: PoolLayout, case: Speculate
) -> Measured:
    """Steps with all drafts verified, greedy, on pages of random bytes. ValueError if a sequence
    ended meanwhile.
    """
    batch, drafts = case.batch, drafter.config.draft_block
    total = case.context + (drafts + 1) * num_calls(_DISPATCHES) + 1
    table, blocks = tables(batch, -(-total // layout.block_size))
    widths = jnp.full(batch, drafts, jnp.int32)
    sampling = SamplingState.of([SamplingParams(temperature=0.0)] * batch)
    options = SpeculationOptions(rows=batch * (drafts + 1))

    def step(held, model, drafter, table, widths, sampling):
        cache, state = held
        given = model, drafter, None, cache, table, state, widths, sampling, options
        *held, made = speculate(*given)
        return tuple(held), made

    last: list[SpeculationState] = []
    held = random_cache(layout, blocks), _state(model, drafter, case, total)
    program = steady(step, held, model, drafter, *on_mesh((table, widths, sampling)))

    def run(held: Any) -> Any:
        held = program(held)
        last[:] = [held[1]]
        return held

    took = timed(run, held, _DISPATCHES)
    del held
    if not np.asarray(last[0].anchors.running).all():
        raise ValueError("a sequence ended while it was timed: some logits were NaN")
    distinct = distinct_experts(model, batch * (drafts + 1))
    own = on_a_rank(batch)
    of_target = decode_bytes(model, layout, own, case.context, distinct)
    return Measured(
        name=f"speculate {batch} x {case.context}, {case.committed:g} tokens a step assumed",
        seconds=took.seconds,
        tokens=batch * case.committed,
        bytes=of_target + draft_bytes(model, drafter, layout, own, case.context),
        flops=0,
        timeline=took.timeline,
        fallbacks=took.fallbacks,
        first_call=took.first_call,
    )


def draft_bytes(
    model: Model, drafter: Drafter, layout: PoolLayout, batch: int, context: int
) -> int:
    """Bytes that a proposal of a device cannot avoid reading: the drafter's weights, the target's
    head once more (what is proposed follows from what the first pass of it decided), and the
    window of each sequence's draft pages.
    """
    weights = sum(_own_bytes(leaf) for leaf in jax.tree.leaves((drafter, model.head)))
    blocks = -(-min(context, drafter.config.window) // layout.block_size)
    return weights + batch * blocks * (layout.lines - layout.draft_line(0)) * LINE


def _own_bytes(leaf: Any) -> int:
    """Of one device."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _state(model: Model, drafter: Drafter, case: Speculate, total: int) -> SpeculationState:
    """Anchors at the end of the contexts, with random drafts."""
    batch, rng = case.batch, np.random.default_rng(0)
    config, shape = model.config, (case.batch, drafter.config.draft_block)
    has_head = drafter.confidence is not None
    proposal = Proposal(
        tokens=jnp.asarray(rng.integers(0, config.num_tokens, shape), jnp.int32),
        logits=jnp.asarray(rng.standard_normal((*shape, config.vocab_size)), model.dtype),
        confidence=jnp.zeros(shape, jnp.float32) if has_head else None,
    )
    anchors = Anchors(
        tokens=jnp.zeros(batch, jnp.int32),
        positions=jnp.full(batch, case.context, jnp.int32),
        limits=jnp.full(batch, total, jnp.int32),
        running=jnp.ones(batch, bool),
    )
    return SpeculationState(
        anchors=on_mesh(anchors, "batch"), proposal=on_mesh(proposal, "batch", None, "vocab")
    )
