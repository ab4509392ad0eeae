"""A run without a record against the run with it, whose likelihood ratio is above a log-normal one.

Let L be the likelihood ratio of the run with the record to the run without it. If L >= e^G, G
normal, without the record, δ(ε) is at most E (1 - e^{ε + G})_+. By Jensen's inequality G is the
mean of the exponents of L over the draws of the record.

>>> ratio = LogNormalRatio(spread=0.1, variance=0.04)
>>> round(ratio.epsilon(1e-5), 2), f"{ratio.delta(0.9):.0e}"
(0.83, '2e-06')

Reference: docs/theorems/correlated-noise.md, Theorems 23, 29 and 30.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import log_ndtr, ndtr


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormalRatio:
    """e^G, whose mean is at least e^-``spread``; G has at most ``variance``."""

    spread: float
    variance: float

    def epsilon(self, delta: float) -> float:
        """Return a bound of ε (nats) at ``delta``, or infinity."""
        low, high = 0.0, 1.0
        while self.delta(high) > delta and high < 1e6:
            low, high = high, 2 * high
        if self.delta(high) > delta:
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high

    def delta(self, epsilon: float) -> float:
        """Return a bound of δ at ``epsilon`` (nats)."""
        if self.variance == 0:
            return max(0.0, -math.expm1(epsilon - self.spread))
        deviation = math.sqrt(self.variance)
        place = (self.spread + self.variance / 2 - epsilon) / deviation
        above = epsilon - self.spread + float(log_ndtr(place - deviation))
        return max(0.0, float(ndtr(place)) * (1 + 1e-12) - math.exp(above) * (1 - 1e-12))
