"""The loss of Toeplitz strategies, log(error²) + log(sensitivity²), and its minimiser.

The value and gradient in the first column of C, or of N = C⁻¹, cost O(T · p) for p coefficients up
to ``MAX_DIRECT_LENGTH`` and O(T log T) beyond. The error is that of the workload:

* Toeplitz workloads: e = a * n with a the first column of A, and rms² = Σ_t (1 - t/T) e_t²;
* learning rates: rms² = nᵀ Q n with Q_st = (1/T) Σ_j (AᵀA)_{j+s, j+t}, formed once in O(T²).

The sensitivity is the bound of ``toeplitz_sensitivity`` without rounding.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> from affidavit.mechanisms.strategies.workload import Workload
>>> loss = ToeplitzLoss.of(steps=2, workload=Workload(), participation=Participation.single())
>>> round(float(np.exp(loss.of_strategy(np.array([1.0, 0.5]))[0])), 6)  # 1.25 · (1 + 0.25/2)
1.40625

References: McKenna, arXiv:2405.15913 (optimising banded Toeplitz); Choquette-Choo et al.,
arXiv:2306.08153; Kalinin and Lampert, arXiv:2405.13763, Theorem 2; Squire and Trapp, SIAM Review 40
(1998) 110 (complex-step derivatives); Byrd, Lu, Nocedal and Zhu, SIAM J. Sci. Comput. 16 (1995)
1190 (L-BFGS-B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from affidavit.mechanisms.strategies.numerics import Array, fftconvolve, lfilter, padded
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.mechanisms.strategies.toeplitz import newton_reciprocal, reciprocal
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import MAX_MATRIX_STEPS

Objective = Literal["rms", "max"]

MAX_DIRECT_LENGTH = 128
"""Coefficients up to which a recurrence is faster than fast Fourier transforms."""

MAX_COEFFICIENT = 1e100
"""Coefficients above which C or N has no useful inverse."""
DIVERGED_LOSS = 1e3
"""The loss without an inverse: far above any other and finite, for the line search."""


class UnsupportedObjective(ValueError):
    """This construction does not support the combination of objective and workload."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ToeplitzLoss:
    """The loss, with ``weights`` of e_t² for Toeplitz workloads or else ``quadratic`` Q."""

    steps: int
    workload: Workload
    participation: Participation
    weights: Array | None
    quadratic: Array | None

    @classmethod
    def of(
        cls,
        *,
        steps: int,
        workload: Workload,
        participation: Participation,
        noise_bands: int | None = None,
    ) -> ToeplitzLoss:
        """Return the loss; ``noise_bands`` is the number of coefficients of N, by default all.

        Raises ``TooLarge`` for learning rates over too many steps.
        """
        weights = quadratic = None
        workload = with_unit_rate(workload)
        if workload.learning_rates is None:
            weights = 1 - np.arange(steps) / steps
        else:
            quadratic = _quadratic(workload, steps, noise_bands or steps)
        return cls(
            steps=steps,
            workload=workload,
            participation=participation,
            weights=weights,
            quadratic=quadratic,
        )

    def of_strategy(self, column: Array) -> tuple[float, Array]:
        """Return the loss at the first column of C, shape (p,), and its gradient, shape (p,)."""
        noise = self._inverse(column)
        if noise is None:
            return DIVERGED_LOSS, np.zeros(len(column))
        error, by_noise = self.squared_error(noise)
        size, by_size = self.squared_sensitivity(column)
        by_error = _inverse_gradient(by_noise, column, noise)
        gradient = by_error / error + by_size[: len(column)] / size
        return float(np.log(error) + np.log(size)), gradient

    def of_noise(self, column: Array) -> tuple[float, Array]:
        """Return the loss at the first column of N, shape (p,), and its gradient, shape (p,)."""
        strategy = self._inverse(column)
        if strategy is None:
            return DIVERGED_LOSS, np.zeros(len(column))
        error, by_error = self.squared_error(column)
        size, by_strategy = self.squared_sensitivity(strategy)
        by_size = _inverse_gradient(by_strategy, column, strategy)
        gradient = by_error[: len(column)] / error + by_size / size
        return float(np.log(error) + np.log(size)), gradient

    def squared_error(self, noise: Array) -> tuple[float, Array]:
        """Return rms² at unit noise for the first column of N, and its gradient, (T,) or (p,)."""
        if self.quadratic is not None:
            pulled = self.quadratic[: len(noise), : len(noise)] @ noise
            return float(noise @ pulled), 2 * pulled
        assert self.weights is not None
        errors = self.workload.apply(padded(noise, self.steps))
        weighted = self.weights * errors
        # A is Toeplitz: Aᵀ is A between two reversals.
        return float(errors @ weighted), 2 * self.workload.apply(weighted[::-1])[::-1]

    def squared_sensitivity(self, column: Array) -> tuple[float, Array]:
        """Return sens² for the first column of C, up to T entries, and its gradient, (T,)."""
        full = padded(column, self.steps)
        most, separation = (
            self.participation.max_participations(self.steps),
            self.participation.separation,
        )
        if most == 1:
            return float(full @ full), 2 * full
        # The right derivative at zero, where searches over c ≥ 0 start and end.
        size, sign = np.abs(full), np.where(full < 0, -1.0, 1.0)
        apart = self.participation.schema == "fixed_epoch" or len(column) <= separation
        if apart or not np.any(np.diff(size) > 0):
            stacked = _stacked(size, most, separation)
            pulled = 2 * _stacked(stacked[::-1], most, separation)[::-1]
            return float(stacked @ stacked), sign * pulled
        majorant = np.maximum.accumulate(size[::-1])[::-1]
        stacked = _stacked(majorant, most, separation)
        pulled = 2 * _stacked(stacked[::-1], most, separation)[::-1]
        # Entry t of the majorant is the size at the next place where a maximum is attained.
        attained = np.where(size >= majorant, np.arange(self.steps), self.steps)
        place = np.minimum.accumulate(attained[::-1])[::-1]
        return float(stacked @ stacked), sign * np.bincount(place, pulled, self.steps)

    def _inverse(self, column: Array) -> Array | None:
        """Return the reciprocal series, or None if it is too large."""
        if not column[0] > 0:
            return None
        inverted = newton_reciprocal if len(column) > MAX_DIRECT_LENGTH else reciprocal
        with np.errstate(over="ignore", invalid="ignore"):
            series = inverted(column, self.steps)
        usable = np.all(np.isfinite(series)) and np.max(np.abs(series)) < MAX_COEFFICIENT
        return series if usable else None


