"""Lower bounds for a record in the place of others that contribute the opposite, as it is zeroed.

Along one direction the outputs are Σ w_k N(2kμ) with the record and Σ w_k N(kμ) with zeros in its
place, in standard deviations of the noise. For every threshold t, ε is at least that of the test
whether they are above t.

>>> sums = events.DisplacedSum(weights=(0.9, 0.1, 1e-12), noise_multiplier=0.4)
>>> round(DisplacedSumAttack(sums).epsilon(1e-5).lower, 1)
11.8

Reference: docs/theorems/correlated-noise.md, Theorem 18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import require_delta, require_epsilon
from affidavit.accountants.rounding import Array
from affidavit.plan import events

_THRESHOLDS, _BEYOND = 1200, 9.0
"""Thresholds that are tried, and deviations beyond the farthest mean up to which they lie."""
_ROUNDING = 1e-8
"""Relative allowance for the weights and the normal tails, far above what they lose."""
_LEAST_RATE = 1e-290


@dataclass(frozen=True, slots=True)
class DisplacedSumAttack:
    """Lower bounds of ``sums`` by a threshold."""

    sums: events.DisplacedSum

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[lower, ∞]`` of ε (nats); raises ``ValueError`` unless 0 < ``delta`` < 1."""
        require_delta(delta)
        return Bracket(lower=max(0.0, float(self._gains(delta).max())), upper=math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[lower, 1]`` of δ at ``epsilon`` (nats); raises ``ValueError`` if ε < 0."""
        require_epsilon(epsilon)
        true, false = self._rates
        gains = true - np.exp(np.minimum(np.log(false) + epsilon, 0.0))
        return Bracket(lower=max(0.0, float(gains.max())), upper=1.0)

    def test(self, delta: float) -> float:
        """Return the threshold that attains the lower end at ``delta``, in standard deviations."""
        return float(self._thresholds[int(self._gains(delta).argmax())])

    @property
    def _thresholds(self) -> Array:
        farthest = 2 * (len(self.sums.weights) - 1) / self.sums.noise_multiplier
        return np.linspace(-_BEYOND, farthest + _BEYOND, _THRESHOLDS)

    @property
    def _rates(self) -> tuple[Array, Array]:
        """P(above) with the record, rounded down, and without it, rounded up; shape (n,) each."""
        *near, beyond = self.sums.weights
        weights, thresholds = np.array(near), self._thresholds[:, None]
        means = np.arange(len(weights)) / self.sums.noise_multiplier
        true = ndtr(2 * means - thresholds) @ weights
        # The last moves are seen without the record only.
        false = ndtr(means - thresholds) @ weights + beyond
        return true * (1 - _ROUNDING), np.minimum(false * (1 + _ROUNDING) + _LEAST_RATE, 1.0)

    def _gains(self, delta: float) -> Array:
        """Return ε (nats) by threshold, shape (n,)."""
        true, false = self._rates
        shown = true > delta
        gains = np.full(true.size, -math.inf)
        gains[shown] = np.log(true[shown] - delta) - np.log(false[shown])
        return gains - 1e-12
