"""Optimal dense and banded strategies; the dense one has a proved gap to the optimum.

``optimal_dense`` minimises Σ_t w_t ‖row t of A C⁻¹‖² · sens(C)² over X = CᵀC by its dual
(``dual``), which has one block for each pattern of steps of one record. The optimum has no entries
between steps of one pattern and equal traces, so its sensitivity is exact
(docs/theorems/optimal-strategies.md, Theorem 2).

* One participation: V is a diagonal v.
* ``fixed_epoch`` with k·b ≥ T: the patterns are the residues modulo b.
* ``min_separation`` with k ≥ 2: the best of the strategies for the residues modulo max(b, ⌈T/k⌉),
  the optimal banded one and the optimal decreasing Toeplitz one. The gap need not close.
* ``max``: the weights are searched too (Σ w = 1). If the search stays far from the optimum, the
  strategy for rms is a candidate, and the gap states what is not known.

The gap is between the certified loss of the resulting C and the proved bound. The convergence-aware
weighting Λ_τ only changes the workload of the objective to Λ_τ A; the injected noise stays C⁻¹z.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> C, gap = optimal_dense(np.tri(4), Participation.single())
>>> bool(0 <= gap < 1e-4), C.shape
(True, (4, 4))

``optimal_banded`` returns the best lower-triangular C with b̂ diagonals and columns of norm 1, whose
sensitivity is √k for participations at least b̂ apart. With E = A C⁻¹, W = diag(w) and
S = Σ_t w_t ‖E_t‖², the gradient is ∂ log S / ∂C = -(2/S) (Eᵀ W E) C⁻ᵀ on the diagonals, projected
for the normalisation, in O(T³) per step. The largest error is approximated by the 32-norm, then the
512-norm, of the variances. The start is the best banded Toeplitz strategy for the prefix sum.

>>> C = optimal_banded(np.tri(6), bands=2)
>>> np.linalg.norm(C, axis=0).round(12).tolist()
[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
>>> bool(np.any(np.tril(C, -2)))
False

References: those of ``dual``; Koloskova, McKenna, Charles, Rush and McMahan, arXiv:2302.01463
(Λ_τ); Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu, arXiv:2306.08153, section 4,
and McKenna, arXiv:2405.15913 (banded).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.optimal.dual import Dual, error_lower_bound, squared_error
from affidavit.mechanisms.strategies.optimal.loss import UnsupportedObjective, minimize_loss
from affidavit.mechanisms.strategies.optimal.toeplitz import optimal_toeplitz
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import Unaffordable, matrix_sensitivity
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.mechanisms.strategies.workload import Workload

Objective = Literal["rms", "max"]

MAX_OPTIMISED = 2048
"""Steps up to which every entry is searched: half a minute on one core, a minute if banded."""
TOLERANCE = 1e-5
"""The relative gap of the squared loss at which the search ends."""
MAX_GAP = 0.01
"""The relative gap above which the search is repeated with damping."""
MIN_DIAGONAL = 1e-9
"""The least diagonal entry of A over its largest entry for a search without damping."""
DAMPING = (1e-3, 3e-4, 1e-4)
"""Sizes of the added rows over the root mean square column of A, tried in turn."""


def optimal_dense(
    matrix: Array, participation: Participation, objective: Objective = "rms"
) -> tuple[Array, float]:
    """Return C, lower triangular with sensitivity 1, shape (T, T), and its proved relative gap.

    ``matrix`` is the workload A, lower triangular without zeros on its diagonal. The gap is that
    of the squared loss: (error · sens)² ≤ (1 + gap) · (error · sens)² of every other strategy.
    Raises ``TooLarge`` and, for ``fixed_epoch`` with k·b < T, ``UnsupportedObjective``.
    """
    steps = len(matrix)
    if steps > MAX_OPTIMISED:
        raise TooLarge(f"optimising a dense strategy over {steps} steps")
    most, separation = participation.max_participations(steps), participation.separation
    if participation.schema == "fixed_epoch" and most * separation < steps and most > 1:
        raise UnsupportedObjective(
            "a dense strategy for a fixed order needs every step to lie in an epoch"
        )
    has_free_order = most > 1 and participation.schema == "min_separation"
    patterns = max(separation, -(-steps // most)) if most > 1 else steps
    goal = _Goal(
        matrix=matrix / np.max(np.abs(matrix)),
        weights=np.full(steps, 1 / steps),
        participation=participation,
        largest=objective == "max",
    )
    uneven = float(np.min(np.abs(np.diagonal(goal.matrix)))) < MIN_DIAGONAL
    first, *others = DAMPING if uneven else (0.0, *DAMPING)
    best, loss, bound = goal.attempt(patterns, first)
    for damping in others:
        if loss <= (1 + MAX_GAP) * bound:
            break
        # Rows or columns of A with tiny weight leave X undetermined in doubles.
        other, smaller, higher = goal.attempt(patterns, damping)
        best, loss = (other, smaller) if smaller < loss else (best, loss)
        bound = max(bound, higher)
    candidates = _separated(goal, objective) if has_free_order else []
    if goal.largest and not loss <= (1 + MAX_GAP) * bound:
        candidates.append(replace(goal, largest=False).attempt(patterns, 0.0)[0])
    for candidate in candidates:
        value = goal.loss(candidate)
        best, loss = (candidate, value) if value < loss else (best, loss)
    # The variances are sums of squares: relative rounding of about T units.
    gap = loss * (1 + 1e-11) / bound - 1 if bound > 0 else np.inf
    return goal.scaled(best), max(float(gap), 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Goal:
    """The objective: A with largest entry 1, w with Σ w = 1, and the participation."""

    matrix: Array
    weights: Array
    participation: Participation
    largest: bool

    def attempt(self, patterns: int, damping: float) -> tuple[Array, float, float]:
        """Return C, its squared loss and a lower bound of every squared loss, from one search.

        ``damping`` adds rows that weigh the injected noise itself, relative to the columns of A.
        """
        steps = len(self.matrix)
        matrix, weights = self.matrix, self.weights
        if damping:
            size = damping * float(np.sqrt(np.mean(np.sum(matrix**2, axis=0))))
            matrix = np.concatenate([matrix, size * np.eye(steps)])
            weights = np.concatenate([weights, np.full(steps, 1 / steps)]) / 2
        most = -(-steps // patterns)
        dual = Dual.of(matrix, weights, patterns=patterns, most=most, searched=self.largest)
        point = dual.solve(TOLERANCE)
        strategy = dual.strategy(point)
        rows = dual.row_weights(point)[:steps]
        bound = error_lower_bound(self.matrix, dual.factors(point), rows / np.sum(rows))
        return strategy, self.loss(strategy), bound

    def loss(self, strategy: Array) -> float:
        """Return the squared loss at the certified sensitivity; ∞ if none can be certified."""
        try:
            size = matrix_sensitivity(strategy, self.participation).value
        except Unaffordable:
            return np.inf
        weights = None if self.largest else self.weights
        return squared_error(self.matrix, strategy, weights) * size**2

    def scaled(self, strategy: Array) -> Array:
        """Return C scaled to sensitivity 1."""
        return np.asarray(strategy / matrix_sensitivity(strategy, self.participation).value)


def _separated(goal: _Goal, objective: Objective) -> list[Array]:
    """Return candidates for ``min_separation``: a banded and a decreasing Toeplitz strategy."""
    matrix, participation = goal.matrix, goal.participation
    column = optimal_toeplitz(len(matrix), Workload(), participation)
    return [
        optimal_banded(matrix, participation.separation, objective, goal.weights),
        np.asarray(toeplitz(column, np.zeros(len(matrix)))),
    ]


def convergence_aware(steps: int, tau: int) -> Array:
    """Return Λ_τ, shape (T, T): errors since the last restart, every τ steps (arXiv:2302.01463).

    With t from 1, a row t that τ divides has 1 at t and -1 at t - τ; all others have 1/√τ at t and
    -1/√τ at the last restart before t. The objective is that of the workload Λ_τ A.

    Raises ``ValueError`` for a ``tau`` below 1.
    """
    if tau < 1:
        raise ValueError("tau must be at least 1")
    result = np.zeros((steps, steps))
    for place in range(steps):
        restart = (place + 1) % tau == 0
        size = 1.0 if restart else tau**-0.5
        result[place, place] = size
        before = (place // tau) * tau - 1
        if before >= 0:
            result[place, before] = -size
    return result


ITERATIONS = 60
"""Steps of the search; two hundred would gain at most another tenth of a percent."""
POWERS = (32, 512)
"""Norms of the variances that approximate the largest one, within a factor T^(1/512)."""


def optimal_banded(
    matrix: Array, bands: int, objective: Objective = "rms", weights: Array | None = None
) -> Array:
    """Return C, shape (T, T), with ``bands`` diagonals and columns of norm 1.

    ``matrix`` is the workload A, and ``weights`` w > 0 of its rows (for ``rms``) are equal by
    default. Raises ``TooLarge``.
    """
    steps = len(matrix)
    if steps > MAX_OPTIMISED:
        raise TooLarge(f"optimising every entry of a banded strategy over {steps} steps")
    matrix = matrix / np.max(np.abs(matrix))
    rows = np.full(steps, 1 / steps) if weights is None else weights / np.sum(weights)
    width = min(bands, steps)
    column = optimal_toeplitz(steps, Workload(), Participation.single(), bands=width)
    places = np.arange(steps)[:, None] + np.arange(width)
    inside = places < steps

    def columns(multiples: Array) -> tuple[Array, Array]:
        entries = np.where(inside, multiples.reshape(steps, width) * column, 0.0)
        norms = np.linalg.norm(entries, axis=1, keepdims=True)
        return entries / norms, norms

    def loss(multiples: Array, power: int) -> tuple[float, Array]:
        unit, norms = columns(multiples)
        value, band = _log_error(unit, matrix, rows, power)
        band = (band - np.sum(band * unit, axis=1, keepdims=True) * unit) / norms
        return value, (band * column).ravel()

    point = np.ones(steps * width)
    for power in (1,) if objective == "rms" else POWERS:
        search = functools.partial(loss, power=power)
        point = minimize_loss(search, point, precision=1e-8, iterations=ITERATIONS).point
    across = np.broadcast_to(np.arange(steps)[:, None], places.shape)
    result = np.zeros((steps, steps))
    result[places[inside], across[inside]] = columns(point)[0][inside]
    return result


def _log_error(columns: Array, matrix: Array, rows: Array, power: int) -> tuple[float, Array]:
    """Return log of (Σ w_t variance_t^p)^(1/p) and its gradient in the entries of C.

    ``columns`` and the gradient have the band of column j of C in row j, from its diagonal on.
    """
    is_sum = np.array_equal(matrix, np.tri(len(matrix)))
    noise = _inverse_of_band(columns)
    errors = np.cumsum(noise, axis=0) if is_sum else matrix @ noise
    variance = np.sum(errors**2, axis=1)
    largest = np.max(variance)
    scaled = variance / largest
    total = rows @ scaled**power
    errors *= 2 * (rows * scaled ** (power - 1) / (total * largest))[:, None]
    pulled = np.cumsum(errors[::-1], axis=0)[::-1] if is_sum else matrix.T @ errors
    return float(np.log(largest) + np.log(total) / power), -_pulled_through(pulled, columns, noise)


def _inverse_of_band(columns: Array) -> Array:
    """Return C⁻¹, shape (T, T), row by row."""
    steps, width = columns.shape
    result = np.zeros((steps, steps))
    for step in range(steps):
        row = result[step, : step + 1]
        for back in range(1, min(width, step + 1)):
            row[:-1] -= columns[step - back, back] * result[step - back, :step]
        row[step] = 1.0
        row /= columns[step, 0]
    return result


def _pulled_through(pulled: Array, columns: Array, noise: Array) -> Array:
    """Return the band of ``(Cᵀ)⁻¹ pulled noiseᵀ`` as ``columns`` has it, shape (T, b).

    Only the lower triangle counts.
    """
    steps, width = columns.shape
    solved, result = np.ascontiguousarray(pulled), np.zeros((steps, width))
    for step in range(steps - 1, -1, -1):
        row = solved[step, : step + 1]
        for ahead in range(1, min(width, steps - step)):
            row -= columns[step, ahead] * solved[step + ahead, : step + 1]
        row /= columns[step, 0]
        for back in range(min(width, step + 1)):
            column = step - back
            result[column, back] = row[: column + 1] @ noise[column, : column + 1]
    return result
