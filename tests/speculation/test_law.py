"""Committed tokens have the target's law whatever the drafter does; and the test can tell.

Chi-square over all sequences of three tokens of eight, 200,000 of them a setting with fixed seeds.
Sequences that are expected less than five times are counted together. Bonferroni: all settings
together reject a right law once in 10,000 trials.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from minimax_jax import speculation
from tests.speculation.toy import TARGET, Schedule, Setting, decoded, law, processed

pytestmark = pytest.mark.slow

COUNT = 200_000
SETTINGS = [Setting(width=w, temperature=t) for w in range(1, 8) for t in (0.5, 1.0, 2.0)]
SETTINGS += [Setting(width=w, top_p=0.7, temperature=t) for w, t in ((1, 0.5), (3, 1.0), (7, 2.0))]
SETTINGS += [Setting(width=3, top_k=5, top_p=0.9)]
SETTINGS += [Setting(width=w, method="greedy", temperature=t) for w, t in ((1, 1.0), (7, 0.5))]
SETTINGS += [Setting(width=7, ragged=True, temperature=t, top_p=0.9) for t in (0.5, 1.0)]
LEVEL = 1e-4 / len(SETTINGS)


def p_value(setting: Setting, schedule: Schedule | None = None) -> float:
    """How likely counts as far from the law as these are under the law."""
    observed, expected = decoded(setting, COUNT, schedule), COUNT * law(setting)
    assert not observed[expected == 0].any(), "a token was committed that the target cut"
    common = expected >= 5
    rest = expected[~common].sum()
    observed, expected = (np.append(x[common], x[~common].sum()) for x in (observed, expected))
    if 0 < rest < 5:  # not enough for a cell of their own
        observed, expected = ([*x[:-2], x[-2] + x[-1]] for x in (observed, expected))
    observed, expected = (np.array(x)[np.array(expected) > 0] for x in (observed, expected))
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(observed) - 1))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_three_tokens_have_the_targets_law(setting):
    """F104."""
    value = p_value(setting)
    assert value >= LEVEL, value


@pytest.fixture
def drawn_from_p_after_a_rejection(monkeypatch):
    """A mutation: the residual without q."""
    monkeypatch.setattr(speculation, "after_drafts", lambda p, q, rejected: p)


@pytest.fixture
def bonus_from_the_residual(monkeypatch):
    """A mutation: the token after kept drafts is drawn as if the last had been rejected."""
    right = speculation.after_drafts
    always = jnp.ones_like
    monkeypatch.setattr(speculation, "after_drafts", lambda p, q, r: right(p, q, always(r)))


def test_a_residual_without_q_is_noticed(drawn_from_p_after_a_rejection):
    assert p_value(Setting(width=2, fault="residual")) < LEVEL


def test_a_bonus_from_the_residual_is_noticed(bonus_from_the_residual):
    assert p_value(Setting(width=2, fault="bonus")) < LEVEL


def test_drafts_at_another_temperature_are_noticed():
    """F104: accepted with other probabilities than they were drawn from."""
    assert p_value(Setting(width=2, drafted_at=1.25)) < LEVEL


def test_the_exact_law_is_a_law():
    for setting in (Setting(), Setting(top_p=0.7), Setting(top_k=5, top_p=0.9)):
        assert np.isclose(law(setting).sum(), 1.0)
    kept = [np.count_nonzero(processed(row, Setting(top_k=5))) for row in np.asarray(TARGET)]
    assert kept == [5] * 8
