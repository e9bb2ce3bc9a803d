"""Rows of the benchmark: the dense products of a full-size layer on one rank, and the head."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark import CALLS, Benchmark, rotation
from pallas_kernels.cases import LINEAR, MatmulCase
from pallas_kernels.layouts.mxfp8 import GROUP, MXFP8Tensor
from pallas_kernels.scaled_matmul import Weight, scaled_matmuls
from pallas_kernels.timing import Chain

_FINITE = 0xF7  # keeps a random byte clear of E4M3's NaN
_BITS = {"mxfp8": 8 + 8 / GROUP, "bf16": 16}
_AIM_BYTES, _AIM_FLOPS = 3e12, 600e12  # a second, for few rows and for many


def random_weight(key: jax.Array, case: MatmulCase) -> Weight:
    """A weight [F, D] made of random bits in its own format."""
    if case.format == "bf16":
        return jax.random.normal(key, (case.out_dim, case.in_dim), jnp.bfloat16)
    return random_mxfp8(key, case.out_dim, case.in_dim)


def random_mxfp8(key: jax.Array, rows: int, columns: int) -> MXFP8Tensor:
    """A matrix of finite codes of all kinds, in a range of a few powers of two."""
    keys = jax.random.split(key)
    bits = jax.random.bits(keys[0], (rows, columns), jnp.uint8) & _FINITE
    powers = jax.random.randint(keys[1], (rows, columns // GROUP), 110, 117)
    codes = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return MXFP8Tensor(codes, powers.astype(jnp.uint8))


def _make(case: MatmulCase, together: int) -> Chain:
    """Every call has another layer's weights, `together` of them."""
    layers = rotation(_bytes(case, together))
    make = jax.jit(random_weight, static_argnums=1)
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), (layers, together))
    weights = [[make(key, case) for key in some] for some in keys]
    x = jax.random.normal(jax.random.key(1), (case.rows, case.in_dim), jnp.bfloat16)

    def call(_, x, weights):
        return x, scaled_matmuls(x, weights, out_dtype=jnp.bfloat16)

    return Chain(call, None, x, [weights[i % layers] for i in range(CALLS)])


def _bytes(case: MatmulCase, together: int) -> int:
    weights = together * case.out_dim * case.in_dim * _BITS[case.format] / 8
    return int(weights) + 2 * case.rows * (case.in_dim + together * case.out_dim)


def _row(name: str, case: MatmulCase) -> Benchmark:
    together = 2 if name == "gate_up" else 1
    bytes_, flops = _bytes(case, together), 2 * case.rows * case.in_dim * case.out_dim * together
    return Benchmark(
        name=f"{name} {case.rows} x {case.in_dim} -> {case.out_dim} {case.format}",
        make=partial(_make, case, together),
        bytes=bytes_,
        flops=flops,
        aim_us=max(bytes_ / _AIM_BYTES, flops / _AIM_FLOPS) * 1e6,
    )


BENCHMARKS = tuple(_row(name, case) for name, cases in LINEAR.items() for case in cases)
