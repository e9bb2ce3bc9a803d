"""One verification by hand: which drafts are kept, what follows, and what changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.sampling import SamplingParams, SamplingState, sample
from minimax_jax.speculation import Uniforms, distribution
from tests.speculation.tables import jitted_verify, verify

P = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0]]
Q = [[0.2, 0.6, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]]


def verdict(tokens, accept, token=0.0, width=2, p=P, q=Q):
    """(accepted, token) of one sequence with two drafts."""
    uniforms = Uniforms(accept=jnp.array([[*accept, 0.0]]), token=jnp.full((1, 3), token))
    arrays = map(jnp.array, (p, [0], [tokens], [q], [width]))
    found = jitted_verify(*arrays, uniforms)
    return int(found.accepted[0]), int(found.token[0])


def test_a_draft_is_kept_below_p_over_q():
    # p / q of token 1 is a half, of token 2 in the second row 1.5
    assert verdict([1, 2], (0.49, 0.99))[0] == 2
    assert verdict([1, 2], (0.51, 0.0))[0] == 0


def test_a_draft_that_the_target_cut_is_never_kept():
    assert verdict([3, 0], (0.0, 0.0)) == (0, 0)


def test_nothing_after_a_rejection_counts():
    assert verdict([1, 2], (0.9, 0.0))[0] == 0
    assert verdict([0, 0], (0.9, 0.9))[0] == 1  # second row: p / q = 1/4


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.74, 0), (0.76, 2), (0.999, 2)])
def test_a_rejection_draws_from_what_q_does_not_cover(uniform, token):
    # max(p - q, 0) = [0.3, 0, 0.1, 0]: shares 3/4 and 1/4
    assert verdict([1, 2], (0.9, 0.0), uniform) == (0, token)


@pytest.mark.parametrize(("uniform", "token"), [(0.24, 0), (0.26, 1), (0.51, 2), (0.999, 2)])
def test_where_all_are_kept_one_more_comes_from_the_last_row(uniform, token):
    assert verdict([0, 2], (0.0, 0.0), uniform) == (2, token)


@pytest.mark.parametrize(("uniform", "token"), [(0.49, 0), (0.51, 1), (0.81, 2)])
def test_drafts_that_are_not_tested_do_not_matter(uniform, token):
    """Width 0 is plain decoding; and at width 1 the token after a kept draft is from p."""
    assert verdict([1, 2], (0.9, 0.9), uniform, width=0) == (0, token)
    assert verdict([0, 2], (0.0, 0.9), 0.95, width=1) == (1, 3)
    assert verdict([0, 2], (0.0, 0.9), 0.05, width=1) == (1, 0)


def test_equal_distributions_keep_everything():
    assert verdict([1, 2], (0.999999, 0.999999), q=P[:2])[0] == 2


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_drafter_changes_nothing(broken):
    """Its draft is rejected, and the token is drawn from p as if there had been none."""
    q = np.full((2, 4), broken).tolist()
    for uniform in (0.1, 0.6, 0.9):
        with_drafts = verdict([1, 2], (0.0, 0.0), uniform, q=q)
        assert with_drafts == verdict([1, 2], (0.0, 0.0), uniform, width=0)


def test_at_temperature_0_a_draft_is_kept_if_it_is_the_argmax():
    """F104: greedy speculation is exact."""
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 5.0], [2.0, 0.0, 0.0, 0.0]])
    state = SamplingState.of([SamplingParams(temperature=0.0)] * 3)
    p = distribution(logits, state)
    assert p.tolist() == np.eye(4)[[1, 3, 0]].tolist()  # the lower of equal ids
    q = distribution(logits[:2], jax.tree.map(lambda x: x[:2], state))
    for uniform in (0.0, 0.5, 0.999):
        both = {"token": uniform, "p": p, "q": q}
        assert verdict([1, 3], (uniform, uniform), **both) == (2, 0)
        other = np.eye(4)[[1, 2]]
        assert verdict([1, 2], (uniform, uniform), token=uniform, p=p, q=other) == (1, 3)
        assert verdict([2, 3], (uniform, uniform), token=uniform, p=p, q=np.eye(4)[[2, 3]]) == (
            0,
            1,
        )


def test_without_drafts_the_token_is_that_of_plain_sampling():
    count = 500
    logits = jax.random.normal(jax.random.key(0), (count, 8))
    params = [SamplingParams(seed=i, temperature=t) for i in range(250) for t in (0.0, 1.3)]
    state, anchors = SamplingState.of(params), jnp.arange(count) * 3
    found = verify(
        distribution(logits, state),
        jnp.arange(count),
        jnp.zeros((count, 7), int),
        jnp.full((count, 7, 8), 1 / 8),
        jnp.zeros(count, int),
        Uniforms.of(state, anchors, 7),
    )
    np.testing.assert_array_equal(found.token, sample(logits, state, anchors + 1))


def test_sequences_do_not_touch_each_other():
    """A batch of three with their rows in one flat list, against each alone."""
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(6), size) for size in (9, (3, 3)))
    tokens, widths = rng.integers(0, 6, (3, 3)), np.array([3, 0, 1])
    first, uniforms = np.array([0, 4, 5]), rng.random((2, 3, 4))

    def run(rows):
        accept, token = (jnp.asarray(u[rows], jnp.float32) for u in uniforms)
        found = verify(
            jnp.asarray(p, jnp.float32),
            jnp.asarray(first[rows]),
            jnp.asarray(tokens[rows]),
            jnp.asarray(q[rows], jnp.float32),
            jnp.asarray(widths[rows]),
            Uniforms(accept=accept, token=token),
        )
        return np.stack([found.accepted, found.token], 1).tolist()

    together = run(np.arange(3))
    assert together == [run(np.array([i]))[0] for i in range(3)]


def test_streams_differ_by_purpose_position_and_seed():
    state = SamplingState.of([SamplingParams(seed=s) for s in (1, 2)])
    one = Uniforms.of(state, jnp.array([10, 10]), 7)
    drawn = np.concatenate([np.ravel(one.accept), np.ravel(one.token)])
    assert len(np.unique(drawn)) == 32
    later = Uniforms.of(state, jnp.array([13, 13]), 7)
    np.testing.assert_array_equal(later.accept[:, :5], one.accept[:, 3:])
