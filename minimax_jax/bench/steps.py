"""Times of a model's own steps: decode at some batch and context, prefill of one prompt.

The steps are those of `generate` and of the server, compiled once; each is dispatched several times
without waiting, so that the device never waits for the host unless it is the slower one.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.batch import Batch
from minimax_jax.bench.work import decode_bytes, prefill_flops
from minimax_jax.cache import POOL_AXES, Cache
from minimax_jax.model import Model
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, decode, prefill
from pallas_kernels.benchmark import random_pool, random_tables
from pallas_kernels.device_timeline import Timeline, profiled
from pallas_kernels.layouts.pool import PoolLayout
from sharding.apply import named_sharding
from sharding.axes import DATA
from sharding.rules import SERVE

REPEATS = 5  # measurements of which the median counts
_PROFILED = 3  # runs that the timeline is made of


@dataclass(frozen=True, kw_only=True)
class Decode:
    """B sequences of `context` tokens, `steps` tokens of each a dispatch."""

    batch: int
    context: int
    steps: int = 1
    dispatches: int = 8  # in one measurement


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a step took and what it had to do."""

    name: str
    seconds: float  # a step
    tokens: int  # of a step
    bytes: int  # that a step cannot avoid reading; 0 where FLOP are the limit
    flops: int
    timeline: Timeline
    fallbacks: tuple[str, ...]  # what dispatch says of ops that have no kernel here

    @property
    def tokens_a_second(self) -> float:
        """Of all sequences together."""
        return self.tokens / self.seconds


def fallbacks_of(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """What was warned of while a program was traced, each once."""
    return tuple(dict.fromkeys(str(one.message) for one in caught))


def measure_decode(model: Model, layout: PoolLayout, case: Decode) -> Measured:
    """Decode steps, greedy, on pages of random bytes."""
    dp = jax.sharding.get_mesh().shape.get(DATA, 1)
    total = case.context + case.steps * case.dispatches * (REPEATS + 3 + _PROFILED)
    width = -(-total // layout.block_size)
    copies = dp if case.batch % dp == 0 else 1  # block ids are counted within a data rank
    table = jnp.tile(random_tables(case.batch // copies, width), (copies, 1))
    cache = _random_cache(layout, case.batch // copies * width)
    rng = np.random.default_rng(0)
    config, batch = model.config, case.batch
    state = DecodeState(
        logits=jnp.asarray(rng.standard_normal((batch, config.vocab_size)), jnp.float32),
        positions=jnp.full(batch, case.context, jnp.int32),
        limits=jnp.full(batch, total, jnp.int32),
        running=jnp.ones(batch, bool),
    )
    sampling = SamplingState.of([SamplingParams(temperature=0.0)] * batch)
    distinct = _distinct_experts(model, cache, table, case)
    options = DecodeOptions(steps=case.steps)

    def step(held: tuple[Cache, DecodeState]) -> tuple[Cache, DecodeState]:
        cache, state = held
        cache, state, _ = decode(model, None, cache, table, state, sampling, options)
        return cache, state

    seconds, timeline, fallbacks = _timed(step, (cache, state), case.dispatches)
    return Measured(
        name=f"decode {batch} x {case.context}",
        seconds=seconds / case.steps,
        tokens=batch,
        bytes=decode_bytes(model, layout, -(-batch // dp), case.context, distinct),
        flops=0,
        timeline=timeline,
        fallbacks=fallbacks,
    )


def measure_prefill(model: Model, layout: PoolLayout, tokens: int, chunk: int) -> Measured:
    """One prompt of random tokens, `chunk` of them a step, all steps together."""
    width = -(-tokens // layout.block_size)
    mesh = jax.sharding.get_mesh()
    cache = Cache.empty(layout, width, None if mesh.empty else mesh)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, model.config.num_tokens, tokens).astype(np.int32)
    table = jnp.arange(width, dtype=jnp.int32)[None]
    batches = []
    for start in range(0, tokens, chunk):
        at = np.arange(start, min(start + chunk, tokens), dtype=np.int32)
        last = jnp.asarray([len(at) - 1 if start + chunk >= tokens else -1], jnp.int32)
        places = jnp.asarray(at[None])
        batches.append(
            (Batch(tokens=jnp.asarray(ids[None, at]), positions=places, block_table=table), last)
        )

    def run(held: tuple[Cache, Any]) -> tuple[Cache, Any]:
        cache, logits = held
        for batch, last in batches:
            cache, logits = prefill(model, None, cache, batch, last, logits)
        return cache, logits

    start = cache, jnp.zeros((1, model.config.vocab_size), jnp.float32)
    seconds, timeline, fallbacks = _timed(run, start, 1)
    return Measured(
        name=f"prefill {tokens}",
        seconds=seconds,
        tokens=tokens,
        bytes=0,
        flops=prefill_flops(model.config, tokens) // max(1, mesh.size),
        timeline=timeline,
        fallbacks=fallbacks,
    )


def _random_cache(layout: PoolLayout, num_blocks: int) -> Cache:
    """Pages of random bytes, the same on every device of the current mesh."""
    pool, mesh = random_pool(layout, num_blocks)[None], jax.sharding.get_mesh()
    if not mesh.empty:
        shape = (mesh.size, *pool.shape[1:])
        sharding = named_sharding(mesh, POOL_AXES, SERVE, shape)
        pool = jax.jit(partial(jnp.broadcast_to, shape=shape), out_shardings=sharding)(pool)
    return Cache(pool=pool, layout=layout)


def _distinct_experts(model: Model, cache: Cache, table: Any, case: Decode) -> int:
    """How many experts the first step's tokens meet, summed over layers."""
    moe = model.config.moe
    if case.batch == 1:
        return sum(model.config.moe_layers) * moe.experts_per_token
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 1000, (case.batch, 1)), jnp.int32)
    places = jnp.full((case.batch, 1), case.context - 1, jnp.int32)
    batch = Batch(tokens=tokens, positions=places, block_table=table)
    walk = jax.jit(lambda model, batch, cache: model.walk(batch, cache.layout, cache).choices)
    choices = np.asarray(walk(model, batch, cache))
    return sum(len(np.unique(layer)) for layer in choices)


def _timed(
    step: Callable[[Any], Any], held: Any, dispatches: int
) -> tuple[float, Timeline, tuple[str, ...]]:
    """Median seconds of a call of `step`, the timeline of a few, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = jax.block_until_ready(step(held))
    fallbacks = fallbacks_of(caught)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(dispatches):
            held = step(held)
        jax.block_until_ready(held)
        times.append((time.perf_counter() - start) / dispatches)
    kept = [held]

    def once() -> Any:
        kept[0] = step(kept[0])
        return kept[0]

    return float(np.median(times)), profiled(once, _PROFILED), fallbacks
