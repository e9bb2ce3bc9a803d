"""The choice of drafts on the device is the host's, whatever the confidences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.speculative.budget import survivals, widths_within
from serving.scheduling import speculation

NUM_DRAFTS = 7
PICK = jax.jit(widths_within)


def device_widths(rows: list[list[float]], budget: int) -> list[int]:
    """Of rows of any length: what is beyond is as likely as can be, and no room for it."""
    survival = np.ones((len(rows), NUM_DRAFTS), np.float32)
    for number, row in enumerate(rows):
        survival[number, : len(row)] = row
    room = jnp.array([len(row) for row in rows])
    return PICK(jnp.asarray(survival), room, jnp.int32(budget)).tolist()


@pytest.mark.parametrize("levels", [3, 1000], ids=["many ties", "few ties"])
@pytest.mark.parametrize("num_sequences", [1, 5, 32])
def test_device_and_host_choose_the_same_drafts(num_sequences, levels):
    rng = np.random.default_rng(levels + num_sequences)
    for _ in range(30):
        drawn = rng.integers(0, levels + 1, (num_sequences, NUM_DRAFTS)) / np.float32(levels)
        lengths = rng.integers(0, NUM_DRAFTS + 1, num_sequences)
        rows = [
            sorted(row[:length].tolist(), reverse=True)
            for row, length in zip(drawn, lengths, strict=True)
        ]
        budget = int(rng.integers(0, num_sequences * NUM_DRAFTS + 2))
        assert device_widths(rows, budget) == speculation.widths_within(rows, budget)


def test_ties_go_to_the_lower_place_then_to_the_earlier_sequence():
    half = [0.5] * NUM_DRAFTS
    found = [device_widths([half, half], budget) for budget in range(5)]
    assert found == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def test_saturated_confidences_keep_their_order():
    logits = jnp.array([[40.0] * NUM_DRAFTS, [2.0] * NUM_DRAFTS], jnp.bfloat16)
    survival = survivals(logits, jnp.ones(NUM_DRAFTS))
    assert (survival[0] == 1).all()
    room = jnp.full(2, NUM_DRAFTS)
    found = [PICK(survival, room, jnp.int32(budget)).tolist() for budget in (1, 3, 8)]
    assert found == [[1, 0], [3, 0], [7, 1]]


def test_survivals_are_products_of_calibrated_chances():
    logits = np.random.default_rng(0).normal(0, 3, (4, NUM_DRAFTS)).astype(np.float32)
    temperatures = np.linspace(0.5, 2, NUM_DRAFTS).astype(np.float32)
    wanted = np.cumprod(1 / (1 + np.exp(-logits / temperatures, dtype=np.float64)), axis=1)
    found = survivals(jnp.asarray(logits), jnp.asarray(temperatures))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_survivals_never_rise_and_later_logits_change_no_earlier_one():
    rng = np.random.default_rng(1)
    logits = rng.normal(4, 4, (4096, NUM_DRAFTS)).astype(np.float32)
    found = np.asarray(survivals(jnp.asarray(logits), jnp.ones(NUM_DRAFTS)))
    assert (np.diff(found, axis=1) <= 0).all()
    speculation.check_survivals(found[:256].tolist())  # the host takes them as they are
    for place in range(1, NUM_DRAFTS):
        other = logits.copy()
        other[:, place:] = rng.normal(0, 9, other[:, place:].shape)
        changed = np.asarray(survivals(jnp.asarray(other), jnp.ones(NUM_DRAFTS)))
        np.testing.assert_array_equal(changed[:, :place], found[:, :place])


def test_a_broken_drafter_of_one_sequence_costs_the_others_nothing():
    logits = np.full((3, NUM_DRAFTS), 1.0, np.float32)
    logits[1, 2:] = np.nan
    survival = survivals(jnp.asarray(logits), jnp.ones(NUM_DRAFTS))
    speculation.check_survivals(survival.tolist())
    budgets, room = (2 * NUM_DRAFTS + 2, 100), jnp.full(3, NUM_DRAFTS)
    for budget in budgets:
        widths = PICK(survival, room, jnp.int32(budget))
        assert widths.tolist() == [NUM_DRAFTS, 2, NUM_DRAFTS]


def test_no_room_and_no_budget_test_nothing():
    survival = jnp.full((2, NUM_DRAFTS), 0.5)
    assert PICK(survival, jnp.zeros(2, int), jnp.int32(9)).tolist() == [0, 0]
    assert PICK(survival, jnp.full(2, NUM_DRAFTS), jnp.int32(0)).tolist() == [0, 0]
    assert PICK(survival, jnp.array([-3, 2]), jnp.int32(9)).tolist() == [0, 2]
