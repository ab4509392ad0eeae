"""How far a unit moves a run from each place of a fixed order.

>>> from affidavit.mechanisms.strategies.toeplitz import Toeplitz
>>> lengths_by_place(Toeplitz.from_strategy([1.0, 0.5], steps=4), turn=2).round(3)
array([1.581, 1.5  ])

Reference: docs/theorems/correlated-noise.md, Theorem 9.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from affidavit.mechanisms.strategies.numerics import Array, gamma
from affidavit.mechanisms.strategies.sensitivity import sum_shifts
from affidavit.mechanisms.strategies.strategy import COEFFICIENT_ERROR, Strategy


@lru_cache(maxsize=8)
def lengths_by_place(strategy: Strategy, turn: int) -> Array:
    """Return ‖Σ_j s_j c_(o + jb)‖ for the places o < b = ``turn``, rounded down.

    The signs s_j are equal or alternate, whichever is longer. Shape (min(b, T),), in clip norms.
    Raises ``TooLarge`` if C has no structure and too many steps.
    """
    column, steps = strategy.strategy_coefficients, strategy.steps
    count, places = -(-steps // turn), min(turn, steps)
    if column is None:
        matrix = strategy.visible_matrix()
        parts = [matrix[:, place::turn] for place in range(places)]
        lengths = np.array([_longest_sum(part) for part in parts])
        longest = np.array([np.linalg.norm(np.abs(part).sum(axis=1)) for part in parts])
    else:
        sums = [sum_shifts(column, count, turn), _alternating_sum(column, count, turn)]
        # A later place sees the same sum, cut at the end of the run.
        lengths = np.max([_lengths_of_parts(one, places) for one in sums], axis=0)
        longest = _lengths_of_parts(sum_shifts(np.abs(column), count, turn), places)
    slack = gamma(8 * steps + 64) + 4 * COEFFICIENT_ERROR + 2.2 * strategy.residual
    return np.asarray(np.maximum(lengths - slack * longest, 0.0))


def _longest_sum(columns: Array) -> float:
    """Return the length of the sum of ``columns`` with the best of a few signs."""
    count = columns.shape[1]
    like_first = np.where(columns.T @ columns[:, 0] < 0, -1.0, 1.0)
    signs = np.stack([np.ones(count), (-1.0) ** np.arange(count), like_first], axis=1)
    return float(np.linalg.norm(columns @ signs, axis=0).max())


def _alternating_sum(column: Array, count: int, turn: int) -> Array:
    """Return Σ_{j < count} (-1)^j S^(jb) c, shape (T,)."""
    if count == 1:
        return column
    change = column.copy()
    change[turn:] -= column[: len(column) - turn]
    result = sum_shifts(change, count // 2, 2 * turn)
    if count % 2:
        result[turn * (count - 1) :] += column[: len(column) - turn * (count - 1)]
    return result


def _lengths_of_parts(total: Array, places: int) -> Array:
    return np.asarray(np.sqrt(np.cumsum(total**2))[::-1][:places])
