"""Rows of the benchmark: routed experts of the full model on one rank, without router and shared
expert, from tokens and their groups to weighted sums; with the grouping, which is always within
what few tokens take; and for these with the shared expert.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import Benchmark
from pallas_kernels.cases import MOE, MoECase
from pallas_kernels.grouped_matmul import Activation, Matrices, grouping, mosaic
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.layouts.nvfp4_pages import CODE_BYTES, COLUMNS, LINE, LINES, ROWS, NVFP4Pages
from pallas_kernels.scaled_matmul.bench import random_mxfp8
from pallas_kernels.timing import Chain

_CALLS = {1: 24, 8: 15, 32: 9, 128: 6}  # by tokens: every call has a routing of its own
_AIMS = {1: 48.0, 8: 265.0, 32: 765.0, 128: 1140.0, 512: 1450.0, 4096: 3500.0, 16384: 11800.0}
_NAN = 0x7F  # of a scale


def _routings(case: MoECase) -> list[np.ndarray]:
    """Expert ids [T, X] of each call; those of single tokens are all different."""
    calls = _CALLS.get(case.tokens, 6 if case.tokens <= 1024 else 3)
    shape = (case.tokens, case.choices)
    if case.skewed:
        ids = [np.arange(n * case.choices, (n + 1) * case.choices) for n in range(calls)]
        return [np.broadcast_to(one % case.experts, shape) for one in ids]
    if case.tokens == 1:
        ids = np.random.default_rng(5).permutation(case.experts)
        return [one[None] for one in ids[: calls * case.choices].reshape(calls, -1)]
    rng = np.random.default_rng(case.tokens)
    order = rng.random((calls, case.tokens, case.experts)).argsort(-1)
    return list(order[..., : case.choices])


def _pages(seed: int, experts: int, rows: int, columns: int) -> NVFP4Pages:
    """Random codes, and scales of every finite positive kind."""
    shape = (experts, rows // ROWS, columns // COLUMNS)

    @jax.jit
    def make(key):
        found = jax.random.bits(key, (*shape, LINES * LINE), jnp.uint8)
        scales = found[..., CODE_BYTES:] % _NAN
        pages = jnp.concatenate([found[..., :CODE_BYTES], scales], -1)
        return pages.reshape(*shape, LINES, LINE)

    pages = make(jax.random.key(seed, impl="unsafe_rbg"))
    return NVFP4Pages(pages, jnp.full(experts, 1e-4, jnp.float32))


@cache
def _matrices(E: int, D: int, F: int) -> Matrices:
    """The same for every row of the table: they take 4 GB."""
    return Matrices(*(_pages(i, E, *shape) for i, shape in enumerate(((F, D), (F, D), (D, F)))))


@cache
def _shared(D: int, F: int) -> list[Matrices]:
    """Two shared experts, for calls to take in turn."""
    keys = jax.random.split(jax.random.key(3, impl="unsafe_rbg"), (2, 3))
    shapes = ((F, D), (F, D), (D, F))
    make = jax.jit(random_mxfp8, static_argnums=(1, 2))
    return [Matrices(*(make(k, *s) for k, s in zip(some, shapes, strict=True))) for some in keys]


def _few_chain(case: MoECase, with_shared: bool) -> Chain:
    """Few tokens, whose groups the kernels find."""
    T, X, D, F = case.tokens, case.choices, case.width, case.expert_width
    x = jax.random.normal(jax.random.key(9), (T, D), jnp.bfloat16)
    weights = jnp.full((T, X), 1 / X, jnp.float32)
    routings = [jnp.asarray(one, jnp.int32) for one in _routings(case)]
    shared = _shared(D, F) if with_shared else [None]

    def call(matrices, x, operands):
        routing, shared = operands
        return x, mosaic.few_tokens(x, matrices, routing, weights, Activation(), shared)

    operands = [(one, shared[i % len(shared)]) for i, one in enumerate(routings)]
    return Chain(call, _matrices(case.experts, D, F), x, operands)


def _chain(case: MoECase, with_grouping: bool) -> Chain:
    D = case.width
    matrices = _matrices(case.experts, D, case.expert_width)
    x = jax.random.normal(jax.random.key(9), (case.tokens, D), jnp.bfloat16)
    weights = jnp.full((case.tokens, case.choices), 1 / case.choices, jnp.float32)
    routings = [jnp.asarray(one, jnp.int32) for one in _routings(case)]
    group = jax.jit(partial(grouping.make, num_experts=case.experts))

    def call(matrices, x, routing):
        groups = grouping.make(routing, case.experts) if with_grouping else routing
        return x, mosaic.mixture_of(x, matrices, groups, weights, Activation())

    operands = routings if with_grouping else [group(one) for one in routings]
    return Chain(call, matrices, x, operands)


def _row(case: MoECase, with_grouping: bool = False, with_shared: bool = False) -> Benchmark:
    D, F, T, X = case.width, case.expert_width, case.tokens, case.choices
    experts = np.mean([len(np.unique(one)) for one in _routings(case)])
    kind = "all to 4 experts" if case.skewed else "uniform"
    kind += ", with grouping" if with_grouping else ""
    kind += ", with the shared expert" if with_shared else ""
    few, shared_bytes = T <= EIGHT, 3 * D * F * 33 // 32 if with_shared else 0
    return Benchmark(
        name=f"moe {T} tokens, {kind}",
        make=partial(_few_chain, case, with_shared)
        if few
        else partial(_chain, case, with_grouping),
        bytes=int(experts * 3 * D * F * 9 / 16) + shared_bytes + 2 * T * D * 2,
        flops=2 * T * (X + with_shared) * 3 * D * F,
        aim_us=None if case.skewed or with_grouping or with_shared else _AIMS[T],
    )


BENCHMARKS = (
    *(_row(case) for case in MOE.values()),
    *(_row(MOE[name], with_grouping=True) for name in ("full_128", "full_4096")),
    *(_row(MOE[name], with_shared=True) for name in ("full_1", "full_8")),
)
