"""The law of how often a run is repeated, as a selection needs it.

The best of K runs, each of which is above a place with probability b and within a set just below it
with probability a, lies in the set with probability φ(1 - b) - φ(1 - b - a), φ(s) = E s^K. With
k = (1 - γ)/γ the negative binomial of shape η, truncated to K ≥ 1, has φ(1 - x) =
((1 + k x)^-η - (1 + k)^-η) / (1 - (1 + k)^-η), and the mean m = η k / (1 - (1 + k)^-η); its limit
for η = 0 is logarithmic. Poisson has φ(1 - x) = e^{-m x}. In these forms nothing cancels.

>>> geometric = Repetitions(mean=10.0, shape=1.0)
>>> round(geometric.odds, 9), round(float(geometric.density(0.0)), 9)
(9.0, 10.0)
>>> round(float(geometric.within(0.0, 1.0)), 9), round(float(geometric.within(0.5, 0.5)), 9)
(1.0, 0.090909091)

Reference: Papernot and Steinke, arXiv:2110.03620, Definition 1 and Lemma 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from affidavit.accountants.cyclic_convolution import Array

ROUNDING = 1e-9
"""Relative allowance for what is computed here, far above what it loses."""
_LOGARITHMIC = 1e-12
"""A shape below it is 0 to within the allowance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetitions:
    """K of ``mean`` and ``shape`` η, as ``RepeatAndSelect`` has them: η = inf is Poisson."""

    mean: float
    shape: float

    @property
    def odds(self) -> float:
        """(1 - γ)/γ of the negative binomial; of Poisson nothing."""
        return _odds(self.mean, self.shape)

    @property
    def fall(self) -> float:
        """By how much the log of the ``density`` falls from no mass above to all of it."""
        if math.isinf(self.shape):
            return self.mean
        return (self.shape + 1) * math.log1p(self.odds)

    def within(self, above: Array | float, mass: Array | float) -> Array:
        """The chance that the best is in a set of ``mass``, with ``above`` before it."""
        above, mass = np.asarray(above, dtype=np.float64), np.asarray(mass, dtype=np.float64)
        if math.isinf(self.shape):
            return np.asarray(-np.exp(-self.mean * above) * np.expm1(-self.mean * mass))
        odds = self.odds
        if odds == 0:
            return mass + 0 * above
        ratio = np.log1p(odds * mass / (1 + odds * above))
        if self.shape < _LOGARITHMIC:
            return np.asarray(self.mean / odds * ratio)
        least = np.exp(-self.shape * np.log1p(odds * above))
        return np.asarray(-self.mean / (self.shape * odds) * least * np.expm1(-self.shape * ratio))

    def density(self, above: Array | float) -> Array:
        """φ'(1 - b): the density of the best over that of one run, with mass b ``above`` it."""
        if math.isinf(self.shape):
            return np.asarray(self.mean * np.exp(-self.mean * np.asarray(above)))
        powers = -(self.shape + 1) * np.log1p(self.odds * np.asarray(above))
        return np.asarray(self.mean * np.exp(powers))


@lru_cache(maxsize=64)
def _odds(mean: float, shape: float) -> float:
    """The k whose mean is ``mean``, by bisection of log(1 + k)."""
    low, high = 0.0, 20.0  # the mean is at least (e^t - 1)/t
    for _ in range(120):
        middle = (low + high) / 2
        if shape < _LOGARITHMIC:
            value = math.expm1(middle) / middle
        else:
            value = shape * math.expm1(middle) / -math.expm1(-shape * middle)
        low, high = (middle, high) if value <= mean else (low, middle)
    return math.expm1(low)
