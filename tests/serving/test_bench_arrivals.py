"""When an open loop's requests are sent: the laws of the gaps, and rates that change."""

import math

import numpy as np
import pytest

from serving.bench.arrivals import Ramp, arrivals

COUNT = 40_000


def gaps(rate: float | Ramp, burstiness: float, seed: int = 0) -> np.ndarray:
    times = arrivals(COUNT, rate, burstiness, np.random.default_rng(seed))
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_the_gamma_law(burstiness):
    found = gaps(5.0, burstiness)
    cv = found.std() / found.mean()
    assert found.mean() == pytest.approx(1 / 5, rel=1e-9)
    # Six standard errors of a gamma's coefficient of variation at this count, and a bit.
    assert cv == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_burstiness_1_is_a_poisson_process():
    """Counts in windows of a second have the mean and the variance of the rate."""
    times = np.cumsum(gaps(5.0, 1.0))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(5.0, rel=0.02)
    assert counts.var() == pytest.approx(5.0, rel=0.1)
    share_of_none = (counts == 0).mean()
    assert share_of_none == pytest.approx(math.exp(-5), abs=0.004)


@pytest.mark.parametrize("count", [1, 7, 100])
def test_the_last_of_few_requests_is_sent_when_the_rate_says(count):
    times = arrivals(count, 4.0, 0.5, np.random.default_rng(1))
    assert times[-1] == pytest.approx(count / 4.0)
    assert (np.diff(times) >= 0).all()


def test_an_infinite_rate_sends_all_at_once():
    assert arrivals(3, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0, 0, 0]


def test_equal_seeds_give_equal_times():
    assert (gaps(3.0, 1.0, seed=4) == gaps(3.0, 1.0, seed=4)).all()
    assert (gaps(3.0, 1.0, seed=4) != gaps(3.0, 1.0, seed=5)).any()


@pytest.mark.parametrize(
    ("strategy", "middle"), [("linear", 10.5), ("exponential", math.sqrt(20.0))]
)
def test_a_ramp_goes_from_rate_to_rate(strategy, middle):
    ramp = Ramp(strategy=strategy, start=1.0, end=20.0)
    assert ramp.rates(3).tolist() == pytest.approx([1.0, middle, 20.0])
    found = gaps(ramp, 1.0)
    tenth = COUNT // 10
    expected = (1 / ramp.rates(COUNT)).reshape(10, tenth).mean(axis=1)
    assert found.reshape(10, tenth).mean(axis=1) == pytest.approx(expected, rel=0.1)
