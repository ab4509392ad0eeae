"""What the lattice leaves out: terms above a cut, and terms too small to matter.

``remove``: X is heavy-tailed, so a lattice up to its largest values would be very long. On the
event J that some X_i exceeds the cut R, the payoff is linear but for a shortfall,

    E[(S - α)_+; J] = E[S; J] - α Pr(J) + E[(α - S)_+; J].

The first two terms are closed: with Q = Pr(X > R) and P = E[X; X > R], the probability of the same
event under the record's own normal law, Pr(J) = 1 - (1-Q)^b and E[S; J] = 1 - (1-P)(1-Q)^{b-1}. The
shortfall is at least 0 and, by a union bound over the term that exceeds R, at most
Q E (bα - R - W)_+ with W a sum of b - 1 terms. Chernoff's bound y_+ <= e^{τy}/(eτ) bounds this. So
R only needs to reach from the least sum of the others up to bα. Bins of two rates have a Q and a P
each, whose means over the bins take their place.

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

Kinds = tuple[tuple[int, float], ...]
"""The bins of each rate 1/σ, and the rate, the largest first."""
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


def shortfall(kinds: Kinds, reach: Array) -> Array:
    """Return upper bounds of E (``reach`` - W)_+ for a sum W of all terms but any one.

    The bound is 0 where ``reach`` is not positive. Both have shape (n,).
    """
    logs = [_log_transforms(rate) for _, rate in kinds]
    others = np.sum([bins * one for (bins, _), one in zip(kinds, logs, strict=True)], axis=0)
    others = others - np.min(logs, axis=0)
    with np.errstate(over="ignore"):
        bounds = np.exp(np.outer(reach, _TILTS) + others - np.log(math.e * _TILTS)).min(axis=1)
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

    kinds: Kinds
    cut: float

    @property
    def _bins(self) -> int:
        return sum(bins for bins, _ in self.kinds)

    @cached_property
    def _probabilities(self) -> tuple[float, float, float, float]:
        """E[S; J], Pr(J), the mean of Q over the bins, and a relative bound of their errors."""
        tails, none, error = [], 0.0, 0.0
        for bins, rate in self.kinds:
            z = math.log(self.cut) / rate + rate / 2
            q, p = float(ndtr(-z)), float(ndtr(rate - z))
            none += bins * math.log1p(-q)
            tails.append((bins / self._bins, q, p))
            size = 128 + 8 * (abs(z) + rate + 1) * (abs(z) + 2 * rate + 1)
            error = max(error, 2.0**-53 * size)
        mean = sum(
            share * (-math.expm1(none - math.log1p(-q) + math.log1p(-p)) if p < 1 else 1.0)
            for share, q, p in tails
        )
        return mean, -math.expm1(none), sum(share * q for share, q, _ in tails), error

    def _linear(self, ratios: Array) -> tuple[Array, Array]:
        mean, probability, _, error = self._probabilities
        return mean - ratios * probability, error * (mean + ratios * probability)

    def upper(self, ratios: Array) -> Array:
        """Return upper bounds of E[(S - α)_+; J] at each α = e^ε of ``ratios``, shape (n,)."""
        linear, error = self._linear(ratios)
        mean, _, q, relative = self._probabilities
        reach = self._bins * ratios * (1 + 1e-15) - self.cut
        short = q * shortfall(self.kinds, reach) * (1 + relative)
        # numpy's minimum keeps a NaN, which bounds nothing.
        return np.maximum(0.0, np.minimum(mean * (1 + relative), linear + error + short))

    def lower(self, ratios: Array) -> Array:
        """Return lower bounds of E[(S - α)_+; J] at each α = e^ε of ``ratios``, shape (n,)."""
        linear, error = self._linear(ratios)
        return np.maximum(0.0, linear - error)


def choose_cut(kinds: Kinds, ratio: float, allowed: float) -> float:
    """Return about the least R at which ``LargeTerms.upper`` loses about ``allowed`` of δ."""
    every, rate = sum(bins for bins, _ in kinds), kinds[0][1]
    whole = every * ratio
    highest = math.exp(min(700.0, rate * 10.5 - rate**2 / 2 + rate**2))
    cuts = np.geomspace(1e-2, max(min(highest, whole), 1.0), 400)
    crude, tail = np.zeros(cuts.size), np.zeros(cuts.size)
    for bins, one in kinds:
        z = np.log(cuts) / one + one / 2
        tail += bins / every * ndtr(-z)
        crude += bins / every * ndtr(one - z) + bins * ndtr(-z)
    loss = np.minimum(crude, tail * shortfall(kinds, whole - cuts))
    good = np.flatnonzero(loss <= allowed)
    return float(cuts[good[0]] if good.size else cuts[-1])
