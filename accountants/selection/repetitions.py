"""The distribution of the number of runs of a selection.

Let each of K runs exceed a score with probability b, and fall into a set just below it with
probability a. The best run falls into the set with probability φ(1 - b) - φ(1 - b - a),
φ(s) = E s^K. With k = (1 - γ)/γ the negative binomial of shape η, truncated to K ≥ 1, has
φ(1 - x) = ((1 + k x)^-η - (1 + k)^-η) / (1 - (1 + k)^-η) and mean m = η k / (1 - (1 + k)^-η).
Its limit for η = 0 is logarithmic. Poisson has φ(1 - x) = e^{-m x}. None of these forms cancels.

>>> geometric = Repetitions(mean=10.0, shape=1.0)
>>> round(geometric.odds, 9), round(float(geometric.density(0.0)), 9)
(9.0, 10.0)
>>> round(float(geometric.win_probability(0.5, 0.5)), 9)
0.090909091

Reference: Papernot and Steinke, arXiv:2110.03620, Definition 1 and Lemma 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from affidavit.accountants.rounding import Array

ROUNDING = 1e-9
"""Relative allowance for rounding, far above what is lost."""
_LOGARITHMIC = 1e-12
"""A smaller shape equals 0 up to the allowance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetitions:
    """K with ``mean`` and ``shape`` η as in ``RepeatAndSelect``; η = inf is Poisson."""

    mean: float
    shape: float

    @property
    def odds(self) -> float:
        """(1 - γ)/γ of the negative binomial; undefined for Poisson."""
        return _odds(self.mean, self.shape)

    @property
    def log_density_drop(self) -> float:
        """The drop of the log of ``density`` from no mass above a run to all of it."""
        if math.isinf(self.shape):
            return self.mean
        return (self.shape + 1) * math.log1p(self.odds)

    def win_probability(self, above: Array | float, mass: Array | float) -> Array:
        """Return the probability that the best is in a set of ``mass``, ``above`` ahead of it."""
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
        """Return φ'(1 - b), the best run's density over one run's, with mass b ``above`` it."""
        if math.isinf(self.shape):
            return np.asarray(self.mean * np.exp(-self.mean * np.asarray(above)))
        powers = -(self.shape + 1) * np.log1p(self.odds * np.asarray(above))
        return np.asarray(self.mean * np.exp(powers))


@lru_cache(maxsize=64)
def _odds(mean: float, shape: float) -> float:
    """Return the k with this ``mean``, by bisection of log(1 + k)."""
    low, high = 0.0, 20.0  # the mean is at least (e^t - 1)/t
    for _ in range(120):
        middle = (low + high) / 2
        if shape < _LOGARITHMIC:
            value = math.expm1(middle) / middle
        else:
            value = shape * math.expm1(middle) / -math.expm1(-shape * middle)
        low, high = (middle, high) if value <= mean else (low, middle)
    return math.expm1(low)
