"""Sensitivity of a strategy: how far one record can move C·x over all its participations.

For C with columns c_i, X = CᵀC and patterns π,

    sens² = sup over π, ‖x_i‖ ≤ 1 of ‖Σ_{i∈π} c_i x_iᵀ‖² = sup Σ_{i,j∈π} X_ij ⟨x_i, x_j⟩.

The supremum over vectors is Σ |X_ij| where the entries of the block are not negative (all
x_i equal), and at most that otherwise; ``Sensitivity.exact`` says which. What is returned
is always an upper bound, rounded up.

========================  ==========================================================
patterns                  bound
========================  ==========================================================
one step                  largest column norm, exact
``fixed_epoch``           Σ |X| of the worst block X[o::b, o::b], over every offset
``min_separation``        X banded (X_ij = 0 for |i-j| ≥ b): dynamic programme over the
                          diagonal, exact; otherwise row by row, see ``row_wise``
Toeplitz, c ≥ 0           ‖Σ_{j<k} S^(jb) c‖ (offset 0 is worst); for ``min_separation``
                          with c replaced by its reverse running maximum, exact where c
                          did not increase
========================  ==========================================================

>>> import numpy as np
>>> from affidavit.mechanisms.strategies.participation import Participation
>>> twice = Participation.fixed_epoch(participations=2, separation=1)
>>> round(of_matrix(np.array([[1.0, 0.0], [0.5, 1.0]]), twice).value ** 2, 12)
3.25

References: Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530, section 2 and
Theorem 2; Choquette-Choo et al., arXiv:2306.08153, Theorem 2 and Equation 3 (banded and
general bound); Kalinin and Lampert, arXiv:2405.13763, Theorem 2 (Toeplitz, not increasing);
``docs/theorems/correlated-noise.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies.numerics import UNIT, gamma, root_up
from affidavit.mechanisms.strategies.participation import Participation

Array = NDArray[np.float64]

ROW_WISE = 512
"""Steps up to which the row-wise bound is taken for Toeplitz strategies too."""
NEGLIGIBLE = 1e-9
"""Share of sens² that may come from products which would be zero but for rounding."""
MOST_WORK = 300_000_000
"""Additions that one bound may take, a few seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """``value`` is an upper bound in clip norms; ``exact`` when it is attained, up to rounding."""

    value: float
    exact: bool


class Unaffordable(ValueError):
    """No bound can be computed within the work that one plan may cause."""


def of_matrix(strategy: Array, participation: Participation) -> Sensitivity:
    """sens(C) for C of shape (rows, T); rows need not be T (a tree has more)."""
    steps = strategy.shape[1]
    if participation.most(steps) == 1:
        squares = np.einsum("ij,ij->j", strategy, strategy)
        return _single(squares, operations=len(strategy))
    return of_gram(strategy.T @ strategy, participation, operations=len(strategy))


def of_gram(gram: Array, participation: Participation, *, operations: int) -> Sensitivity:
    """sens from X = CᵀC, whose entries were summed in ``operations`` roundings.

    ``gram`` has shape (T, T); sens in clip norms.
    """
    steps = len(gram)
    squares = np.diagonal(gram)
    if participation.most(steps) == 1:
        return _single(squares, operations=operations)
    # |computed X_ij - X_ij| ≤ γ ‖c_i‖ ‖c_j‖, by Cauchy and Schwarz on the absolute terms.
    norms = np.sqrt(squares) * (1 + gamma(operations))
    doubt = gamma(operations) * np.outer(norms, norms)
    size = np.abs(gram)
    nonnegative = gram >= -doubt
    bound = size + doubt
    if participation.schema == "fixed_epoch":
        return _fixed_epoch(bound, nonnegative, participation)
    # Columns that are orthogonal up to rounding are charged for what may be left of them.
    beyond = float(np.max(np.triu(bound, k=participation.separation), initial=0.0))
    spare = participation.most(steps) ** 2 * beyond
    best = best_separated(np.diagonal(bound), participation)
    if spare <= NEGLIGIBLE * best:
        return Sensitivity(value=root_up(best + spare, steps + 4), exact=True)
    return _separated(bound, nonnegative, participation)


