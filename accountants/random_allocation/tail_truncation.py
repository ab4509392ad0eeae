"""What the lattice leaves out: terms above a cut, and terms too small to matter.

``remove``: X is heavy-tailed, so a lattice up to its largest values would be very long. On the
event J that some X_i exceeds the cut R, the payoff is linear but for a shortfall,

    E[(S - α)_+; J] = E[S; J] - α Pr(J) + E[(α - S)_+; J].

The first two terms are closed: with Q = Pr(X > R) and P = E[X; X > R], the probability of the same
event under the record's own normal law, Pr(J) = 1 - (1-Q)^b and E[S; J] = 1 - (1-P)(1-Q)^{b-1}. The
shortfall is at least 0 and, by a union bound over the term that exceeds R, at most
Q E (bα - R - W)_+ with W a sum of b - 1 terms. Chernoff's bound y_+ <= e^{τy}/(eτ) bounds this. So
R only needs to reach from the least sum of the others up to bα.

``add``: terms below exp(-10/σ - 1/(2σ²)) are left out. Since the payoff (1 - αS)_+ is at most 1,
this costs at most the probability of such a term.

Reference: ``docs/theorems/random-allocation.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import ndtr

from affidavit.accountants.rounding import Array

_Z = np.linspace(-10.0, 10.0, 1001)
_TILTS = np.logspace(-7.0, 3.0, 81)
_MIN_Z = -10.0


def min_small_term(rate: float) -> float:
    """Return the least X on the lattice of the side ``add``."""
    return math.exp(rate * _MIN_Z - rate**2 / 2)


def log_laplace(tilts: Array, rate: float) -> Array:
    """Return upper bounds of log E exp(-τX) by chords over cells of exact mass and mean.

    ``tilts`` τ and the bounds have shape (m,).
    """
    x = np.exp(rate * _Z - rate**2 / 2)
    mass, mean = np.diff(ndtr(_Z)), np.diff(ndtr(_Z - rate))
    above = mean - x[:-1] * mass
    heights = np.exp(-np.outer(tilts, x))
    slopes = np.diff(heights, axis=1) / np.diff(x)
    outside = float(ndtr(_Z[0])) + float(ndtr(-_Z[-1])) * heights[:, -1]
    return np.asarray(np.log(heights[:, :-1] @ mass + slopes @ above + outside + 1e-13))


@lru_cache(maxsize=16)
def _log_transforms(rate: float) -> Array:
    return log_laplace(_TILTS, rate)


def shortfall(bins: int, rate: float, reach: Array) -> Array:
    """Return upper bounds of E (``reach`` - W)_+ for a sum W of ``bins`` - 1 terms.

    The bound is 0 where ``reach`` is not positive. Both have shape (n,).
    """
    with np.errstate(over="ignore"):
        bounds = np.exp(
            np.outer(reach, _TILTS) + (bins - 1) * _log_transforms(rate) - np.log(math.e * _TILTS)
        ).min(axis=1)
    return np.where(reach > 0, np.minimum(bounds * (1 + 1e-9), reach), 0.0)


@dataclass(frozen=True, kw_only=True)
class SmallTerms:
    """The part of δ of terms below the lattice of the side ``add``."""

    bins: int

    def upper(self, ratios: Array) -> Array:
        """Return upper bounds at each α = e^ε of ``ratios``, shape (n,)."""
        return np.full(ratios.size, self.bins * float(ndtr(_MIN_Z)) * (1 + 1e-9))

    def lower(self, ratios: Array) -> Array:
        """Return the lower bounds 0, shape (n,)."""
        return np.zeros(ratios.size)


@dataclass(frozen=True, kw_only=True)
class LargeTerms:
    """The part of δ of terms above the ``cut`` of the lattice of the side ``remove``."""

    bins: int
    rate: float
    cut: float

    @cached_property
    def _probabilities(self) -> tuple[float, float, float, float]:
        """E[S; J], Pr(J), Q, and a relative bound of the error of each."""
        rate, bins = self.rate, self.bins
        z = math.log(self.cut) / rate + rate / 2
        q, p = float(ndtr(-z)), float(ndtr(rate - z))
        none = (bins - 1) * math.log1p(-q)
        mean = -math.expm1(none + math.log1p(-p)) if p < 1 else 1.0
        error = 2.0**-53 * (128 + 8 * (abs(z) + rate + 1) * (abs(z) + 2 * rate + 1))
        return mean, -math.expm1(none + math.log1p(-q)), q, error

    def _linear(self, ratios: Array) -> tuple[Array, Array]:
        mean, probability, _, error = self._probabilities
        return mean - ratios * probability, error * (mean + ratios * probability)

    def upper(self, ratios: Array) -> Array:
        """Return upper bounds of E[(S - α)_+; J] at each α = e^ε of ``ratios``, shape (n,)."""
        linear, error = self._linear(ratios)
        mean, _, q, relative = self._probabilities
        reach = self.bins * ratios * (1 + 1e-15) - self.cut
        short = q * shortfall(self.bins, self.rate, reach) * (1 + relative)
        # numpy's minimum keeps a NaN, which bounds nothing.
        return np.maximum(0.0, np.minimum(mean * (1 + relative), linear + error + short))

    def lower(self, ratios: Array) -> Array:
        """Return lower bounds of E[(S - α)_+; J] at each α = e^ε of ``ratios``, shape (n,)."""
        linear, error = self._linear(ratios)
        return np.maximum(0.0, linear - error)


def choose_cut(bins: int, rate: float, ratio: float, allowed: float) -> float:
    """Return about the least R at which ``LargeTerms.upper`` loses about ``allowed`` of δ."""
    whole = bins * ratio
    highest = math.exp(min(700.0, rate * 10.5 - rate**2 / 2 + rate**2))
    cuts = np.geomspace(1e-2, max(min(highest, whole), 1.0), 400)
    z = np.log(cuts) / rate + rate / 2
    crude = ndtr(rate - z) + bins * ndtr(-z)
    loss = np.minimum(crude, ndtr(-z) * shortfall(bins, rate, whole - cuts))
    good = np.flatnonzero(loss <= allowed)
    return float(cuts[good[0]] if good.size else cuts[-1])
