"""`minimax-serve profile MODEL`: what the parts of a speculative step cost on this machine, as the
table that the scheduler of drafts weighs them by (spec/dspark 4.4).

The target's part is a step of as many sequences as there are tokens, the drafter's a proposal of as
many blocks as hold the drafts. All sequences read the same pages of one context, which makes no
difference to their time.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from configs.parts import check
from minimax_jax.cache import Cache
from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.loaded import LoadedModel, load
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.speculative.drafting import draft_sampling, propose
from minimax_jax.steps import DecodeOptions, DecodeState, bucket, decode
from serving.scheduling.cost_table import CostTable, StepCosts, profile, write_costs

PROG = "minimax-serve profile"
REPEATS = 9
_propose = jax.jit(propose)


@dataclass(kw_only=True)
class Sequences:
    """Some sequences of one length, whose steps are timed; their pages are zeros."""

    loaded: LoadedModel
    cache: Cache
    table: jax.Array
    state: DecodeState
    sampling: SamplingState

    @classmethod
    def of(cls, loaded: LoadedModel, count: int, context: int) -> "Sequences":
        """`count` sequences of `context` tokens, sampled at temperature 1."""
        blocks = -(-(context + 1) // loaded.layout.block_size)
        width = bucket(blocks, smallest=loaded.config.indexer.top_k)
        table = np.broadcast_to(np.minimum(np.arange(width), blocks - 1), (count, width))
        params = [SamplingParams(temperature=1.0, seed=row) for row in range(count)]
        return cls(
            loaded=loaded,
            cache=Cache.empty(loaded.layout, blocks, loaded.mesh),
            table=jnp.asarray(table, jnp.int32),
            state=DecodeState(
                logits=jnp.zeros((count, loaded.config.vocab_size), jnp.float32),
                positions=jnp.full(count, context),
                limits=jnp.full(count, context + 2),
                running=jnp.ones(count, bool),
            ),
            sampling=SamplingState.of(params, [context] * count, loaded.config.vocab_size),
        )

    def verify(self) -> float:
        """Seconds of a step that runs one token of each through the target."""
        where = (jnp.copy(x) for x in (self.state.positions, self.state.limits, self.state.running))
        positions, limits, running = where
        began = time.perf_counter()
        with self.loaded.on_mesh():
            self.cache, after, _ = decode(
                self.loaded.model,
                self.loaded.adapter,
                self.cache,
                self.table,
                self.state,
                self.sampling,
                DecodeOptions(steps=1),
            )
        jax.block_until_ready((self.cache, after))
        seconds = time.perf_counter() - began
        self.state = replace(after, positions=positions, limits=limits, running=running)
        return seconds

    def draft(self) -> float:
        """Seconds of a block of drafts for each."""
        drafter, positions = self.loaded.drafter, self.state.positions
        assert drafter is not None
        anchors, drawn = jnp.zeros_like(positions), draft_sampling(self.sampling, "probabilistic")
        began = time.perf_counter()
        with self.loaded.on_mesh():
            proposal = _propose(
                self.loaded.model, drafter, self.cache, self.table, anchors, positions, drawn
            )
        jax.block_until_ready(proposal)
        return time.perf_counter() - began


def measure(loaded: LoadedModel, max_num_seqs: int, context: int) -> StepCosts:
    """The costs up to `max_num_seqs` sequences of `context` tokens with all drafts tested, at
    powers of two.
    """
    assert loaded.drafter is not None
    block = loaded.drafter.config.draft_block

    @cache
    def sequences(count: int) -> Sequences:
        return Sequences.of(loaded, count, context)

    tokens = _powers(max_num_seqs * (block + 1))
    verify = _profiled(lambda size: sequences(size).verify(), tokens)
    drafts = [block * count for count in _powers(max_num_seqs)]
    draft = _profiled(lambda size: sequences(size // block).draft(), drafts)
    return StepCosts(verify=verify, draft=draft)


def main(arguments: Sequence[str]) -> None:
    """Measures, prints the table and writes it. Bad input is one sentence and exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        check(options.max_num_seqs >= 2, f"max_num_seqs={options.max_num_seqs} is not at least 2")
        check(options.context >= 1, f"context={options.context} is not at least 1")
        keep_compiled_programs()
        loaded = load(options.model, revision=options.revision, speculative=True)
        longest = loaded.config.max_context
        fits = options.context < longest
        check(fits, f"context={options.context} leaves no room in the model's {longest}")
        costs = measure(loaded, options.max_num_seqs, options.context)
        if options.out is not None:
            write_costs(options.out, costs)
    except (ValueError, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2)
    title = f"{options.model} at {options.context} tokens of context"
    Console().print(_table(costs, title))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description="measures what a speculative step costs", allow_abbrev=False
    )
    parser.add_argument("model", help="bundled name, folder, or hub name")
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences at most")
    parser.add_argument("--context", type=int, default=256, help="tokens that each has behind it")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    return parser


def _profiled(step, sizes: list[int]) -> CostTable:
    return profile(step, sizes, repeats=REPEATS, padded_up_to=sizes[-1])


def _powers(most: int) -> list[int]:
    """1, 2, 4, .. up to the first that holds `most`."""
    return [1 << k for k in range(bucket(most).bit_length())]


def _table(costs: StepCosts, title: str) -> Table:
    table = Table("part", "tokens", "ms", "steps a second", title=title)
    for part, one in (("verify", costs.verify), ("draft", costs.draft)):
        for tokens, rate in zip(one.tokens, one.steps_per_sec, strict=True):
            table.add_row(part, str(tokens), f"{1000 / rate:.2f}", f"{rate:,.1f}")
    return table
