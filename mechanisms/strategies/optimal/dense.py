"""Optimal dense and banded strategies, the dense one with a proof of how near it is to the optimum.

Minimise Σ_t w_t ‖row t of A C⁻¹‖² · sens(C)² over every C, that is over X = CᵀC, by its dual
(``dual``), which has one block for each pattern of steps that one record may share. At its
maximum, X has no entries between different steps of one pattern and equal traces on all of them.
Such an X is non-negative inside every pattern and its sensitivity is exact, √(trace). So the
optimum over strategies whose columns are orthogonal inside patterns is the optimum over all
strategies, contributions being vectors of any sign.

* One participation: V is a diagonal v.
* ``fixed_epoch`` with k·b ≥ T: the patterns are the residues modulo b.
* ``min_separation`` with k ≥ 2: the residues modulo max(b, ⌈T/k⌉) are some of its patterns,
  so the bound holds; the strategy is the best of the one for those residues, the optimal banded
  one (X banded with b diagonals, exact) and the optimal decreasing Toeplitz one, each at
  the sensitivity that can be certified for it. The gap need not close.
* ``max``: the weights are searched too (Σ w = 1). Under momentum with falling rates, where a
  few last steps decide, the search may stay far from the optimum; the strategy for rms is
  then a candidate, and the gap says what is not known.

X is made feasible (entries inside patterns removed, traces equal) and factored from the lower
right, C = (chol(X[::-1, ::-1])ᵀ)[::-1, ::-1]; the gap is between that C, with the sensitivity
that can be certified for it, and the proved bound. The convergence-aware weighting Λ_τ changes the
workload of the objective to Λ_τ A and nothing else; the noise injected stays C⁻¹z.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> C, gap = optimal_dense(np.tri(4), Participation.single())
>>> bool(0 <= gap < 1e-4), C.shape
(True, (4, 4))

**Banded** (``optimal_banded``): the best strategy whose columns all have norm 1. C is lower
triangular with b̂ diagonals. Participations at least b̂ apart then touch columns that do not
overlap, so that the sensitivity is √k, exactly, for every sign and for every pattern at least
b̂ apart; and cyclic Poisson sampling amplifies it. What is left is the error, ‖A C⁻¹‖. With E =
A C⁻¹, W = diag(w) and S = Σ_t w_t ‖E_t‖²,

    ∂ log S / ∂C = -(2/S) (Eᵀ W E) C⁻ᵀ    on the b̂ diagonals,

followed by the projection that normalising the columns implies; O(T³) a step. The largest
error is approached by the 32-norm, then the 512-norm, of the steps' variances. The
search starts from the best banded Toeplitz strategy for the prefix sum, with its columns
normalised, and entries are searched as multiples of that start. For thousands of steps the
start itself is within two percent.

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
from numpy.typing import NDArray
from scipy.linalg import solve_triangular, toeplitz

from affidavit.mechanisms.strategies.optimal.dual import Dual, smallest_error, squared_error
from affidavit.mechanisms.strategies.optimal.loss import NotOffered, minimize_loss
from affidavit.mechanisms.strategies.optimal.toeplitz import optimal_toeplitz
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import Unaffordable, of_matrix
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.mechanisms.strategies.workload import Workload

Array = NDArray[np.float64]
Objective = Literal["rms", "max"]

MAX_OPTIMISED = 2048
"""Steps up to which every entry is searched: half a minute on one core, a minute where banded."""
TOLERANCE = 1e-5
"""Relative gap of the squared loss at which the search ends."""
POOR = 0.01
"""Relative gap above which the search is repeated with damping."""
UNEVEN = 1e-9
"""Least diagonal entry of A, beside its largest entry, below which damping comes first."""
DAMPING = (1e-3, 3e-4, 1e-4)
"""Sizes of the added rows beside the root mean square column of A, tried in turn."""


def optimal_dense(
    matrix: Array, participation: Participation, objective: Objective = "rms"
) -> tuple[Array, float]:
    """C of shape (T, T), lower triangular with sensitivity 1, and its proved relative gap.

    ``matrix`` is the workload A, lower triangular without zeros on its diagonal. The gap is that
    of the squared loss: (error · sens)² ≤ (1 + gap) · (error · sens)² of every other strategy.
    Raises ``TooLarge`` and, for ``fixed_epoch`` with k·b < T, ``NotOffered``.
    """
    steps = len(matrix)
    if steps > MAX_OPTIMISED:
        raise TooLarge(f"optimising a dense strategy over {steps} steps")
    most, separation = participation.most(steps), participation.separation
    if participation.schema == "fixed_epoch" and most * separation < steps and most > 1:
        raise NotOffered("a dense strategy for a fixed order needs every step to lie in an epoch")
    free = most > 1 and participation.schema == "min_separation"
    patterns = max(separation, -(-steps // most)) if most > 1 else steps
    goal = _Goal(
        matrix=matrix / np.max(np.abs(matrix)),
        weights=np.full(steps, 1 / steps),
        participation=participation,
        largest=objective == "max",
    )
    uneven = float(np.min(np.abs(np.diagonal(goal.matrix)))) < UNEVEN
    first, *others = DAMPING if uneven else (0.0, *DAMPING)
    best, loss, bound = goal.attempt(patterns, first)
    for damping in others:
        if loss <= (1 + POOR) * bound:
            break
        # Rows or columns of A that hardly count leave X undetermined to a double.
        other, smaller, higher = goal.attempt(patterns, damping)
        best, loss = (other, smaller) if smaller < loss else (best, loss)
        bound = max(bound, higher)
    candidates = _separated(goal, objective) if free else []
    if goal.largest and not loss <= (1 + POOR) * bound:
        candidates.append(replace(goal, largest=False).attempt(patterns, 0.0)[0])
    for candidate in candidates:
        value = goal.loss(candidate)
        best, loss = (candidate, value) if value < loss else (best, loss)
    # The variances are sums of squares: relative rounding of about T units.
    gap = loss * (1 + 1e-11) / bound - 1 if bound > 0 else np.inf
    return goal.scaled(best), max(float(gap), 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Goal:
    """What is minimised: A with largest entry 1, w with Σ w = 1, the participation."""

    matrix: Array
    weights: Array
    participation: Participation
    largest: bool

    def attempt(self, patterns: int, damping: float) -> tuple[Array, float, float]:
        """C, its squared loss and a bound on every squared loss, from one search.

        ``damping`` adds rows that weigh the injected noise itself, relative to A's columns.
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
        bound = smallest_error(self.matrix, dual.factors(point), rows / np.sum(rows))
        return strategy, self.loss(strategy), bound

    def loss(self, strategy: Array) -> float:
        """The squared loss with the sensitivity that can be certified; ∞ if none can."""
        try:
            size = of_matrix(strategy, self.participation).value
        except Unaffordable:
            return np.inf
        weights = None if self.largest else self.weights
        return squared_error(self.matrix, strategy, weights) * size**2

    def scaled(self, strategy: Array) -> Array:
        """C at sensitivity 1."""
        return np.asarray(strategy / of_matrix(strategy, self.participation).value)