def with_unit_rate(workload: Workload) -> Workload:
    """Return the workload with largest learning rate 1, to avoid overflow."""
    if workload.learning_rates is None:
        return workload
    largest = max(workload.learning_rates)
    rates = tuple(rate / largest for rate in workload.learning_rates)
    return Workload(momentum=workload.momentum, learning_rates=rates)


def _inverse_gradient(by_inverse: Array, column: Array, inverse: Array) -> Array:
    """Return the gradient in a column from that in its reciprocal series, d(1/c) = -(1/c²) dc."""
    inner = _divided(by_inverse[::-1], column, inverse)[::-1]
    return np.asarray(-_correlation(inner, inverse, len(column)))


def _divided(values: Array, column: Array, inverse: Array) -> Array:
    """Return values / column as power series, up to their length."""
    if len(column) > MAX_DIRECT_LENGTH:
        return np.asarray(fftconvolve(values, inverse)[: len(values)])
    return np.asarray(lfilter([1.0], column, values))


def _correlation(left: Array, right: Array, lags: int) -> Array:
    """Return Σ_t left_t right_{t-m} for m < lags."""
    if lags > MAX_DIRECT_LENGTH:
        return np.asarray(fftconvolve(left, right[::-1])[len(right) - 1 :][:lags])
    steps = len(left)
    return np.array([left[lag:] @ right[: steps - lag] for lag in range(lags)])


def _stacked(values: Array, most: int, separation: int) -> Array:
    """Return Σ_{j<k} S^{jb} values."""
    steps = len(values)
    rows = -(-steps // separation)
    sums = np.cumsum(padded(values, rows * separation).reshape(rows, separation), axis=0)
    if most < rows:
        sums[most:] -= sums[:-most].copy()
    return np.asarray(sums.ravel()[:steps])


def _quadratic(workload: Workload, steps: int, bands: int) -> Array:
    """Return Q, shape (bands, bands): sums of AᵀA along its diagonals, from each entry on."""
    if steps > MAX_MATRIX_STEPS:
        raise TooLarge(f"optimising for learning rates over {steps} steps")
    gram = workload.gram(steps)
    result = np.zeros((bands, bands))
    for lag in range(bands):
        sums = np.cumsum(np.diagonal(gram, lag)[::-1])[::-1] / steps
        places = np.arange(bands - lag)
        result[places, places + lag] = result[places + lag, places] = sums[: bands - lag]
    return result


LossAndGradient = Callable[[Array], tuple[float, Array]]


class Minimum(NamedTuple):
    """The last point of a search and its loss."""

    point: Array
    value: float


def minimize_loss(
    loss: LossAndGradient,
    start: Array,
    *,
    bounds: Sequence[tuple[float, float | None]] | None = None,
    precision: float = 1e-14,
    iterations: int = 1000,
    finished: Callable[[Array, float], bool] | None = None,
) -> Minimum:
    """Return a local minimum by L-BFGS-B.

    The search stops when the relative change of the loss is below ``precision``, or when
    ``finished``, called after every step with the point and its loss, returns true. ``start`` and
    the result have shape (n,), and ``bounds`` are n pairs.
    """
    objective: Any = loss
    options: Any = {
        "maxiter": iterations,
        "maxfun": 2 * iterations,
        "maxcor": 20,
        "ftol": precision,
        "gtol": 1e-8,
    }

    def stop_if_finished(intermediate_result: Any) -> None:
        if finished is not None and finished(intermediate_result.x, intermediate_result.fun):
            raise StopIteration

    from scipy.optimize import minimize  # imports slowly, and only calibration optimises

    method: Any = "L-BFGS-B"
    result = minimize(
        objective,
        start,
        jac=True,
        method=method,
        bounds=bounds,
        options=options,
        callback=stop_if_finished,
    )
    return Minimum(point=np.asarray(result.x, dtype=np.float64), value=float(result.fun))
