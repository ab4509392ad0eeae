"""Optimal Toeplitz strategies: banded, full, and those whose inverse is banded.

All three minimise error times sensitivity (``optimal_loss``) by L-BFGS, starting from the
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

References: McKenna, arXiv:2405.15913; Choquette-Choo et al., arXiv:2306.08153; Kalinin,
McKenna, Upadhyay and Lampert, arXiv:2505.12128 (banded inverse); Fichtenberger, Henzinger
and Upadhyay, arXiv:2202.11205 (the start).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.optimal_loss import Objective, ToeplitzLoss
from affidavit.mechanisms.strategies.optimal_search import LossAndGradient, least
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.square_root import banded_inverse_root, banded_root
from affidavit.mechanisms.strategies.workload import Workload

Array = NDArray[np.float64]

MOST_ITERATIONS, LEAST_ITERATIONS = 1000, 10
"""Steps of one search."""
SEARCHED = 10_000_000
"""Coefficients that one search evaluates, some ten seconds."""


def optimal_toeplitz(
    steps: int,
    workload: Workload,
    participation: Participation,
    *,
    bands: int | None = None,
    objective: Objective = "rms",
) -> Array:
    """First column of C, c_0 = 1, of shape (min(bands, T),), all T entries by default.

    O(T · bands) or O(T log T) a step of the search. Raises ``NotOffered`` and ``TooLarge``.
    """
    loss = ToeplitzLoss.of(
        steps=steps, workload=workload, participation=participation, objective=objective
    )
    width = min(bands or steps, steps)
    if participation.most(steps) == 1 or width <= participation.separation:
        return _free(loss.of_strategy, _root(width), _iterations(steps))
    narrow = _free(loss.of_strategy, _root(participation.separation), _iterations(steps))
    search = _nonnegative if participation.schema == "fixed_epoch" else _decreasing
    starts = [_root(width)]
    if np.all(np.diff(narrow, append=0.0) <= 0):
        starts.append(np.concatenate([narrow, np.zeros(width - len(narrow))]))
    found = [search(loss.of_strategy, start, _iterations(steps)) for start in starts]
    return min([*found, *starts], key=lambda column: loss.of_strategy(column)[0])


def optimal_banded_inverse(
    steps: int,
    workload: Workload,
    participation: Participation,
    *,
    bands: int,
    objective: Objective = "rms",
) -> Array:
    """First column of N = C⁻¹, n_0 = 1, of shape (min(bands, T),).

    O(T · bands) a step of the search. Raises ``NotOffered`` and ``TooLarge``.
    """
    width = min(bands, steps)
    loss = ToeplitzLoss.of(
        steps=steps,
        workload=workload,
        participation=participation,
        objective=objective,
        noise_bands=width,
    )
    roots = [
        banded_inverse_root(steps, bands=width, momentum=momentum).noise_coefficients[:width]
        for momentum in sorted({0.0, workload.momentum})
    ]
    found = [_free(loss.of_noise, root, _iterations(steps)) for root in roots]
    return min(found, key=lambda column: loss.of_noise(column)[0])


def _iterations(steps: int) -> int:
    """Steps of a search; where each is long the start, which is near optimal, is little changed."""
    return min(MOST_ITERATIONS, max(LEAST_ITERATIONS, SEARCHED // steps))


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
    found = least(relative, start[1:] / tail, bounds=bounds, iterations=iterations)
    return np.concatenate([[1.0], tail * found.point])


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
    found = least(falls, first, bounds=bounds, iterations=iterations)
    column = np.cumsum((scale * np.maximum(found.point, 0.0))[::-1])[::-1]
    return np.asarray(column / column[0])
