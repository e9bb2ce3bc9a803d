"""Times of a model's own steps: decode at some batch and context, prefill of one prompt.

The steps are those of `generate` and of the server, compiled once; each is dispatched several times
without waiting, so that the device never waits for the host unless it is the slower one. What a
step hands to the next one stays where it lies on the mesh.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from minimax_jax.batch import Batch
from minimax_jax.bench.calls import num_calls, steady, timed
from minimax_jax.bench.work import decode_bytes, prefill_flops
from minimax_jax.cache import POOL_AXES, Cache
from minimax_jax.model import Model
from minimax_jax.moe import MoE
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.shards import by_row
from minimax_jax.steps import DecodeOptions, DecodeState, decode, prefill
from pallas_kernels.benchmark import random_pool, random_tables
from pallas_kernels.device_timeline import Timeline
from pallas_kernels.layouts.pool import LINE, PoolLayout
from sharding.apply import named_sharding
from sharding.axes import DATA
from sharding.rules import SERVE


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
    tokens: int | float  # of a step
    bytes: int  # that a step cannot avoid reading; 0 where FLOP are the limit
    flops: int
    timeline: Timeline
    fallbacks: tuple[str, ...]  # what dispatch says of ops that have no kernel here
    first_call: float | None = None  # seconds: what compiling took, and one step

    @property
    def tokens_a_second(self) -> float:
        """Of all sequences together."""
        return self.tokens / self.seconds


def measure_decode(model: Model, layout: PoolLayout, case: Decode) -> Measured:
    """Decode steps, greedy, on pages of random bytes."""
    batch, total = case.batch, case.context + case.steps * num_calls(case.dispatches)
    table, blocks = tables(batch, -(-total // layout.block_size))
    rng = np.random.default_rng(0)
    state = DecodeState(
        logits=jnp.asarray(rng.standard_normal((batch, model.config.vocab_size)), jnp.float32),
        positions=jnp.full(batch, case.context, jnp.int32),
        limits=jnp.full(batch, total, jnp.int32),
        running=jnp.ones(batch, bool),
    )
    sampling = SamplingState.of([SamplingParams(temperature=0.0)] * batch)
    options = DecodeOptions(steps=case.steps)

    def step(held, model, table, sampling):
        *held, generated = decode(model, None, held[0], table, held[1], sampling, options)
        return tuple(held), generated

    held = random_cache(layout, blocks), on_mesh(state, "batch", "vocab")
    program = steady(step, held, model, *on_mesh((table, sampling)))
    took = timed(program, held, case.dispatches)
    del held
    distinct = distinct_experts(model, batch)
    return Measured(
        name=f"decode {batch} x {case.context}",
        seconds=took.seconds / case.steps,
        tokens=batch,
        bytes=decode_bytes(model, layout, on_a_rank(batch), case.context, distinct),
        flops=0,
        timeline=took.timeline,
        fallbacks=took.fallbacks,
        first_call=took.first_call,
    )


def measure_prefill(model: Model, layout: PoolLayout, tokens: int, chunk: int) -> Measured:
    """One prompt of random tokens, `chunk` of them a step, all steps together."""
    width, mesh = -(-tokens // layout.block_size), jax.sharding.get_mesh()
    ids = np.random.default_rng(1).integers(0, model.config.num_tokens, tokens).astype(np.int32)
    table = jnp.arange(width, dtype=jnp.int32)[None]
    batches = []
    for start in range(0, tokens, chunk):
        at = np.arange(start, min(start + chunk, tokens), dtype=np.int32)
        last = jnp.asarray([len(at) - 1 if start + chunk >= tokens else -1], jnp.int32)
        places = jnp.asarray(at[None])
        batch = Batch(tokens=jnp.asarray(ids[None, at]), positions=places, block_table=table)
        batches.append(on_mesh((batch, last)))

    def step(held, model, batch, last):
        return prefill(model, None, held[0], batch, last, held[1]), None

    logits = jnp.zeros((1, model.config.vocab_size), jnp.float32)
    held = Cache.empty(layout, width, mesh), on_mesh(logits, "batch", "vocab")
    program = steady(step, held, model)

    def run(held: Any) -> Any:
        for batch, last in batches:
            held = program(held, batch, last)
        return held

    took = timed(run, held, 1)
    return Measured(
        name=f"prefill {tokens}",
        seconds=took.seconds,
        tokens=tokens,
        bytes=0,
        flops=prefill_flops(model.config, tokens) // mesh.size,
        timeline=took.timeline,
        fallbacks=took.fallbacks,
        first_call=took.first_call,
    )


def tables(batch: int, width: int) -> tuple[Int[Array, "B P"], int]:
    """Scattered blocks of B sequences, and how many blocks a rank has: ids are counted within a
    data rank.
    """
    own = on_a_rank(batch)
    table = random_tables(own, width)
    return jnp.tile(table, (batch // own, 1)), own * width


def on_a_rank(batch: int) -> int:
    """Of so many sequences, those of one data rank."""
    data_ranks = jax.sharding.get_mesh().shape[DATA]
    return batch if batch % data_ranks else batch // data_ranks


def random_cache(layout: PoolLayout, num_blocks: int) -> Cache:
    """Pages of random bytes, the same on every device of the current mesh."""
    mesh = jax.sharding.get_mesh()
    shape = (mesh.size, num_blocks, layout.lines, LINE)
    sharding = named_sharding(mesh, POOL_AXES, SERVE, shape)

    def make() -> Array:
        return jnp.broadcast_to(random_pool(layout, num_blocks), shape)

    return Cache(pool=jax.jit(make, out_shardings=sharding)(), layout=layout)


def on_mesh(tree: Any, *axes: str | None) -> Any:
    """Arrays with these logical axes, or the first of them, on the current mesh. What is not there
    is sent to its devices at every call.
    """
    mesh = jax.sharding.get_mesh()

    def placed(x: Array) -> Array:
        own = (*axes, *[None] * x.ndim)[: x.ndim]
        return jax.device_put(x, named_sharding(mesh, own, SERVE, x.shape))

    return jax.tree.map(placed, tree)


def distinct_experts(model: Model, tokens: int) -> int:
    """How many experts so many tokens meet at once, summed over layers: random rows, of which each
    layer's own router is asked. To run all layers for it would be a second program of them.
    """
    config, rules = model.config, model.rules
    if tokens == 1:
        return sum(config.moe_layers) * config.moe.experts_per_token
    x = jax.random.normal(jax.random.key(2), (tokens, 1, config.hidden_size), model.dtype)
    chosen = jax.jit(lambda router, x: by_row(router, x, rules)[0])
    layers = (layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE))
    return sum(len(np.unique(np.asarray(chosen(one.router, x)))) for one in layers)
