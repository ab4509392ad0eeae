"""Optimal strategies of one column: Toeplitz, with a banded inverse, and the best λ.

All Toeplitz strategies minimise error times sensitivity (``loss``) by L-BFGS, starting from the
square root of the workload or its inverse, which are near optimal for one participation.
Coefficients are searched relative to those of the start, which makes early and late ones
count alike.

* ``optimal_toeplitz`` with ``bands`` at most the separation: columns b apart do not
  overlap, every sign is exact, no constraint.
* more bands, several participations: coefficients that are not negative and, for
  ``min_separation``, do not increase, c_m = Σ_{i≥m} d_i with d ≥ 0, so that the sensitivity
  is exact. The loss is not convex; the search starts from the square root and from the best
  strategy of b bands, and keeps the better result.
* ``optimal_banded_inverse``: p coefficients of N. Where C would increase, the loss counts
  its reverse running maximum, which is what can be certified.

The first coefficient is 1 in every result. What comes out is a local optimum: a strategy to
be certified by its own sensitivity, whatever the search did.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> from affidavit.mechanisms.strategies.workload import Workload
>>> once = Participation.single()
>>> optimal_toeplitz(3, Workload(), once).round(3)
array([1.   , 0.39 , 0.171])

**The best λ** of bidiagonal noise w_t = z_t - λ z_{t-1} (``best_lambda``). Error and
sensitivity are both closed in λ. With N = I - λS and S the shift, the variance of step t of
A·N·z is a quadratic r_t - 2λ q_t + λ² p_t, where r_t = Σ_j A[t,j]², q_t = Σ_j A[t,j] A[t,j+1]
and p_t = r_t - A[t,0]²; for the prefix sum the rms² is 1 + (1-λ)² (T-1)/2. The three sums need
one pass over the steps, O(T), and every λ is then O(1), as is the
closed sensitivity of ``bidiagonal``.

A is not negative, so that λ < 0 has a larger error at the sensitivity of |λ|: only 0 ≤ λ ≤ 1
is searched. The product is not convex in λ: it is scanned on a grid that is dense towards 1,
and every grid minimum is refined, so that a local minimum is not mistaken for the best.

>>> epochs = Participation.fixed_epoch(participations=10, separation=100)
>>> round(best_lambda(1000, Workload(), epochs), 3)
0.953

References: McKenna, arXiv:2405.15913; Choquette-Choo et al., arXiv:2306.08153; Kalinin,
McKenna, Upadhyay and Lampert, arXiv:2505.12128 (banded inverse); Fichtenberger, Henzinger
and Upadhyay, arXiv:2202.11205 (the start); Wang, *An Optimization View of DP LLM Fine-tuning*,
Theorems 7 and 9; Kalinin, McKenna, Pagh and Lampert, arXiv:2601.22334 (one scalar λ).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.numerics import lfilter
from affidavit.mechanisms.strategies.optimal.loss import (
    LossAndGradient,
    ToeplitzLoss,
    at_unit_rate,
    minimize_loss,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.toeplitz import banded_inverse_root, banded_root
from affidavit.mechanisms.strategies.workload import Workload

Array = NDArray[np.float64]

MAX_ITERATIONS, MIN_ITERATIONS = 1000, 10
"""Steps of one search."""
SEARCHED = 10_000_000
"""Coefficients that one search evaluates, some ten seconds."""


def optimal_toeplitz(
    steps: int, workload: Workload, participation: Participation, *, bands: int | None = None
) -> Array:
    """First column of C, c_0 = 1, of shape (min(bands, T),), all T entries by default.

    O(T · bands) or O(T log T) a step of the search. Raises ``TooLarge``.
    """
    loss = ToeplitzLoss.of(steps=steps, workload=workload, participation=participation)
    width = min(bands or steps, steps)
    if participation.most(steps) == 1 or width <= participation.separation:
        return _free(loss.of_strategy, _root(width), _iterations(steps))
    narrow = _free(loss.of_strategy, _root(participation.separation), _iterations(steps))
    search = _nonnegative if participation.schema == "fixed_epoch" else _decreasing
    starts = [_root(width)]
    if np.all(np.diff(narrow, append=0.0) <= 0):
        starts.append(np.concatenate([narrow, np.zeros(width - len(narrow))]))
    columns = [search(loss.of_strategy, start, _iterations(steps)) for start in starts]
    return min([*columns, *starts], key=lambda column: loss.of_strategy(column)[0])


def optimal_banded_inverse(
    steps: int, workload: Workload, participation: Participation, *, bands: int
) -> Array:
    """First column of N = C⁻¹, n_0 = 1, of shape (min(bands, T),).

    O(T · bands) a step of the search. Raises ``TooLarge``.
    """
    width = min(bands, steps)
    loss = ToeplitzLoss.of(
        steps=steps, workload=workload, participation=participation, noise_bands=width
    )
    roots = [
        banded_inverse_root(steps, bands=width, momentum=momentum).noise_coefficients[:width]
        for momentum in sorted({0.0, workload.momentum})
    ]
    result = [_free(loss.of_noise, root, _iterations(steps)) for root in roots]
    return min(result, key=lambda column: loss.of_noise(column)[0])


def _iterations(steps: int) -> int:
    """Steps of a search; where each is long the start, which is near optimal, is little changed."""
    return min(MAX_ITERATIONS, max(MIN_ITERATIONS, SEARCHED // steps))


def _root(bands: int) -> Array:
    """The first coefficients of (1-x)^(-1/2): positive and decreasing."""
    return banded_root(bands, bands=bands).strategy_coefficients


def _free(loss: LossAndGradient, start: Array, iterations: int) -> Array:
    """The best column with first entry 1; entries are searched as multiples of ``start``."""
    return _along(loss, start, start, None, iterations)


def _nonnegative(loss: LossAndGradient, start: Array, iterations: int) -> Array:
    """The best column that is not negative, with first entry 1."""
    return _along(loss, start, _root(len(start)), 0.0, iterations)


def _along(
    loss: LossAndGradient, start: Array, scale: Array, floor: float | None, iterations: int
) -> Array:
    if len(start) == 1:
        return np.ones(1)
    tail = scale[1:]

    def relative(multiples: Array) -> tuple[float, Array]:
        value, gradient = loss(np.concatenate([[1.0], tail * multiples]))
        return value, gradient[1:] * tail

    bounds = None if floor is None else [(floor, None)] * len(tail)
    minimum = minimize_loss(relative, start[1:] / tail, bounds=bounds, iterations=iterations)
    return np.concatenate([[1.0], tail * minimum.point])


def _decreasing(loss: LossAndGradient, start: Array, iterations: int) -> Array:
    """The best column that is not negative and does not increase, with first entry 1."""
    root = _root(len(start))
    scale = root - np.append(root[1:], 0.0)

    def falls(multiples: Array) -> tuple[float, Array]:
        column = np.cumsum((scale * multiples)[::-1])[::-1]
        value, gradient = loss(column)
        return value, np.cumsum(gradient) * scale

    first = (start - np.append(start[1:], 0.0)) / scale
    bounds = [(0.0, None)] * len(start)
    minimum = minimize_loss(falls, first, bounds=bounds, iterations=iterations)
    column = np.cumsum((scale * np.maximum(minimum.point, 0.0))[::-1])[::-1]
    return np.asarray(column / column[0])


GRID = np.concatenate([np.linspace(0.0, 0.99, 100), 1 - np.geomspace(0.01, 1e-9, 71)[1:], [1.0]])
"""Values of λ that are tried first; the optimum moves towards 1 like 1 - c/b."""

DIGITS = 4
"""Of 1 - λ that are kept. The loss is flat at its least, where more of them change it by less
than 1e-6 of itself, differ from machine to machine, and burden whoever writes λ down."""


def best_lambda(steps: int, workload: Workload, participation: Participation) -> float:
    """λ in [0, 1] with the least error times sensitivity; O(T) once, O(1) for the prefix sum."""
    error = squared_error(steps, workload)

    def loss(rate: float) -> float:
        return error(rate) * Bidiagonal.of(rate, steps).sensitivity(participation).value ** 2

    losses = [loss(float(rate)) for rate in GRID]
    best, least = float(GRID[int(np.argmin(losses))]), min(losses)
    for place in range(len(GRID)):
        left, right = max(place - 1, 0), min(place + 1, len(GRID) - 1)
        if losses[place] > min(losses[left], losses[right]):
            continue
        minimum = minimize_scalar(
            loss, bounds=(GRID[left], GRID[right]), method="bounded", options={"xatol": 1e-12}
        )
        if minimum.fun < least:
            best, least = float(minimum.x), float(minimum.fun)
    return float(1 - Decimal(f"{1 - best:.{DIGITS}g}"))


def squared_error(steps: int, workload: Workload) -> Callable[[float], float]:
    """λ ↦ the mean variance over the steps, at unit noise."""
    if workload.is_prefix_sum:
        return lambda rate: 1 + (1 - rate) ** 2 * ((steps - 1) / 2)
    own, shifted, later = map(np.mean, _row_products(steps, at_unit_rate(workload)))
    return lambda rate: float(own - 2 * rate * shifted + rate * rate * later)


def _row_products(steps: int, workload: Workload) -> tuple[Array, Array, Array]:
    """r_t, q_t and p_t of every row of A, in O(T).

    From A[t,j] = A[t-1,j] + η_t β^{t-j} = η_j + β A[t,j+1].
    """
    beta, rates = workload.momentum, workload.rates(steps)
    powers = _filtered(np.ones(steps), beta * beta)  # Σ_{j≤t} β^{2(t-j)}
    aligned = _filtered(rates * powers, beta)  # Σ_j β^{t-j} A[t,j]
    before = beta * np.concatenate([[0.0], aligned[:-1]])
    own = np.cumsum(2 * rates * before + rates**2 * powers)
    first = np.cumsum(rates * beta ** np.arange(steps))  # A[t,0]
    later = own - first**2
    # Σ_j A[t,j] A[t,j+1] = Σ_j η_j A[t,j+1] + β p_t, and the first sum grows by
    # η_t Σ_{j<t} η_j β^{t-1-j} from row to row.
    weighted = np.cumsum(rates * np.concatenate([[0.0], _filtered(rates, beta)[:-1]]))
    return own, weighted + beta * later, later


def _filtered(values: Array, rate: float) -> Array:
    """y_t = rate · y_{t-1} + values_t."""
    return np.asarray(lfilter([1.0], [1.0, -rate], values))
