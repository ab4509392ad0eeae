"""Bidiagonal noise: w_t = z_t - λ z_{t-1}, with z before the first step zero.

N = L has 1 on the diagonal and -λ below it; C = L⁻¹ has first column 1, λ, λ², .... For one
participation sens is κ = √((1-λ^{2T})/(1-λ²)), the column norm of L⁻¹ (not √(1+λ²), that of L).
Several participations have a closed form too (docs/theorems/correlated-noise.md, Theorem 4), which
is evaluated in O(1) in 120 decimal digits, so λ near 1 or large k costs no accuracy. For λ < 0 sens
is that of |λ|. ``normalized`` divides every column of C by its norm: N = D L with D = diag(d_t).

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> round(Bidiagonal.of(0.9, steps=8).sensitivity(Participation.single()).value, 4)
2.0707

References: arXiv:2601.22334 (one scalar λ); Wang, *An Optimization View of DP LLM
Fine-tuning*, Theorem 7 (κ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.numerics import UNIT, Array, lfilter
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import Sensitivity, Unaffordable
from affidavit.mechanisms.strategies.strategy import Strategy, Streaming
from affidavit.mechanisms.strategies.toeplitz import Toeplitz

DECIMAL_CONTEXT = Context(prec=120, Emin=MIN_EMIN, Emax=MAX_EMAX)
"""1 - λ is at least 2^-53 and the sums cancel its square once: 40 of 120 digits at most."""
MAX_PARTICIPATIONS = 10_000_000
"""Terms of the sum for normalised columns, in a tenth of a second."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bidiagonal(Toeplitz):
    """λ in [-1, 1]; ``noise_column`` is (1, -λ)."""

    lambda_: float

    @classmethod
    def of(cls, lambda_: float, steps: int) -> Bidiagonal:
        """Return the strategy of w_t = z_t - λ z_{t-1}."""
        _require_stable(lambda_)
        column = np.array([1.0, 0.0 - lambda_][:steps])
        return cls(kind="bidiagonal", steps=steps, noise_column=column, lambda_=lambda_)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens(L⁻¹) in O(1), exact for every schema."""
        most = participation.max_participations(self.steps)
        value = _closed_sensitivity(abs(self.lambda_), self.steps, most, participation.separation)
        return Sensitivity(value=value, attained=value * (1 - 2 * UNIT))

    @cached_property
    def strategy_coefficients(self) -> Array:
        """1, λ, λ², ...; shape (T,)."""
        return np.asarray(np.power(self.lambda_, np.arange(self.steps, dtype=np.float64)))

    @property
    def is_nonnegative(self) -> bool:
        """Whether λ ≥ 0."""
        return self.lambda_ >= 0

    @property
    def bands(self) -> int:
        """T, because the inverse of a band is no band; 1 for λ = 0."""
        return self.steps if self.lambda_ else 1


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalizedBidiagonal(Strategy):
    """Bidiagonal noise with the columns of C at norm 1: N = D L, d_t the column norms."""

    lambda_: float

    @classmethod
    def of(cls, lambda_: float, steps: int) -> NormalizedBidiagonal:
        """Return the strategy of w_t = d_t (z_t - λ z_{t-1})."""
        _require_stable(lambda_)
        return cls(kind="bidiagonal", steps=steps, lambda_=lambda_)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens, exact, in O(k): sens² = k + 2 Σ_{m<n} |λ|^{(n-m)b} d_{nb} / d_{mb}.

        Raises ``Unaffordable`` for more than ``MAX_PARTICIPATIONS``.
        """
        most, separation = participation.max_participations(self.steps), participation.separation
        if most > MAX_PARTICIPATIONS:
            raise Unaffordable(f"summing over {most} participations")
        norms = self._norms(separation * np.arange(most))
        share = abs(self.lambda_) ** separation
        # s_n = q (s_{n-1} + 1/d_{(n-1)b}) = Σ_{m<n} q^{n-m} / d_{mb}
        reach = lfilter([0.0, share], [1.0, -share], 1 / norms)
        return Sensitivity.of_square(most + 2 * float(norms @ reach), 40 * most + 100)

    @property
    def streaming(self) -> Streaming:
        """One buffer, and a public factor per step."""
        return Streaming(
            form="moving_average",
            buffers=1,
            recurrence="w_t = d_t (z_t - λ z_{t-1}), d_t = √((1-λ^{2(T-t)}) / (1-λ²)), t from 0",
            coefficients=(1.0, -self.lambda_),
            scaled=True,
        )

    @property
    def is_nonnegative(self) -> bool:
        """Whether λ ≥ 0."""
        return self.lambda_ >= 0

    @property
    def bands(self) -> int:
        """T, because the inverse of a band is no band; 1 for λ = 0."""
        return self.steps if self.lambda_ else 1

    def noise_columns(self, first: int, last: int) -> Array:
        """Return columns first..last-1 of D L, shape (T, last - first)."""
        result = np.zeros((self.steps, last - first))
        places = np.arange(first, last)
        result[places, places - first] = self._norms(places)
        below = places[places + 1 < self.steps]
        result[below + 1, below - first] = -self.lambda_ * self._norms(below + 1)
        return result

    def _norms(self, places: NDArray[np.int_]) -> Array:
        left = (self.steps - places).astype(np.float64)
        size = abs(self.lambda_)
        if size == 1:
            return np.sqrt(left)
        if size == 0:
            return np.ones_like(left)
        squares = -np.expm1(2 * left * math.log(size)) / ((1 - size) * (1 + size))
        return np.asarray(np.sqrt(squares))


def _require_stable(lambda_: float) -> None:
    if not abs(lambda_) <= 1:
        raise ValueError("λ must lie between -1 and 1")


def _closed_sensitivity(lambda_: float, steps: int, most: int, separation: int) -> float:
    last = steps - (most - 1) * separation
    with localcontext(DECIMAL_CONTEXT):
        if lambda_ == 1:
            earlier = Decimal((most - 1) * most * (2 * most - 1) // 6)
            squared = separation * earlier + most * most * Decimal(last)
        else:
            rate = Decimal(lambda_)
            share = rate**separation if lambda_ else Decimal(0)
            whole = _squared_column_norm(rate, separation) * _sum_of_squared_sums(share, most)
            squared = whole + _geometric_sum(share, most) ** 2 * _squared_column_norm(rate, last)
        return _double_up(squared.sqrt())


def _squared_column_norm(rate: Decimal, length: int) -> Decimal:
    """Return Σ_{s < length} λ^{2s}."""
    power = rate ** (2 * length) if rate else Decimal(0)
    return (1 - power) / (1 - rate * rate)


def _geometric_sum(share: Decimal, terms: int) -> Decimal:
    """Return Σ_{j < terms} q^j."""
    power = share**terms if share else Decimal(0)
    return (1 - power) / (1 - share)


def _sum_of_squared_sums(share: Decimal, most: int) -> Decimal:
    """Return Σ_{m=1}^{k-1} ((1-q^m)/(1-q))², from the geometric sums of the expanded square."""
    if most == 1:
        return Decimal(0)
    once = share * _geometric_sum(share, most - 1)
    square = share * share
    twice = square * _geometric_sum(square, most - 1)
    return (most - 1 - 2 * once + twice) / (1 - share) ** 2


def _double_up(value: Decimal) -> float:
    nearest = float(value)
    return nearest if Decimal(nearest) >= value else math.nextafter(nearest, math.inf)
