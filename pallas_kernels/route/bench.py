"""Rows of the benchmark: the router of a full-size layer."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark import CALLS, Benchmark, rotation
from pallas_kernels.route import route
from pallas_kernels.timing import Chain

_EXPERTS, _COLUMNS, _CHOSEN, _SCALE = 128, 6144, 4, 2.0
_GATE_BYTES = 4 * _EXPERTS * _COLUMNS
_AIM_US = 12.0


def _make(rows: int) -> Chain:
    """Every call has another layer's gate."""
    keys = jax.random.split(jax.random.key(0), min(CALLS, rotation(_GATE_BYTES)))
    gates = [jax.random.normal(key, (_EXPERTS, _COLUMNS)) * _COLUMNS**-0.5 for key in keys]
    bias = jnp.zeros(_EXPERTS)
    x = jax.random.normal(jax.random.key(1), (rows, _COLUMNS), jnp.bfloat16)

    def call(bias, x, gate):
        return x, route(x, gate, bias, count=_CHOSEN, scale=_SCALE)

    return Chain(call, bias, x, [gates[i % len(gates)] for i in range(CALLS)])


BENCHMARKS = tuple(
    Benchmark(
        name=f"route {rows} tokens",
        make=partial(_make, rows),
        bytes=_GATE_BYTES + rows * (2 * _COLUMNS + 8 * _CHOSEN),
        flops=2 * rows * _EXPERTS * _COLUMNS,
        aim_us=_AIM_US if rows <= 128 else None,
    )
    for rows in (1, 8, 32, 128, 8192)
)
