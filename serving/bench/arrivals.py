"""When requests of an open loop are sent: a gamma renewal process.

Gaps between requests have mean 1 / rate and a coefficient of variation of 1 / sqrt(burstiness): a
Poisson process at 1, regular for large values, in bursts for small ones.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A rate that goes from one value to another, in requests a second, over the requests."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rates(self, count: int) -> Float64[np.ndarray, "B"]:
        """The rate before each request."""
        share = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        return self.start * (self.end / self.start) ** share


def arrivals(
    count: int, rate: float | Ramp, burstiness: float, random: np.random.Generator
) -> Float64[np.ndarray, "B"]:
    """Seconds from the start to each request, in order; all 0 for an infinite rate.

    At a constant rate the gaps are scaled so that the last request is sent at count / rate: the
    load offered is then the one that was named, however few the requests.
    """
    if not isinstance(rate, Ramp) and math.isinf(rate):
        return np.zeros(count)
    rates = rate.rates(count) if isinstance(rate, Ramp) else np.full(count, rate)
    times = np.cumsum(random.gamma(burstiness, 1.0 / burstiness, count) / rates)
    if isinstance(rate, Ramp) or not count:
        return times
    return times * (count / rate / times[-1])
