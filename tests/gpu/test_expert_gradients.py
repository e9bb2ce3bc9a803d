"""Gradients through routed experts on a GPU against the reference's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import Activation, grouped_matmul, mixture, mosaic, reference
from tests.gpu.test_grouped_matmul import D, E, F, X, _matrices, _pages
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu
SIZES = {  # of the 16 experts
    "even": [40] * 16,
    "odd": [0, 1, 7, 8, 9, 64, 65, 127, 128, 129, 255, 257, 0, 3, 500, 0],
    "one": [0] * 5 + [900] + [0] * 10,
    "few": [0, 0, 1] + [0] * 13,
}


@pytest.mark.parametrize("rest", [0, 19])  # rows beyond the last group
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_any_groups(sizes, rest):
    sizes = np.array(SIZES[sizes])
    rows, pages = sizes.sum() + rest, _pages(F, D, 0)
    gradient = jax.random.normal(jax.random.key(1), (rows, F))
    run = jax.jit(mosaic._gradient_of_rows, static_argnums=3)
    found = run(gradient, pages, jnp.asarray(sizes), jnp.bfloat16)
    exact = jax.jit(reference.gradient_of_rows, static_argnums=3)
    expected = exact(
        gradient.astype(jnp.bfloat16).astype(jnp.float32), pages, jnp.asarray(sizes), jnp.float32
    )
    assert found.dtype == jnp.bfloat16
    assert_close(np.asarray(found, np.float32), np.asarray(expected), "bf16")
    assert not np.asarray(found[sizes.sum() :], np.float32).any()


@pytest.mark.parametrize("tokens", [1, 8, 33, 700])
def test_the_mixtures_gradients(tokens):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, D)), jnp.bfloat16)
    experts = jnp.asarray([rng.choice(E + 1, X, replace=False) for _ in range(tokens)], jnp.int32)
    weights, matrices = jnp.asarray(rng.random((tokens, X)), jnp.float32), _matrices()
    upstream = jnp.asarray(rng.standard_normal((tokens, D)), jnp.float32)

    def loss(x, weights, implementation):
        how = {"implementation": implementation}
        return jnp.sum(mixture(x, matrices, experts, weights, Activation(), **how) * upstream)

    run = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    expected = run(x.astype(jnp.float32), weights, "reference")
    for implementation in ("mosaic", "few_tokens")[: 2 if tokens <= 8 else 1]:
        found = run(x, weights, implementation)
        for one, other in zip(found, expected, strict=True):
            assert_close(np.asarray(one, np.float32), np.asarray(other), "bf16")


def test_results_of_more_than_a_gibibyte_come_in_parts(monkeypatch):
    pages, sizes = _pages(F, D, 0), jnp.asarray(SIZES["odd"])
    x = jax.random.normal(jax.random.key(2), (int(sizes.sum()) + 5, D), jnp.bfloat16)
    run = lambda: grouped_matmul(x, pages, sizes, out_dtype=jnp.float32)  # noqa: E731
    whole = run()
    monkeypatch.setattr(mosaic, "_LARGEST_OUTPUT", 300 * F * 4)
    assert_close(run()[: sizes.sum()], whole[: sizes.sum()], "exact")
