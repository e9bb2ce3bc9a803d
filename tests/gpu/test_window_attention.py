"""window_attention's kernel on the GPU against the reference, over pages with junk wherever no key
is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts.pages import Pages
from pallas_kernels.layouts.pool import LINE, Component
from pallas_kernels.window_attention import hopper, reference, window_attention
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu

Z, H, G = 128, 128, 16
FIRST_LINE, JUNK = 8, 0xFF  # NaN in both formats
LENGTHS = [0, 1, 127, 128, 129, 4095, 4096, 4097, 9000, -1]


def _stored(rng, fmt, count, heads):
    """Bytes [count, heads, Z, width] of moderate values."""
    if fmt == "fp8":
        return rng.integers(0, 256, (count, heads, Z, H), dtype=np.uint8) & 0xBF
    values = jnp.asarray(rng.standard_normal((count, heads, Z, H)), jnp.bfloat16)
    return np.asarray(values).view(np.uint8).reshape(count, heads, Z, 2 * H)


def _case(lengths, queries, heads, fmt, seed=0):
    """(arrays, component): blocks of each length at random places of a pool."""
    rng = np.random.default_rng(seed)
    component = Component(format=fmt, heads=heads, tokens=Z, width=H)
    counts = [max(1, -(-length // Z)) for length in lengths]
    order = rng.permutation(sum(counts) + 2)
    pool = np.full((len(order), FIRST_LINE + 2 * component.lines, LINE), JUNK, np.uint8)
    table = np.full((len(lengths), max(counts)), -1, np.int32)
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        mine, order = order[:count], order[count:]
        table[b, :count] = mine
        behind = (np.arange(count * Z) >= length).reshape(count, 1, Z, 1)
        for part in (0, 1):
            first = FIRST_LINE + part * component.lines
            rows = np.where(behind, JUNK, _stored(rng, fmt, count, heads)).astype(np.uint8)
            pool[mine, first : first + component.lines] = rows.reshape(count, -1, LINE)
    B = len(lengths)
    q = rng.standard_normal((B, queries, G * heads, H))
    own = rng.standard_normal((2, B, queries, heads, H))
    arrays = *(jnp.asarray(x, jnp.bfloat16) for x in (q, *own)), jnp.asarray(pool)
    return (*arrays, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)), component


def _run(case, implementation, window, dtype=jnp.bfloat16):
    arrays, component = case

    def attend(q, own_k, own_v, pool, table, lengths):
        lines = FIRST_LINE, FIRST_LINE + component.lines
        k, v = (Pages(pool=pool, line=jnp.int32(line), component=component) for line in lines)
        q = q.astype(dtype)
        options = {"window": window, "scale": H**-0.5}
        return implementation(q, k, v, own_k, own_v, table, lengths, **options)

    return np.asarray(jax.jit(attend)(*arrays).astype(jnp.float32))


def _assert_same(case, window):
    out = _run(case, hopper.window_attention, window)
    assert_close(out, _run(case, reference.window_attention, window, jnp.float32), "bf16")


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("heads", [1, 4])
def test_it_agrees_with_the_reference_over_ragged_batches(fmt, heads):
    _assert_same(_case(LENGTHS, 7, heads, fmt), 4096)


@pytest.mark.parametrize("queries", [1, 4, 8, 16])
@pytest.mark.parametrize("window", [100, 128, 1000])
def test_any_number_of_queries_sees_any_window(queries, window):
    _assert_same(_case([130, 1500, 64], queries, 2, "fp8"), window)


def test_a_batch_and_a_sequence_alone_give_the_same_bits():
    arrays, component = _case([5000] * 20, 7, 2, "fp8")
    out = _run((arrays, component), hopper.window_attention, 4096)
    one = (*(x[:1] for x in arrays[:3]), arrays[3], *(x[:1] for x in arrays[4:]))
    assert_close(_run((one, component), hopper.window_attention, 4096), out[:1], "exact")


def test_the_kernel_is_what_the_op_runs_on_this_device():
    case = _case([700], 7, 1, "fp8")
    fast = _run(case, hopper.window_attention, 4096)
    assert_close(_run(case, window_attention, 4096), fast, "exact")
