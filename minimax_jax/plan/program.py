"""A step's program for a mesh of fake devices at full width, as the compiler partitions it.

Nothing is computed and no weight exists: parameters, pages and batch are shapes with shardings. The
text is the one right after partitioning, before a backend rewrites types or collectives.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Lowered

from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.parts import check
from minimax_jax.batch import Batch
from minimax_jax.cache import POOL_AXES, Cache, formats_of, local_heads, pool_layout
from minimax_jax.checkpoint import abstract_model, parameters_of
from minimax_jax.model import Model
from minimax_jax.quantize import Format, form_in, is_router, to_form
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, decode, prefill
from pallas_kernels.layouts.pool import LINE, PoolLayout
from sharding.apply import named_sharding
from sharding.mesh import make_mesh
from sharding.rules import SERVE, Rules, with_parallel

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
DTYPE = jnp.bfloat16  # of activations
Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a model on a mesh: `batch` sequences on each data rank, `tokens` of each."""

    config: ModelConfig
    parallel: ParallelConfig
    phase: Phase
    batch: int
    tokens: int
    context: int  # tokens that the block table of a sequence has room for
    weights: Format = "m3.1"
    layers: int = 2  # that are compiled, all of the last layer's kind

    def __post_init__(self) -> None:
        check(self.phase in PHASES, f"phase={self.phase!r} is not one of {', '.join(PHASES)}")
        for name in ("batch", "tokens", "layers"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} is not at least 1")
        check(
            self.phase == "prefill" or self.tokens == 1,
            f"tokens={self.tokens}, but a decode step runs one token of each sequence",
        )
        check(
            self.context >= self.tokens,
            f"context={self.context} has no room for tokens={self.tokens}",
        )

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of one data rank."""
        return self.batch * self.tokens

    @property
    def few_layers(self) -> ModelConfig:
        """The config of what is compiled: no drafter, and a few layers of the last one's kind."""
        sparse, moe = self.config.sparse_layers[-1:], self.config.moe_layers[-1:]
        layers = {"sparse_layers": sparse * self.layers, "moe_layers": moe * self.layers}
        return replace(self.config, drafter=None, **layers)


def partitioned(step: Step) -> str:
    """The HLO text of the step after partitioning. ValueError if there are too few devices, or the
    mesh does not divide the model.
    """
    mesh = make_mesh(step.parallel)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder, _uncached():
        # Codegen is of no interest, but nothing between partitioning and it can be asked for.
        options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
        _lowered(step, mesh).compile(compiler_options=options)
        found = list(Path(folder).glob("*after_spmd-partitioning*.txt"))
        assert len(found) == 1, found
        return found[0].read_text("utf-8")


@contextmanager
def _uncached() -> Iterator[None]:
    """Keeps what is compiled out of JAX's cache on disk: a program from there leaves no text."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _lowered(step: Step, mesh: Mesh) -> Lowered:
    config, rules = step.few_layers, with_parallel(SERVE, step.parallel)
    model = sharded_shapes(config, step.weights, mesh, rules)
    layout = layout_of(step.few_layers, mesh, rules.page_ranks)
    blocks, B = -(-step.context // layout.block_size), step.batch * step.parallel.dp
    rows = -(-step.batch * blocks // rules.page_ranks)
    shape = (mesh.size, rows, layout.lines, LINE)
    pool = Shape(shape, jnp.uint8, sharding=named_sharding(mesh, POOL_AXES, SERVE, shape))
    table, places = Shape((B, blocks), jnp.int32), Shape((B,), jnp.int32)
    logits = Shape((B, config.vocab_size), jnp.float32)
    if step.phase == "prefill":
        tokens = Shape((B, step.tokens), jnp.int32)
        run = jax.jit(partial(_prefill, layout))
        return run.lower(model, pool, tokens, table, places, logits)
    return jax.jit(partial(_decode, layout)).lower(model, pool, table, places, logits)


# Batches, states and caches check what they are made of, so they are made of tracers.
def _prefill(layout: PoolLayout, model: Model, pool, tokens, table, last, logits):
    batch = Batch(tokens=tokens, positions=tokens, block_table=table)
    return prefill(model, None, _cache(model, pool, layout), batch, last, logits)


def _decode(layout: PoolLayout, model: Model, pool, table, positions, logits):
    running = positions >= 0
    state = DecodeState(logits=logits, positions=positions, limits=positions, running=running)
    sampling = SamplingState.of([SamplingParams(temperature=0.0)] * len(positions))
    cache = _cache(model, pool, layout)
    return decode(model, None, cache, table, state, sampling, DecodeOptions(steps=1))


def _cache(model: Model, pool, layout: PoolLayout) -> Cache:
    return Cache(pool=pool, layout=layout, page_ranks=model.rules.page_ranks)


def layout_of(config: ModelConfig, mesh: Mesh | AbstractMesh, page_ranks: int) -> PoolLayout:
    """The pages of a rank, in the formats that the checkpoint names."""
    heads = local_heads(config, mesh, page_ranks)
    return pool_layout(config, formats_of(config, "bf16"), heads)


def sharded_shapes(config: ModelConfig, weights: Format, mesh: Mesh, rules: Rules) -> Model:
    """A model whose parameters are shapes with shardings, stored in a format."""
    model = abstract_model(config, DTYPE)
    for path, parameter in parameters_of(model).items():
        dtype = jnp.float32 if is_router(path) else DTYPE
        plain = Shape(parameter.get_value().shape, dtype)
        stored = jax.eval_shape(lambda w, path=path: to_form(w, form_in(path, weights)), plain)
        leaves, tree = jax.tree.flatten(stored)
        axes = [parameter.axes[: leaf.ndim] for leaf in leaves]
        shardings = [
            named_sharding(mesh, some, rules, leaf.shape)
            for leaf, some in zip(leaves, axes, strict=True)
        ]
        placed = [
            Shape(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        parameter.set_value(jax.tree.unflatten(tree, placed))
    model.rules = rules
    return model
