"""The cuts found bit by bit are those of sorting, ties included; and nothing sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.sampling import SamplingParams, SamplingState, cuts, draw, probabilities, sample
from minimax_jax.sampling.cuts import within_top_k, within_top_p

V = 3000
TOP_K, TOP_P = jax.jit(within_top_k), jax.jit(within_top_p)


def rows() -> np.ndarray:
    """Smooth, with many ties, with a few values only, flat, and mostly -inf; greatest 0."""
    rng = np.random.default_rng(0)
    smooth = rng.normal(size=(3, V)) * 3
    few = rng.integers(-4, 0, size=(2, V)) / 2
    sparse = np.where(rng.random((1, V)) < 0.01, rng.normal(size=(1, V)), -np.inf)
    found = np.concatenate([smooth, np.round(smooth, 1), few, np.zeros((1, V)), sparse])
    return (found - found.max(1, keepdims=True)).astype(np.float32)


def by_sorting(row: np.ndarray, count: int) -> np.ndarray:
    kept = np.zeros(V, bool)
    kept[np.argsort(-row, kind="stable")[:count]] = True
    return kept


@pytest.mark.parametrize("k", [0, 1, 2, 7, 50, 1024, V - 1, V, V + 5])
def test_top_k_is_that_of_sorting(k):
    x = rows()
    found = np.asarray(TOP_K(x, jnp.full(len(x), k)))
    wanted = np.stack([by_sorting(row, k or V) for row in x])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0])
def test_top_p_is_that_of_sorting(p):
    """Up to tokens at the edge, where float32 sums round: else it is float64's size."""
    x = rows()
    found = np.asarray(TOP_P(x, jnp.full(len(x), p)))
    for row, kept in zip(x.astype(np.float64), found, strict=True):
        if p == 1:
            assert kept.all()
            continue
        mass = np.sort(np.exp(row))[::-1]
        reached = np.cumsum(mass) / mass.sum()
        least, most = (np.searchsorted(reached, np.float32(p) + d) + 1 for d in (-2e-6, 2e-6))
        assert least <= kept.sum() <= most
        np.testing.assert_array_equal(kept, by_sorting(row, kept.sum()))


def test_a_rows_cut_does_not_depend_on_the_others():
    x, p = rows(), jnp.linspace(0.05, 1, len(rows()))
    together = np.asarray(TOP_P(x, p))
    for row in range(len(x)):
        np.testing.assert_array_equal(TOP_P(x[row : row + 1], p[row : row + 1])[0], together[row])


@pytest.mark.parametrize("p", [0.0, 0.3, 0.95, 0.9999])
def test_an_edge_is_the_same_by_fewer_passes_without_a_loop(p):
    """As a GPU finds it."""
    keys, weights = cuts._ordered(jnp.asarray(rows())), jnp.exp(rows())
    wanted = jnp.float32(p) * jnp.sum(weights, axis=-1)
    found = [
        cuts._searched(keys, weights, wanted, bits=32, at_once=at_once, unrolled=unrolled)
        for at_once, unrolled in ((2, False), (4, True))
    ]
    np.testing.assert_array_equal(*found)


def test_minus_zero_and_zero_are_equal():
    x = jnp.array([[-0.0, 0.0, -1.0]])
    assert np.asarray(TOP_K(x, jnp.array([1])))[0].tolist() == [True, False, False]


def test_nan_rows_end():
    """Whatever is kept of them: the sequence ends as broken."""
    x = jnp.full((1, 50), jnp.nan)
    assert TOP_K(x, jnp.array([3])).shape == TOP_P(x, jnp.array([0.5])).shape == (1, 50)


def primitives(jaxpr) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for part in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(part, "jaxpr", part)
            found |= primitives(inner) if hasattr(inner, "eqns") else set()
    return found


def test_sampling_sorts_nothing():
    state = SamplingState.of([SamplingParams(top_k=40, top_p=0.9, min_p=0.1)] * 2)
    args = jnp.zeros((2, V)), state, jnp.arange(2)
    used = primitives(jax.make_jaxpr(sample)(*args).jaxpr)
    assert not used & {"sort", "top_k", "approx_top_k"}


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 5000])
def test_draws_pass_the_same_share_as_a_whole_cumulative_sum(size):
    rng = np.random.default_rng(size)
    weights = rng.random((64, size)) * (rng.random((64, size)) < 0.3)
    weights[:, -1] += 1e-3
    uniforms = rng.random(64)
    found = np.asarray(draw(jnp.asarray(weights, jnp.float32), jnp.asarray(uniforms, jnp.float32)))
    reached = np.cumsum(weights, 1) / weights.sum(1, keepdims=True)
    for row, token in enumerate(found):
        assert weights[row, token] > 0
        before = reached[row, token - 1] if token else 0.0
        assert before - 1e-6 <= uniforms[row] <= reached[row, token] + 1e-6


def test_a_uniform_at_the_end_draws_the_last_id_with_weight():
    weights = jnp.zeros((1, 2000)).at[0, jnp.array([3, 700])].set(0.1)
    assert int(draw(weights, jnp.array([np.float32(1 - 2**-24)]))[0]) == 700
    assert int(draw(weights, jnp.array([0.0]))[0]) == 3


def test_probabilities_keep_what_the_cuts_keep():
    x = jnp.asarray(rows())
    state = SamplingState.of([SamplingParams(top_k=60, top_p=0.8)] * len(x))
    kept = np.asarray(probabilities(x, state)) > 0
    assert (kept.sum(1) <= 60).all() and kept.any(1).all()
