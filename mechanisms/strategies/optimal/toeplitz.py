"""Optimal strategies of one column: Toeplitz, with a banded inverse, and the best λ and γ.

``optimal_toeplitz`` and ``optimal_banded_inverse`` minimise error times sensitivity (``loss``) by
L-BFGS, from the square root of the workload or its inverse, with coefficients relative to those of
the start. With more bands than the separation and several participations, coefficients are
constrained to be non-negative and, for ``min_separation``, non-increasing, so the sensitivity is
exact. The first coefficient is 1. The result is a local optimum.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> from affidavit.mechanisms.strategies.workload import Workload
>>> once = Participation.single()
>>> optimal_toeplitz(3, Workload(), once).round(3)
array([1.   , 0.39 , 0.171])

``best_lambda`` optimises bidiagonal noise w_t = z_t - λ z_{t-1}, whose error and sensitivity are
closed in λ: the variance of step t of A·N·z is r_t - 2λ q_t + λ² p_t, where r_t = Σ_j A[t,j]²,
q_t = Σ_j A[t,j] A[t,j+1] and p_t = r_t - A[t,0]². A is not negative, so only 0 ≤ λ ≤ 1 is searched.
The product is not convex: a grid that is dense towards 1 is evaluated and its minima are refined.

>>> epochs = Participation.fixed_epoch(participations=10, separation=100)
>>> round(best_lambda(1000, Workload(), epochs), 3)
0.953

``best_gamma`` searches γ of a banded inverse A^-γ in the same way. With two bands and no momentum,
γ is λ.

>>> round(best_gamma(1000, Workload(), epochs, bands=4), 3)
0.875

References: McKenna, arXiv:2405.15913; Choquette-Choo et al., arXiv:2306.08153; Kalinin,
McKenna, Upadhyay and Lampert, arXiv:2505.12128 (banded inverse); Fichtenberger, Henzinger
and Upadhyay, arXiv:2202.11205 (the start); Wang, *An Optimization View of DP LLM Fine-tuning*,
Theorems 7 and 9; Kalinin, McKenna, Pagh and Lampert, arXiv:2601.22334 (one scalar λ); Kalinin,
Rehn, Andersson, Honkela and Lampert, arXiv:2605.18379 (γ).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np

from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.numerics import Array, lfilter
from affidavit.mechanisms.strategies.optimal.loss import (
    LossAndGradient,
    ToeplitzLoss,
    minimize_loss,
    with_unit_rate,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.toeplitz import (
    banded_inverse_fractional_root,
    banded_inverse_root,
    banded_root,
)
from affidavit.mechanisms.strategies.workload import Workload

MAX_ITERATIONS, MIN_ITERATIONS = 1000, 10
"""Limits of the steps of one search."""
MAX_EVALUATIONS = 10_000_000
"""Coefficients that one search evaluates, in about ten seconds."""


def optimal_toeplitz(
    steps: int, workload: Workload, participation: Participation, *, bands: int | None = None
) -> Array:
    """Return the first column of C, c_0 = 1, shape (min(bands, T),), by default all T entries.

    A step of the search costs O(T · bands) or O(T log T). Raises ``TooLarge``.
    """
    loss = ToeplitzLoss.of(steps=steps, workload=workload, participation=participation)
    width = min(bands or steps, steps)
    if participation.max_participations(steps) == 1 or width <= participation.separation:
        return _search(loss.of_strategy, _root(width), _iterations(steps))
    narrow = _search(loss.of_strategy, _root(participation.separation), _iterations(steps))
    search = _nonnegative if participation.schema == "fixed_epoch" else _decreasing
    starts = [_root(width)]
    if np.all(np.diff(narrow, append=0.0) <= 0):
        starts.append(np.concatenate([narrow, np.zeros(width - len(narrow))]))
    columns = [search(loss.of_strategy, start, _iterations(steps)) for start in starts]
    return min([*columns, *starts], key=lambda column: loss.of_strategy(column)[0])


def optimal_banded_inverse(
    steps: int, workload: Workload, participation: Participation, *, bands: int
) -> Array:
    """Return the first column of N = C⁻¹, n_0 = 1, shape (min(bands, T),).

    A step of the search costs O(T · bands). Raises ``TooLarge``.
    """
    width = min(bands, steps)
    loss = ToeplitzLoss.of(
        steps=steps, workload=workload, participation=participation, noise_bands=width
    )
    roots = [
        banded_inverse_root(steps, bands=width, momentum=momentum).noise_coefficients[:width]
        for momentum in sorted({0.0, workload.momentum})
    ]
    result = [_search(loss.of_noise, root, _iterations(steps)) for root in roots]
    return min(result, key=lambda column: loss.of_noise(column)[0])


def _iterations(steps: int) -> int:
    """Return the steps of a search; long runs take few, from a near-optimal start."""
    return min(MAX_ITERATIONS, max(MIN_ITERATIONS, MAX_EVALUATIONS // steps))


def _root(bands: int) -> Array:
    """Return the first coefficients of (1-x)^(-1/2), positive and decreasing."""
    return banded_root(bands, bands=bands).strategy_coefficients


def _search(
    loss: LossAndGradient, start: Array, iterations: int, *, scale: Array | None = None
) -> Array:
    """Return the best column with first entry 1, as multiples of ``start``.

    With ``scale`` the entries are non-negative multiples of that column instead.
    """
    if len(start) == 1:
        return np.ones(1)
    tail = start[1:] if scale is None else scale[1:]

    def relative(multiples: Array) -> tuple[float, Array]:
        value, gradient = loss(np.concatenate([[1.0], tail * multiples]))
        return value, gradient[1:] * tail

    bounds = None if scale is None else [(0.0, None)] * len(tail)
    minimum = minimize_loss(relative, start[1:] / tail, bounds=bounds, iterations=iterations)
    return np.concatenate([[1.0], tail * minimum.point])


def _nonnegative(loss: LossAndGradient, start: Array, iterations: int) -> Array:
    """Return the best non-negative column with first entry 1."""
    return _search(loss, start, iterations, scale=_root(len(start)))


def _decreasing(loss: LossAndGradient, start: Array, iterations: int) -> Array:
    """Return the best non-negative, non-increasing column with first entry 1."""
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
"""Values of λ that are evaluated first; the optimum approaches 1 like 1 - c/b."""

LAMBDA_DIGITS = 4
"""Significant digits of 1 - λ. The loss is flat at its minimum: more digits change it by less than
1e-6 and differ between machines."""


def best_lambda(steps: int, workload: Workload, participation: Participation) -> float:
    """Return λ in [0, 1] with the least error times sensitivity, in O(T); prefix sums in O(1)."""
    error = squared_error(steps, workload)

    def loss(rate: float) -> float:
        return error(rate) * Bidiagonal.of(rate, steps).sensitivity(participation).value ** 2

    return _least(loss, GRID)


GAMMAS = np.concatenate([np.linspace(0.1, 0.9, 5), 1 - np.geomspace(0.1, 1e-5, 9)[1:], [1.0]])
"""Values of γ that are evaluated first."""


def best_gamma(
    steps: int, workload: Workload, participation: Participation, *, bands: int
) -> float:
    """Return γ in [0.1, 1] with the least error times sensitivity, in O(T · bands).

    Raises ``TooLarge`` for learning rates over too many steps.
    """
    width = min(bands, steps)
    if width == 1:
        return 0.5  # N is the identity for every γ
    loss = ToeplitzLoss.of(
        steps=steps, workload=workload, participation=participation, noise_bands=width
    )

    def of_root(power: float) -> float:
        root = banded_inverse_fractional_root(
            width, bands=width, gamma=power, momentum=workload.momentum
        )
        return loss.of_noise(root.noise_coefficients)[0]

    return _least(of_root, GAMMAS)


def _least(loss: Callable[[float], float], grid: Array) -> float:
    """Return the point with the least loss, 1 - point in ``LAMBDA_DIGITS`` digits."""
    from scipy.optimize import minimize_scalar  # imports slowly

    losses = [loss(float(rate)) for rate in grid]
    best, least = float(grid[int(np.argmin(losses))]), min(losses)
    for index in range(len(grid)):
        left, right = max(index - 1, 0), min(index + 1, len(grid) - 1)
        if losses[index] > min(losses[left], losses[right]):
            continue
        minimum = minimize_scalar(
            loss, bounds=(grid[left], grid[right]), method="bounded", options={"xatol": 1e-12}
        )
        if minimum.fun < least:
            best, least = float(minimum.x), float(minimum.fun)
    return float(1 - Decimal(f"{1 - best:.{LAMBDA_DIGITS}g}"))


def squared_error(steps: int, workload: Workload) -> Callable[[float], float]:
    """Return the function from λ to the mean variance over the steps, at unit noise."""
    if workload.is_prefix_sum:
        return lambda rate: 1 + (1 - rate) ** 2 * ((steps - 1) / 2)
    own, shifted, later = map(np.mean, _row_products(steps, with_unit_rate(workload)))
    return lambda rate: float(own - 2 * rate * shifted + rate * rate * later)


def _row_products(steps: int, workload: Workload) -> tuple[Array, Array, Array]:
    """Return r_t, q_t and p_t of every row of A, in O(T).

    They follow from A[t,j] = A[t-1,j] + η_t β^{t-j} = η_j + β A[t,j+1].
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
    """Return y_t = rate · y_{t-1} + values_t."""
    return np.asarray(lfilter([1.0], [1.0, -rate], values))