def _separated(goal: _Goal, objective: Objective) -> list[Array]:
    """Candidates for ``min_separation``: banded, and Toeplitz that decreases."""
    matrix, participation = goal.matrix, goal.participation
    column = optimal_toeplitz(len(matrix), Workload(), participation)
    return [
        optimal_banded(matrix, participation.separation, objective, goal.weights),
        np.asarray(toeplitz(column, np.zeros(len(matrix)))),
    ]


def convergence_aware(steps: int, tau: int) -> Array:
    """Λ_τ of shape (T, T): errors against the last restart, every τ steps (arXiv:2302.01463).

    With t from 1: rows t that τ divides hold 1 at t and -1 at t - τ; all others 1/√τ at t and
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


SEARCH = 60
"""Steps of the search; two hundred gain another tenth of a percent at most."""
POWERS = (32, 512)
"""Norms of the variances that stand for the largest one: within a factor T^(1/512) of it."""


def optimal_banded(
    matrix: Array, bands: int, objective: Objective = "rms", weights: Array | None = None
) -> Array:
    """C of shape (T, T) with ``bands`` diagonals and columns of norm 1.

    ``matrix`` is the workload A; ``weights`` w > 0 of its rows (for ``rms``) are equal by
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
    below = np.where(inside, places, 0)
    across = np.broadcast_to(np.arange(steps)[:, None], below.shape)

    def strategy(multiples: Array) -> tuple[Array, Array]:
        entries = np.where(inside, multiples.reshape(steps, width) * column, 0.0)
        norms = np.linalg.norm(entries, axis=1, keepdims=True)
        columns = np.zeros((steps, steps))
        columns[below[inside], across[inside]] = (entries / norms)[inside]
        return columns, norms

    def loss(multiples: Array, power: int) -> tuple[float, Array]:
        columns, norms = strategy(multiples)
        value, gradient = _log_error(columns, matrix, rows, power)
        band = np.where(inside, gradient[below, across], 0.0)
        unit = np.where(inside, columns[below, across], 0.0)
        band = (band - np.sum(band * unit, axis=1, keepdims=True) * unit) / norms
        return value, (band * column).ravel()

    point = np.ones(steps * width)
    for power in (1,) if objective == "rms" else POWERS:
        search = functools.partial(loss, power=power)
        point = minimize_loss(search, point, precision=1e-8, iterations=SEARCH).point
    return strategy(point)[0]


def _log_error(strategy: Array, matrix: Array, rows: Array, power: int) -> tuple[float, Array]:
    """log of (Σ w_t variance_t^p)^(1/p), and its gradient in C."""
    noise = solve_triangular(strategy, np.eye(len(strategy)), lower=True, check_finite=False)
    errors = matrix @ noise
    variance = np.sum(errors**2, axis=1)
    largest = np.max(variance)
    scaled = variance / largest
    total = rows @ scaled**power
    weights = rows * scaled ** (power - 1) / (total * largest)
    pulled = errors.T @ (weights[:, None] * errors)
    return float(np.log(largest) + np.log(total) / power), -2 * pulled @ noise.T
