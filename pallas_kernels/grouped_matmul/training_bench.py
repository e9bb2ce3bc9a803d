"""Rows of the benchmark that training is made of: the gradient of routed experts, and the experts
with an adapter on each matrix, of which one is shared (the products of `minimax_jax.lora`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark import Benchmark
from pallas_kernels.cases import MOE, MoECase
from pallas_kernels.grouped_matmul import Activation, by_parts, mosaic, reference
from pallas_kernels.grouped_matmul.bench import _matrices, _routings
from pallas_kernels.timing import Chain

_RANK = 32


def _gradient_chain(case: MoECase) -> Chain:
    """What the layer before gets, of tokens and of their mixing weights. The products of the
    forward pass are computed again for it.
    """
    x = jax.random.normal(jax.random.key(9), (case.tokens, case.width), jnp.bfloat16)
    weights = jnp.full((case.tokens, case.choices), 1 / case.choices, jnp.float32)

    def call(matrices, x, routing):
        def experts(x, weights):
            return mosaic.mixture(x, matrices, routing, weights, Activation(), None)

        return x, jax.vjp(experts, x, weights)[1](x)

    return Chain(call, _matrices_of(case), x, _ids(case))


def _adapted_chain(case: MoECase) -> Chain:
    E, D, F = case.experts, case.width, case.expert_width
    shapes = {"gate": ((1, D), (E, F)), "up": ((1, D), (E, F)), "down": ((E, F), (1, D))}
    keys = jax.random.split(jax.random.key(3), 3)
    low = {name: _low_rank(key, *shapes[name]) for name, key in zip(shapes, keys, strict=True)}
    x = jax.random.normal(jax.random.key(9), (case.tokens, D), jnp.bfloat16)
    weights = jnp.full((case.tokens, case.choices), 1 / case.choices, jnp.float32)

    def call(constants, x, routing):
        matrices, low = constants

        def linear(name, rows, sizes):
            a, b = low[name]
            y = mosaic.grouped_matmul(rows, getattr(matrices, name), sizes, out_dtype=jnp.float32)
            return y + _by_expert(_by_expert(rows.astype(jnp.float32), a, sizes), b, sizes)

        return x, by_parts.mixture_by(linear, x, E, routing, weights, Activation())

    return Chain(call, (_matrices_of(case), low), x, _ids(case))


def _low_rank(key, into: tuple[int, int], out: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    a, b = jax.random.split(key)
    of_a = jax.random.normal(a, (into[0], _RANK, into[1])) * into[1] ** -0.5
    return of_a, jax.random.normal(b, (*out, _RANK)) * _RANK**-0.5


def _by_expert(x, matrices, sizes):
    if len(matrices) > 1:
        return reference.grouped_matmul(x, matrices, sizes, out_dtype=jnp.float32)
    return jnp.einsum("MD,FD->MF", x, matrices[0], precision="highest")


def _matrices_of(case: MoECase):
    return _matrices(case.experts, case.width, case.expert_width)


def _ids(case: MoECase) -> list[jax.Array]:
    return [jnp.asarray(one, jnp.int32) for one in _routings(case)]


def _row(case: MoECase, kind: str, make, passes: int) -> Benchmark:
    D, F, T, X = case.width, case.expert_width, case.tokens, case.choices
    return Benchmark(
        name=f"moe {T} tokens, {kind}",
        make=partial(make, case),
        bytes=case.experts * 3 * D * F * 9 // 16 + 2 * T * D * 2,
        flops=passes * 2 * T * X * 3 * D * F,
    )


BENCHMARKS = (
    _row(MOE["full_4096"], "gradient", _gradient_chain, passes=2),
    _row(MOE["full_4096"], "with an adapter", _adapted_chain, passes=1),
)
