"""Losses, corrections and divergences against hand numbers, and what must not reach a gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.aggregation import AGGREGATIONS
from rl.corrections import CORRECTIONS, Tokens
from rl.losses import DIVERGENCES, LossRule, policy_losses

RULE = LossRule(
    kind="reinforce",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    correction="token_tis",
    correction_low=0.0,
    correction_high=2.0,
)
LOG2 = float(np.log(2.0))


def tokens(logprobs, rollout, advantages, mask=None, sequences=None):
    logprobs = jnp.asarray(logprobs, jnp.float32)
    ones, zeros = jnp.ones_like(logprobs), jnp.zeros(logprobs.shape, jnp.int32)
    return Tokens.of(
        logprobs,
        jnp.asarray(rollout, jnp.float32),
        jnp.asarray(advantages, jnp.float32),
        ones if mask is None else jnp.asarray(mask, jnp.float32),
        zeros if sequences is None else jnp.asarray(sequences, jnp.int32),
    )


def gradient(rule, rollout, advantages, logprobs, **more):
    def total(lp):
        return jnp.sum(policy_losses(tokens(lp, rollout, advantages, **more), rule).losses)

    return jax.grad(total)(jnp.asarray(logprobs, jnp.float32))


def test_tis_cuts_the_weight_at_two_and_detaches_it():
    """lp - lp_rollout of ln 1.5 and ln 4: weights 1.5 and 2; the gradient is -w A."""
    logprobs, rollout = [-1.0, -1.0], [-1 - np.log(1.5), -1 - np.log(4)]
    found = policy_losses(tokens(logprobs, rollout, [1.0, -2.0]), RULE)
    np.testing.assert_allclose(found.weights, [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(found.losses, [1.5, -4.0], rtol=1e-6)
    np.testing.assert_array_equal(found.clipped, [False, True])
    slope = gradient(RULE, rollout, [1.0, -2.0], logprobs)
    np.testing.assert_allclose(slope, [-1.5, 4.0], rtol=1e-6)


def test_minus_infinity_on_either_side_is_masked():
    """F158: the third token would have weight exp(inf), the second inf - inf."""
    rollout, logprobs = [-1.0, -np.inf, -np.inf], [-1.0, -np.inf, -3.0]
    made = tokens(logprobs, rollout, [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(made.mask, [1, 0, 0])
    found = policy_losses(made, RULE)
    assert np.isfinite(found.losses).all()
    slope = gradient(RULE, rollout, [1.0, 1.0, 1.0], logprobs)
    np.testing.assert_array_equal(slope, [-1, 0, 0])


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("none", 0.0, 2.0, [1, 1, 1, 1]),
        ("token_tis", 0.0, 2.0, [2, 1, 0.5, 2]),
        ("token_tis", 0.6, 1.5, [1.5, 1, 0.6, 1.5]),
        # products of the two sequences: 2 x 1 and 0.5 x 4
        ("sequence_tis", 0.0, 1.5, [1.5, 1.5, 1.5, 1.5]),
        ("sequence_tis", 0.0, 3.0, [2, 2, 2, 2]),
        ("icepop", 0.6, 3.0, [2, 1, 0, 0]),
        ("token_mask", 0.6, 3.0, [1, 1, 0, 0]),
        # geometric means: root 2 both
        ("sequence_mask", 0.0, 1.4, [0, 0, 0, 0]),
        ("sequence_mask", 0.0, 1.42, [2, 1, 0.5, 4]),
    ],
)
def test_corrections_by_hand(name, low, high, expected):
    """Ratios 2 and 1 of one sequence, 1/2 and 4 of another."""
    made = tokens([LOG2, 0, -LOG2, 2 * LOG2], [0] * 4, [1] * 4, sequences=[0, 0, 1, 1])
    np.testing.assert_allclose(CORRECTIONS[name](made, low, high), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "slope"),
    [
        (1.0, 1.0, None, -1.0, -1.0),
        (1.2, 1.0, None, -1.2, -1.2),  # below 1.28: the higher upper bound lets it through
        (1.5, 1.0, None, -1.28, 0.0),
        (0.5, 1.0, None, -0.5, -0.5),  # a good token that became unlikely is not clipped
        (0.5, -1.0, None, 0.8, 0.0),
        (1.5, -1.0, None, 1.5, 1.5),
        (5.0, -1.0, None, 5.0, 5.0),
        (5.0, -1.0, 3.0, 3.0, 0.0),
        (2.0, -1.0, 3.0, 2.0, 2.0),
        (5.0, 1.0, 3.0, -1.28, 0.0),
    ],
)
def test_the_clipped_surrogate_by_hand(ratio, advantage, dual, loss, slope):
    """d rho / d lp = rho, so a token that is not clipped has slope -A rho."""
    rule = replace(RULE, kind="ppo_clip", dual_clip=dual)
    found = policy_losses(tokens([np.log(ratio)], [0.0], [advantage]), rule)
    np.testing.assert_allclose(found.losses, [loss], rtol=1e-5)
    found_slope = gradient(rule, [0.0], [advantage], [np.log(ratio)])
    np.testing.assert_allclose(found_slope, [slope], rtol=1e-5, atol=1e-7)
    assert bool(found.dual_clipped[0]) == (dual is not None and advantage < 0 and ratio > dual)


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    """Ratio 8 with the bound 1 + 4; no lower bound."""
    rule = replace(RULE, kind="cispo", clip_low=1.0, clip_high=4.0)
    slope = gradient(rule, [0.0, 0.0], [1.0, 1.0], [np.log(8), np.log(0.01)])
    np.testing.assert_allclose(slope, [-5.0, -0.01], rtol=1e-5)


def test_gspo_weighs_a_sequence_by_its_geometric_mean():
    """Log ratios 0.3 and 0.1 of one sequence: each token's ratio is exp(0.2), in the gradient
    too; the other sequence's 0.4 is beyond 0.28 and has none.
    """
    rule = replace(RULE, kind="gspo")
    where = {"sequences": [0, 0, 1]}
    made = tokens([0.3, 0.1, 0.4], [0.0] * 3, [1.0] * 3, **where)
    found = policy_losses(made, rule)
    np.testing.assert_allclose(found.losses, [-np.exp(0.2)] * 2 + [-1.28], rtol=1e-5)
    slope = gradient(rule, [0.0] * 3, [1.0] * 3, [0.3, 0.1, 0.4], **where)
    np.testing.assert_allclose(slope, [-np.exp(0.2)] * 2 + [0.0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["reinforce", "ppo_clip", "cispo", "gspo"])
def test_on_policy_all_losses_have_the_policy_gradient(kind):
    rule = replace(RULE, kind=kind)
    slope = gradient(rule, [-0.7, -0.1], [1.5, -0.5], [-0.7, -0.1])
    np.testing.assert_allclose(slope, [-1.5, 0.5], rtol=1e-6)


def test_tis_is_cispo_between_zero_and_two():
    cispo = replace(RULE, kind="cispo", clip_low=1.0, clip_high=1.0)
    numbers = np.random.default_rng(0).normal(size=(3, 64))
    args = numbers[0], numbers[1], numbers[2]
    np.testing.assert_allclose(gradient(RULE, *args), gradient(cispo, *args), rtol=1e-6)


@pytest.mark.parametrize("kind", ["reinforce", "ppo_clip", "cispo", "gspo"])
def test_what_is_masked_has_neither_loss_nor_gradient(kind):
    rule = replace(RULE, kind=kind, dual_clip=3.0)
    slope = gradient(rule, [-9.0, -0.1], [9.0, 1.0], [-0.7, -0.1], mask=[0.0, 1.0])
    np.testing.assert_allclose(slope, [0.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", np.exp(-0.5) - 0.5, 1 - np.exp(-0.5)),
        ("k3+", np.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_divergences_by_hand(name, value, slope):
    found, found_slope = jax.value_and_grad(lambda d: DIVERGENCES[name](d).sum())(jnp.array([0.5]))
    np.testing.assert_allclose(found, value, rtol=1e-6)
    np.testing.assert_allclose(found_slope, [slope], rtol=1e-6)


def test_k3_is_never_negative_and_bounded():
    found = DIVERGENCES["k3"](jnp.linspace(-40, 40, 401))
    assert (np.asarray(found) >= 0).all() and (np.asarray(found) <= 10).all()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 2.6),  # (2 x 1 + 8 x 3) / 10
        ("sequence_mean", 2.0),  # (1 + 3) / 2
        ("sequence_sum", 13.0),  # (2 + 24) / 2
        ("constant", 1.3),  # of at most 10 tokens
    ],
)
def test_aggregations_by_hand(aggregation, expected):
    """F176; a sequence without tokens is in no denominator."""
    lengths = np.array([2, 8, 0])
    weights = AGGREGATIONS[aggregation](lengths, 10)
    assert (weights * lengths * [1, 3, 99]).sum() == pytest.approx(expected)
