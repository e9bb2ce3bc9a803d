"""The drafter's losses: by hand, in independent numpy, and with one denominator over everything."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.drafter_training import DrafterTrainingConfig
from rl.draft_losses import LossSums, Rows, loss_sums, metrics_of, total_loss
from tests.numerics import assert_close

CONFIG = DrafterTrainingConfig()
DECAY = CONFIG.loss_decay


def logits(*probabilities):
    return jnp.log(jnp.asarray([[probabilities]], jnp.float32))


def random_rows(blocks: int, seed: int) -> Rows:
    """Rows of seven drafts over eleven ids, the last of them padding; blocks end anywhere."""
    rng = np.random.default_rng(seed)
    draft, target = (rng.normal(size=(blocks, 7, 11)) * 2 for _ in range(2))
    draft[..., -1] = target[..., -1] = -np.inf
    return Rows(
        draft=jnp.asarray(draft, jnp.float32),
        target=jnp.asarray(target, jnp.float32),
        labels=jnp.asarray(rng.integers(0, 10, (blocks, 7))),
        valid=jnp.arange(7) < jnp.asarray(rng.integers(0, 8, (blocks, 1))),
        confidence=jnp.asarray(rng.normal(size=(blocks, 7)), jnp.float32),
    )


def test_one_row_by_hand():
    rows = Rows(
        draft=logits(0.5, 0.25, 0.25),
        target=logits(0.25, 0.5, 0.25),
        labels=jnp.array([[1]]),
        valid=jnp.array([[True]]),
        confidence=jnp.array([[0.0]]),
    )
    sums = loss_sums(rows, DECAY)
    assert float(sums.weight) == 1.0
    assert float(sums.ce) == pytest.approx(np.log(4))
    assert float(sums.tv) == pytest.approx(0.5)  # twice the total variation
    assert float(sums.accepted[0]) == pytest.approx(0.75)  # 1/4 + 1/4 + 1/4
    assert float(sums.confidence) == pytest.approx(np.log(2))
    assert float(sums.confidence_error) == pytest.approx(0.25)
    expected = 0.1 * np.log(4) + 0.9 * 0.5 + np.log(2)
    assert float(total_loss(sums, CONFIG)) == pytest.approx(expected)


def test_position_k_weighs_exp_of_minus_a_quarter_k():
    for k, weight in enumerate([1.0, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]):
        rows = random_rows(3, 0)
        only = replace(rows, valid=jnp.zeros((3, 7), bool).at[1, k].set(True))
        assert float(loss_sums(only, DECAY).weight) == pytest.approx(weight, abs=1e-4)


def test_the_sums_against_numpy():
    rows = random_rows(40, 1)
    sums = jax.jit(loss_sums, static_argnums=1)(rows, DECAY)
    expected = {field: 0.0 for field in vars(sums)}
    expected |= {"accepted": np.zeros(7), "rows": np.zeros(7), "survived": np.zeros(7)}
    for a in range(40):
        product = 1.0
        for k in range(int(rows.valid[a].sum())):
            q, p = (
                np.exp(z) / np.exp(z).sum()
                for z in (np.asarray(x[a, k], np.float64) for x in (rows.draft, rows.target))
            )
            w, kept = np.exp(-k / 4), np.minimum(q, p).sum()
            s = 1 / (1 + np.exp(-float(rows.confidence[a, k])))
            product *= kept
            expected["ce"] -= w * np.log(q[rows.labels[a, k]])
            expected["tv"] += w * np.abs(q - p).sum()
            expected["confidence"] -= w * (kept * np.log(s) + (1 - kept) * np.log(1 - s))
            expected["weight"] += w
            expected["accepted"][k] += kept
            expected["rows"][k] += 1
            expected["survived"][k] += product
            expected["confidence_error"] += abs(s - kept)
            expected["blocks"] += k == 0
    for name, value in vars(sums).items():
        assert_close(np.asarray(value), np.float32(expected[name]), "f32")


def test_two_halves_are_one_whole():
    """Not so for means of means: the halves hold different numbers of rows."""
    whole = random_rows(10, 2)
    halves = [
        jax.tree.map(lambda x, part=part: x[part], whole) for part in np.split(np.arange(10), [3])
    ]

    def sums_of(shift, rows: Rows) -> LossSums:
        return loss_sums(replace(rows, draft=rows.draft.at[..., 0].add(shift)), DECAY)

    def joined(shift):
        return total_loss(jax.tree.map(jnp.add, *(sums_of(shift, h) for h in halves)), CONFIG)

    def at_once(shift):
        return total_loss(sums_of(shift, whole), CONFIG)

    for function in (lambda f: f(0.5), lambda f: jax.grad(f)(0.5)):
        assert_close(function(joined), function(at_once), "f32")
    apart = np.mean([total_loss(sums_of(0.5, half), CONFIG) for half in halves])
    assert abs(apart - at_once(0.5)) > 1e-3


def test_the_confidence_learns_from_the_others_but_does_not_teach_them():
    rows = random_rows(5, 3)

    def confidence(draft, target, logit):
        seen = replace(rows, draft=draft, target=target, confidence=logit)
        return loss_sums(seen, DECAY).confidence

    floats = rows.draft, rows.target, rows.confidence
    to_draft, to_target, to_logit = jax.grad(confidence, (0, 1, 2))(*floats)
    assert not np.asarray(to_draft).any() and not np.asarray(to_target).any()
    q, p = jax.nn.softmax(rows.draft), jax.nn.softmax(rows.target)
    kept = 1 - 0.5 * jnp.sum(jnp.abs(q - p), -1)
    weights = np.exp(-np.arange(7) / 4) * np.asarray(rows.valid)
    assert_close(to_logit, weights * (jax.nn.sigmoid(rows.confidence) - kept), "f32")


def test_padding_ids_and_invalid_rows_leave_gradients_finite_and_zero():
    rows = random_rows(6, 4)

    def loss(draft):
        return total_loss(loss_sums(replace(rows, draft=draft), DECAY), CONFIG)

    gradient = np.asarray(jax.grad(loss)(rows.draft))
    assert np.isfinite(gradient).all()
    assert not gradient[~np.asarray(rows.valid)].any() and not gradient[..., -1].any()
    assert gradient[np.asarray(rows.valid)][:, :-1].any(axis=-1).all()


def test_without_any_block_the_loss_is_zero():
    rows = replace(random_rows(2, 5), valid=jnp.zeros((2, 7), bool))
    sums = loss_sums(rows, DECAY)
    assert float(total_loss(sums, CONFIG)) == 0.0
    assert float(metrics_of(sums)["acceptance_length"]) == 1.0


def test_the_expected_length_counts_the_targets_own_token():
    same = logits(0.5, 0.5)
    rows = Rows(
        draft=jnp.tile(same, (1, 3, 1)),
        target=jnp.concatenate([same, logits(1.0, 1e-9), same], axis=1),
        labels=jnp.zeros((1, 3), int),
        valid=jnp.ones((1, 3), bool),
        confidence=None,
    )
    found = metrics_of(loss_sums(rows, DECAY))
    assert_close(found["acceptance_rate"], np.float32([1.0, 0.5, 1.0]), "f32")
    assert_close(found["survival"], np.float32([1.0, 0.5, 0.5]), "f32")
    assert float(found["acceptance_length"]) == pytest.approx(3.0)
