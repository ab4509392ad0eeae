"""White noise inside correlated noise: the cost of a run with lots that are drawn afresh.

Noise N z, with z of standard deviation σ, is white noise of standard deviation σ/‖C‖ plus further
independent noise, because ``N Nᵀ ≥ I/‖C‖²``. So a run costs no more than the same run with
independent noise of standard deviation σ/‖C‖. For one record only the columns C_S of the steps S in
which it may take part matter, and the least factor by which C_S stretches a vector gives a lower
bound. Both factors follow from the rows of X = C_SᵀC_S (Collatz and Wielandt; Gershgorin). For a
Toeplitz C they need only products of its first column with shifts; other strategies are formed.
Along one direction of the outputs all steps are visible at once (``project_columns``).

>>> from affidavit.mechanisms.strategies.toeplitz import Toeplitz
>>> pair = Toeplitz.from_strategy([1.0, 0.5], steps=100)
>>> round(max_stretch(pair, turn=1), 3), round(max_stretch(pair, turn=2) ** 2, 9)
(1.5, 1.25)

Reference: docs/theorems/correlated-noise.md, Theorems 11 to 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from affidavit.mechanisms.strategies.numerics import (
    UNIT,
    Array,
    fftconvolve,
    gamma,
    root_down,
    root_up,
    transform_slack,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.sensitivity import sum_shifts
from affidavit.mechanisms.strategies.strategy import (
    COEFFICIENT_ERROR,
    MAX_VECTOR,
    Strategy,
    TooLarge,
)
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.plan import MAX_MATRIX_STEPS

MAX_ITERATED_STEPS = 20_000
"""Steps up to which the largest singular value of a Toeplitz C is iterated."""
ITERATIONS = 8
MIN_NORM_SHARE = 0.98
"""Least share of the largest squared column norm for a column that a lower bound counts."""


@lru_cache(maxsize=8)
def max_stretch(strategy: Strategy, turn: int) -> float:
    """Return ‖C_S‖, rounded up, for the steps S of any group g, g + b, g + 2b, ..., b = ``turn``.

    Raises ``TooLarge`` if C has no structure and too many steps.
    """
    if isinstance(strategy, Scheduled) and strategy.steps > MAX_MATRIX_STEPS:
        largest = float(np.max(strategy.factors))
        return max_stretch(strategy.unscaled, turn) * largest * (1 + 4 * UNIT)
    if isinstance(strategy, Tree):
        # A step shares a node of 2^l steps with ⌈2^l / b⌉ steps of its group.
        levels = range(strategy.period.bit_length())
        return root_up(float(sum(-(-(1 << level) // turn) for level in levels)), 1)
    if strategy.steps > MAX_VECTOR:
        raise TooLarge(f"a strategy of kind {strategy.kind} over {strategy.steps} steps")
    coefficients = strategy.strategy_coefficients
    if coefficients is None:
        squared = _largest_of_groups(np.abs(strategy.strategy_matrix()), turn)
    else:
        # In the middle of a long run, a row meets each shift before and after it.
        column, count = np.abs(coefficients), -(-strategy.steps // turn)
        squared = 2 * _overlap(column, turn, count) - float(column @ column)
        if strategy.steps <= MAX_ITERATED_STEPS:
            squared = min(squared, _largest_of_shifts(column, turn))
    slack = gamma(4 * strategy.steps + 64) + 4 * COEFFICIENT_ERROR
    residual = strategy.residual
    return root_up(squared * (1 + slack), 4) * (1 + 4 * UNIT) / (1 - residual)


@lru_cache(maxsize=8)
def min_stretch(strategy: Strategy, turn: int) -> tuple[float, int]:
    """Return s, rounded down, and n such that ‖C_S v‖ ≥ s ‖v‖ for n steps S of one group.

    The steps are as close as possible with s² at least half of a squared column norm. n is 1 if
    there are none, or if C is not Toeplitz.
    """
    single = strategy.sensitivity(Participation.single()).attained, 1
    if strategy.steps > MAX_VECTOR or strategy.strategy_coefficients is None:
        return single
    column = np.abs(strategy.strategy_coefficients)
    squares = np.cumsum(column**2)
    whole = float(squares[-1])
    # A column of this many steps has nearly the norm of the first.
    enough = int(np.searchsorted(squares, MIN_NORM_SHARE * whole)) + 1
    spacing = turn
    while strategy.steps - enough >= spacing:
        count = 1 + (strategy.steps - enough) // spacing
        squared = MIN_NORM_SHARE * whole - 2 * max(0.0, _overlap(column, spacing, count) - whole)
        if squared >= whole / 2:
            slack = gamma(4 * strategy.steps + 64) + 4 * COEFFICIENT_ERROR
            bound = root_down(squared * (1 - 8 * slack), 4)
            return bound * (1 - 4 * UNIT) / (1 + strategy.residual), count
        spacing *= 2
    return single


@lru_cache(maxsize=8)
def project_columns(strategy: Strategy, turn: int) -> Array:
    """Return lower bounds of |⟨v, c_t⟩| for one unit vector v and t = 0, b, 2b, ..., b = ``turn``.

    v is along the sum of these columns, or of the columns with alternating signs. Shape (n,), not
    negative; one zero if C has no structure and too many steps.
    """
    steps, count = strategy.steps, -(-strategy.steps // turn)
    column = strategy.strategy_coefficients if steps <= MAX_VECTOR else None
    try:
        times, back, longest = _products(strategy, column, turn)
    except TooLarge:
        return np.zeros(1)
    signs = np.ones(count)
    signs[1::2] = -1.0
    sums = [times(np.ones(count)), times(signs)]
    along = max(sums, key=lambda total: float(np.linalg.norm(total)))
    length = float(np.linalg.norm(along))
    slack = gamma(4 * steps + 64) + 4 * COEFFICIENT_ERROR
    # C = (I + R)⁻¹ Ĉ moves each column by at most ρ / (1 - ρ) of its length.
    moved = 2.2 * strategy.residual * length * longest
    projections = np.abs(back(along, False)) - back(np.abs(along), True) * slack - moved
    if column is not None:
        projections -= 2 * transform_slack(steps) * longest * length
    return np.asarray(
        np.maximum(projections, 0.0) / root_up(float(along @ along), steps) * (1 - 4 * UNIT)
    )


def project_blocks(strategy: Strategy, turn: int, number: int) -> tuple[Array, int] | None:
    """Return ``project_columns`` of stretches of a run, on their own rows alone, and how many.

    The run is cut into about ``number`` stretches of whole turns. Each shows at least the
    projections, shape (n,), in some order. None if C is not known to consist of such blocks and
    entries that are not negative, or they are too short.
    """
    # Imported here because they import scipy.linalg, which independent noise does not need.
    from affidavit.mechanisms.strategies.dense import Dense
    from affidavit.mechanisms.strategies.toeplitz import Toeplitz

    size = strategy.steps // (turn * number) * turn
    if size < 2 * turn or strategy.steps > MAX_VECTOR or not strategy.is_nonnegative:
        return None
    blocks: list[Strategy]
    match strategy:
        case Tree() if turn == 1 and strategy.period == strategy.steps:
            size = 1 << (size.bit_length() - 1)
            blocks = [Tree.of(size)]
        case Toeplitz(noise_column=None):
            blocks = [Toeplitz.from_strategy(strategy.strategy_coefficients[:size], size)]
        case Toeplitz(noise_column=column) if column is not None:
            blocks = [Toeplitz.from_noise(column[:size], size)]
        case Dense() if strategy.residual == 0:
            matrix = strategy.visible_matrix()
            parts = (slice(at, at + size) for at in range(0, strategy.steps - size + 1, size))
            blocks = [Dense.from_strategy(matrix[part, part]) for part in parts]
        case _:
            return None
    shown = [np.sort(project_columns(block, turn))[::-1] for block in blocks]
    return np.min(shown, axis=0), strategy.steps // size


def _products(
    strategy: Strategy, column: Array | None, turn: int
) -> tuple[Callable[[Array], Array], Callable[[Array, bool], Array], float]:
    """Return products with the columns of C that are ``turn`` apart and with their transpose.

    The second function takes whether to use |C|. The number is about the largest column norm.
    """
    if isinstance(strategy, Tree):

        def sums(weights: Array) -> Array:
            spread = np.zeros(strategy.steps)
            spread[::turn] = weights
            return strategy.visible_sums(spread)

        longest = math.sqrt(strategy.period.bit_length())
        return sums, (lambda vector, _: strategy.spread_sums(vector)[::turn]), longest
    if column is None:
        columns = strategy.visible_matrix()[:, ::turn]

        def back_dense(vector: Array, absolute: bool) -> Array:
            return np.asarray((np.abs(columns) if absolute else columns).T @ vector)

        longest = float(np.linalg.norm(columns, axis=0).max())
        return (lambda weights: np.asarray(columns @ weights)), back_dense, longest
    steps = len(column)

    def times(weights: Array) -> Array:
        spread = np.zeros(steps)
        spread[::turn] = weights
        return fftconvolve(column, spread)[:steps]

    def back(vector: Array, absolute: bool) -> Array:
        own = np.abs(column) if absolute else column
        return fftconvolve(vector, own[::-1])[steps - 1 :][::turn]

    return times, back, float(np.linalg.norm(column))


def _overlap(column: Array, spacing: int, count: int) -> float:
    """Return Σ_{j < count} ⟨c, S^(jb) c⟩."""
    return float(column @ sum_shifts(column, count, spacing))


def _largest_of_groups(matrix: Array, turn: int) -> float:
    """Return an upper bound of ‖C_S‖² over all groups, for C ≥ 0 of shape (rows, T)."""
    largest = 0.0
    for group in range(min(turn, matrix.shape[1])):
        columns = matrix[:, group::turn]
        eigenvalue = largest_eigenvalue(partial(_gram_times, columns), columns.shape[1])
        largest = max(largest, eigenvalue)
    return largest


def _gram_times(columns: Array, vector: Array) -> Array:
    return np.asarray(columns.T @ (columns @ vector))


def _largest_of_shifts(column: Array, turn: int) -> float:
    """Return an upper bound of ‖C_S‖² over all groups, for a Toeplitz C ≥ 0."""
    steps, length = len(column), float(np.linalg.norm(column))
    slack = transform_slack(steps)

    def product(vector: Array) -> Array:
        spread = np.zeros(steps)
        spread[::turn] = vector
        moved = fftconvolve(spread, column)[:steps]
        image = fftconvolve(moved, column[::-1])[steps - 1 :][::turn]
        size = float(np.linalg.norm(vector)) * float(column.sum()) + float(np.linalg.norm(moved))
        return np.asarray(image + slack * length * size)

    return largest_eigenvalue(product, -(-steps // turn))


def largest_eigenvalue(
    product: Callable[[Array], Array], size: int, iterations: int = ITERATIONS
) -> float:
    """Return an upper bound for a matrix ≥ 0 without zeros on its diagonal.

    ``product`` is no less than that with a vector, shape (n,) both, n = ``size``.
    """
    vector, least = np.ones(size), math.inf
    for _ in range(iterations):
        image = product(vector)
        least = min(least, float((image / vector).max()))
        vector = image / image.max()
    return least
