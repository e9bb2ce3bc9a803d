"""Calls every kernel once at a small size, for a tool that watches a process:

    XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false \\
        compute-sanitizer --tool memcheck python -m tests.gpu.every_kernel
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_select import block_select
from pallas_kernels.kv_insert import kv_insert
from pallas_kernels.sparse_attention import decode, prefill
from pallas_kernels.window_attention import hopper
from tests.gpu import (
    test_block_select,
    test_grouped_matmul,
    test_kv_insert,
    test_route,
    test_scaled_matmul,
    test_sparse_attention,
    test_window_attention,
)


def _select(queries: int):
    inputs = test_block_select._inputs([700, 129], queries, 4)
    run = jax.jit(block_select, static_argnames=("top_k", "implementation"))
    return run(*inputs, top_k=16, implementation="mosaic")


def _attend(implementation: Callable, queries: int):
    return test_sparse_attention._case([700, 129], queries, 2).run(implementation)


def _window(fmt: str):
    case = test_window_attention._case([700, 129], 7, 2, fmt)
    return test_window_attention._run(case, hopper.window_attention, 1000)


def _insert():
    layout, arguments = test_kv_insert._layout(2), test_kv_insert._arguments(40, 2)
    pool = jnp.zeros((test_kv_insert.BLOCKS, layout.lines, 128), jnp.uint8)
    run = jax.jit(kv_insert, static_argnames=("layout", "implementation"))
    return run(pool, layout, jnp.int32(0), *arguments, implementation="mosaic")


def _experts(tokens: int, implementation: str):
    x, experts, weights = test_grouped_matmul._inputs(tokens)
    matrices = test_grouped_matmul._matrices()
    return test_grouped_matmul._run(x, matrices, experts, weights, implementation)


def _dense(rows: int):
    rng = np.random.default_rng(0)
    weight, _ = test_scaled_matmul._random(rng, 256, 1024)
    x = test_scaled_matmul._rows(rng, rows, 1024)
    return test_scaled_matmul._matmuls(x, [weight], implementation="mosaic")


def _route():
    arguments = test_route._inputs(9)
    return test_route._route(*arguments, count=test_route.COUNT, scale=2.0, implementation="mosaic")


CALLS: dict[str, Callable[[], object]] = {
    "block_select, 1 query": lambda: _select(1),
    "block_select, 8 queries": lambda: _select(8),
    "attend, 1 query": lambda: _attend(decode.sparse_attention, 1),
    "attend, 64 queries": lambda: _attend(prefill.sparse_attention, 64),
    "window, fp8": lambda: _window("fp8"),
    "window, bf16": lambda: _window("bf16"),
    "kv_insert": _insert,
    "experts, 3 tokens": lambda: _experts(3, "few_tokens"),
    "experts, 9 tokens": lambda: _experts(9, "mosaic"),
    "experts, 700 tokens": lambda: _experts(700, "mosaic"),
    "dense, 3 rows": lambda: _dense(3),
    "dense, 40 rows": lambda: _dense(40),
    "route": _route,
}


def main() -> None:
    """All calls, or those whose name begins with an argument."""
    for name, call in CALLS.items():
        if len(sys.argv) == 1 or name.startswith(tuple(sys.argv[1:])):
            jax.block_until_ready(call())
            print(name, flush=True)


if __name__ == "__main__":
    main()