def best_separated(values: Array, participation: Participation) -> float:
    """max Σ_{i∈π} values[i] over patterns of ``min_separation``, for values ≥ 0.

    F[i, m] = max(values[i] + F[i+b, m-1], F[i+1, m]), one level m at a time.

    ``values`` have shape (T,).
    """
    steps, separation = len(values), participation.separation
    later = np.zeros(steps + separation)
    for _ in range(participation.most(steps)):
        here = values + later[separation:]
        later[:steps] = np.maximum.accumulate(here[::-1])[::-1]
    return float(later[0])


def row_wise(size: Array, participation: Participation) -> Array:
    """h_i ≥ Σ_{j∈π} |X_ij| for every pattern π with i in it; shape (T,) (Theorem 5).

    Row i's best pattern is found for each row by itself: the best of m steps at least b
    before i, and of k-1-m steps at least b after it. Σ_{i∈π} h_i then bounds the block sum.

    Raises ``Unaffordable`` beyond ``MOST_WORK`` operations. ``size`` is |X|, shape (T, T).
    """
    steps, separation = len(size), participation.separation
    most = participation.most(steps)
    if steps * steps * most > MOST_WORK:
        raise Unaffordable(
            f"bounding {most} participations over {steps} steps of a strategy without structure"
        )
    after = _levels(size, most, separation)
    before = _levels(size[::-1, ::-1], most, separation)[:, ::-1]
    best = np.full(steps, -math.inf)
    for taken in range(most):
        best = np.maximum(best, before[taken] + after[most - 1 - taken])
    return np.asarray(np.diagonal(size) + best)


def _levels(size: Array, most: int, separation: int) -> Array:
    """[m, i]: the most that m separated steps from i + b onwards add up to in row i."""
    steps = len(size)
    result = np.zeros((most, steps))
    later = np.zeros((steps, steps + separation))
    rows = np.arange(steps)
    first = np.minimum(rows + separation, steps)
    for level in range(1, most):
        here = size + later[:, separation:]
        later[:, :steps] = np.maximum.accumulate(here[:, ::-1], axis=1)[:, ::-1]
        result[level] = later[rows, first]
    return result


def of_toeplitz(coefficients: Array, steps: int, participation: Participation) -> Sensitivity:
    """sens of the lower-triangular Toeplitz C with this first column, zero afterwards.

    O(T log k) for c ≥ 0. For signed c, ``fixed_epoch`` costs O(k T log k), or is bounded
    through |c| where that is too much, and ``min_separation`` is bounded through |c|. Over
    few steps the row-wise bound is taken where it is lower.

    ``coefficients`` have shape (m,); sens in clip norms.
    """
    column = np.zeros(steps)
    column[: min(steps, len(coefficients))] = coefficients[:steps]
    most = participation.most(steps)
    if most == 1:
        return Sensitivity(value=root_up(float(column @ column), steps), exact=True)
    nonnegative = bool(np.all(column >= 0))
    if len(np.trim_zeros(column, "b")) <= participation.separation:
        return _orthogonal(column, participation)
    size = np.abs(column)
    if participation.schema == "fixed_epoch":
        if nonnegative or steps * most > MOST_WORK // 10:
            return Sensitivity(value=_shifted(size, participation), exact=nonnegative)
        return _signed_toeplitz(column, participation)
    majorant = np.maximum.accumulate(size[::-1])[::-1]
    exact = nonnegative and bool(np.all(majorant <= size * (1 + 1e-12)))
    result = Sensitivity(value=_shifted(majorant, participation), exact=exact)
    if exact or steps > ROW_WISE:
        return result
    by_rows = of_matrix(toeplitz(column, np.zeros(steps)), participation)
    return by_rows if by_rows.value < result.value else result


def _orthogonal(column: Array, participation: Participation) -> Sensitivity:
    """Columns b apart do not overlap, and earlier ones are longer: steps 0, b, 2b, ..."""
    steps, most = len(column), participation.most(len(column))
    squares = np.cumsum(column**2)
    starts = participation.separation * np.arange(most)
    return Sensitivity(
        value=root_up(float(np.sum(squares[steps - 1 - starts])), steps + most), exact=True
    )


def _shifted(column: Array, participation: Participation) -> float:
    """‖Σ_{j<k} S^(jb) c‖ for c ≥ 0."""
    most = participation.most(len(column))
    total = _comb(column, most, participation.separation)
    return root_up(float(total @ total), len(column) + 4 * most.bit_length())


def _comb(column: Array, width: int, separation: int) -> Array:
    """[t]: Σ_{j < width} column[t - j·b], by doubling: additions only, two a bit of width."""
    total, done = column.copy(), 1
    for bit in bin(width)[3:]:
        total = _plus_shift(total, total, done * separation)
        done *= 2
        if bit == "1":
            total = _plus_shift(total, column, done * separation)
            done += 1
    return total


def _plus_shift(base: Array, addend: Array, shift: int) -> Array:
    result = base.copy()
    if shift < len(base):
        result[shift:] += addend[: len(base) - shift]
    return result


def _signed_toeplitz(column: Array, participation: Participation) -> Sensitivity:
    """Σ |X| over the worst block, from X_ij = Σ_{s < T-j} c_s c_{s+j-i}, one lag at a time."""
    steps, separation = len(column), participation.separation
    most = participation.most(steps)
    doubt = gamma(steps) * float(column @ column)
    total, negative = np.zeros(steps), np.zeros(steps)
    for lag in range(most):
        shift = lag * separation
        partial = np.cumsum(column[: steps - shift] * column[shift:])
        # partial[T-1-j] = X_{j-shift, j}, and j = o + q·b for q = lag, ..., k-1.
        times = 1 if lag == 0 else 2
        for counted, into in ((np.abs(partial) + doubt, total), (partial < -doubt, negative)):
            # Reversed, because partial runs from the last column to the first.
            turns = _comb(counted.astype(float), most - lag, separation)
            into[: steps - shift] += times * turns[::-1]
    worst = int(np.argmax(total))
    return Sensitivity(
        value=root_up(float(total[worst]), 2 * steps + 4 * most), exact=bool(negative[worst] == 0)
    )


def _fixed_epoch(
    bound: Array, nonnegative: NDArray[np.bool_], participation: Participation
) -> Sensitivity:
    steps, separation = len(bound), participation.separation
    most = participation.most(steps)
    if steps * most * most > MOST_WORK:
        raise Unaffordable(f"bounding {most} participations over {steps} steps")
    best, exact = -math.inf, False
    for first in range(steps):
        pattern = slice(first, min(first + most * separation, steps), separation)
        total = float(np.sum(bound[pattern, pattern]))
        if total > best:
            best, exact = total, bool(np.all(nonnegative[pattern, pattern]))
    return Sensitivity(value=root_up(best, most * most), exact=exact)


def _separated(
    bound: Array, nonnegative: NDArray[np.bool_], participation: Participation
) -> Sensitivity:
    steps = len(bound)
    most, separation = participation.most(steps), participation.separation
    in_order = Participation.fixed_epoch(participations=most, separation=separation)
    attained = _fixed_epoch(bound, nonnegative, in_order)
    if most == steps:
        return attained
    best = best_separated(row_wise(bound, participation), participation)
    value = root_up(best, 4 * most + 8)
    exact = attained.exact and attained.value * (1 + 1e-12) >= value
    return Sensitivity(value=value, exact=exact)


def _single(squares: Array, *, operations: int) -> Sensitivity:
    return Sensitivity(value=root_up(float(np.max(squares)), operations), exact=True)


def inverse_factor(residual: float) -> float:
    """1 / (1 - ρ), rounded up: sens(N⁻¹) ≤ factor · sens(Ĉ) where ‖Ĉ N - I‖ ≤ ρ < 1.

    N⁻¹ = (Ĉ N)⁻¹ Ĉ, and (Ĉ N)⁻¹ stretches no vector by more than 1 / (1 - ρ).
    """
    return (1 + 4 * UNIT) / (1 - residual) if residual else 1.0
