"""Sensitivity of a strategy: how far one record can move C·x over all its participations.

For C with columns c_i, X = CᵀC and patterns π,

    sens² = sup over π, ‖x_i‖ ≤ 1 of ‖Σ_{i∈π} c_i x_iᵀ‖² = sup Σ_{i,j∈π} X_ij ⟨x_i, x_j⟩.

The supremum over vectors is Σ |X_ij| if the entries of the block are not negative (all x_i equal),
and at most that otherwise. ``Sensitivity.value`` is an upper bound, rounded up.
``Sensitivity.attained`` is a lower bound, rounded down: the value that one pattern attains with
x_i = ± one unit vector, Σ s_i s_j X_ij for signs s that a search finds (``best_signs``). The lower
end of a privacy bracket uses it.

========================  ==========================================================
patterns                  bound
========================  ==========================================================
one step                  largest column norm, exact
``fixed_epoch``           Σ |X| of the worst block X[o::b, o::b], over every offset
``min_separation``        X banded (X_ij = 0 for |i-j| ≥ b): dynamic programme over the
                          diagonal, exact; otherwise row by row (``row_wise_bounds``)
Toeplitz, c ≥ 0           ‖Σ_{j<k} S^(jb) c‖ (offset 0 is worst); for ``min_separation``
                          with c replaced by its reverse running maximum, exact if c
                          does not increase
========================  ==========================================================

>>> import numpy as np
>>> from affidavit.mechanisms.strategies.participation import Participation
>>> twice = Participation.fixed_epoch(participations=2, separation=1)
>>> round(matrix_sensitivity(np.array([[1.0, 0.0], [0.5, 1.0]]), twice).value ** 2, 12)
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
import scipy  # loads scipy.linalg only where noise is correlated

from affidavit.mechanisms.strategies.numerics import UNIT, Array, gamma, root_down, root_up
from affidavit.mechanisms.strategies.participation import Participation

MAX_ROW_WISE_STEPS = 512
"""Steps up to which the row-wise bound is computed for Toeplitz strategies too."""
NEGLIGIBLE_SHARE = 1e-9
"""Largest share of sens² from products that are zero up to rounding."""
EXACT_TOLERANCE = 1e-8
"""Relative difference up to which a bound counts as attained."""
MAX_WORK = 300_000_000
"""Additions that one bound may take, in a few seconds."""
MAX_LEADING = 1024
"""Signs for which an eigenvector is computed, in half a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """sens(C) in clip norms: at most ``value``, and at least ``attained``, by one pattern."""

    value: float
    attained: float

    @classmethod
    def of_square(cls, squared: float, operations: int) -> Sensitivity:
        """Return √s for an attained sum s, computed in ``operations`` roundings."""
        return cls.between(squared, squared, operations)

    @classmethod
    def between(cls, upper: float, attained: float, operations: int) -> Sensitivity:
        """Return the roots of two sums as bounds, computed in ``operations`` roundings."""
        return cls(value=root_up(upper, operations), attained=root_down(attained, operations))

    @property
    def exact(self) -> bool:
        """Whether one pattern attains the bound, up to rounding."""
        return self.attained >= self.value * (1 - EXACT_TOLERANCE)

    def scaled(self, min_factor: float, max_factor: float) -> Sensitivity:
        """Return the sensitivity after a map that stretches vectors by these factors."""
        return Sensitivity(value=self.value * max_factor, attained=self.attained * min_factor)


class Unaffordable(ValueError):
    """No bound can be computed within the work limit of a plan."""


def matrix_sensitivity(strategy: Array, participation: Participation) -> Sensitivity:
    """Return sens(C) for C of shape (rows, T); a tree has more than T rows."""
    steps = strategy.shape[1]
    if participation.max_participations(steps) == 1:
        squares = np.einsum("ij,ij->j", strategy, strategy)
        return Sensitivity.of_square(float(np.max(squares)), len(strategy))
    return gram_sensitivity(strategy.T @ strategy, participation, operations=len(strategy))


def gram_sensitivity(gram: Array, participation: Participation, *, operations: int) -> Sensitivity:
    """Return sens from X = CᵀC, whose entries were summed in ``operations`` roundings.

    ``gram`` has shape (T, T); sens in clip norms.
    """
    steps = len(gram)
    squares = np.diagonal(gram)
    if participation.max_participations(steps) == 1:
        return Sensitivity.of_square(float(np.max(squares)), operations)
    # |computed X_ij - X_ij| ≤ γ ‖c_i‖ ‖c_j‖, by Cauchy and Schwarz on the absolute terms.
    norms = np.sqrt(squares) * (1 + gamma(operations))
    doubt = gamma(operations) * np.outer(norms, norms)
    bound = np.abs(gram) + doubt
    if participation.schema == "fixed_epoch":
        return _fixed_epoch(gram, doubt, participation)
    # Columns that are orthogonal up to rounding are charged for what rounding may hide.
    beyond = float(np.max(np.triu(bound, k=participation.separation), initial=0.0))
    spare = participation.max_participations(steps) ** 2 * beyond
    best = max_separated_sum(np.diagonal(bound), participation)
    if spare <= NEGLIGIBLE_SHARE * best:
        lost = spare + 2 * participation.max_participations(steps) * float(
            np.max(np.diagonal(doubt))
        )
        return Sensitivity.between(best + spare, best - lost, steps + 4)
    return _separated(gram, doubt, participation)


def max_separated_sum(values: Array, participation: Participation) -> float:
    """Return max Σ_{i∈π} values[i] over patterns of ``min_separation``, for values ≥ 0.

    F[i, m] = max(values[i] + F[i+b, m-1], F[i+1, m]), one level m at a time.

    ``values`` have shape (T,).
    """
    steps, separation = len(values), participation.separation
    later = np.zeros(steps + separation)
    for _ in range(participation.max_participations(steps)):
        here = values + later[separation:]
        later[:steps] = np.maximum.accumulate(here[::-1])[::-1]
    return float(later[0])


def row_wise_bounds(size: Array, participation: Participation) -> Array:
    """Return h_i ≥ Σ_{j∈π} |X_ij| for every pattern π that contains i, shape (T,) (Theorem 5).

    The best pattern is found for each row by itself: the best m steps at least b before i, and the
    best k-1-m steps at least b after it. Σ_{i∈π} h_i then bounds the block sum.

    Raises ``Unaffordable`` beyond ``MAX_WORK`` operations. ``size`` is |X|, shape (T, T).
    """
    steps, separation = len(size), participation.separation
    most = participation.max_participations(steps)
    if steps * steps * most > MAX_WORK:
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
    """Return at [m, i] the largest sum in row i over m separated steps from i + b onwards."""
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


def toeplitz_sensitivity(
    coefficients: Array, steps: int, participation: Participation
) -> Sensitivity:
    """Return sens of the lower-triangular Toeplitz C with this first column, zero afterwards.

    O(T log k) for c ≥ 0. For signed c, ``fixed_epoch`` costs O(k T log k), or is bounded by that of
    |c| beyond the work limit, and ``min_separation`` is bounded by that of |c|. Over few steps the
    row-wise bound is used if it is lower.

    ``coefficients`` have shape (m,); sens in clip norms.
    """
    column = np.zeros(steps)
    column[: min(steps, len(coefficients))] = coefficients[:steps]
    most = participation.max_participations(steps)
    if most == 1:
        return Sensitivity.of_square(float(column @ column), steps)
    nonnegative = bool(np.all(column >= 0))
    if len(np.trim_zeros(column, "b")) <= participation.separation:
        return _orthogonal(column, participation)
    size = np.abs(column)
    if participation.schema == "fixed_epoch":
        if nonnegative or steps * most > MAX_WORK // 10:
            return _between(column, size, participation)
        return _signed_toeplitz(column, participation)
    result = _between(column, np.maximum.accumulate(size[::-1])[::-1], participation)
    if result.exact or steps > MAX_ROW_WISE_STEPS:
        return result
    by_rows = matrix_sensitivity(scipy.linalg.toeplitz(column, np.zeros(steps)), participation)
    return Sensitivity(
        value=min(by_rows.value, result.value), attained=max(by_rows.attained, result.attained)
    )


def _orthogonal(column: Array, participation: Participation) -> Sensitivity:
    """Return sens for columns that do not overlap: the longest are steps 0, b, 2b, ..."""
    steps, most = len(column), participation.max_participations(len(column))
    squares = np.cumsum(column**2)
    starts = participation.separation * np.arange(most)
    return Sensitivity.of_square(float(np.sum(squares[steps - 1 - starts])), steps + most)


def _between(column: Array, majorant: Array, participation: Participation) -> Sensitivity:
    """Return ‖Σ_{j<k} S^(jb) c‖ of a majorant ≥ |c| as upper and of c as lower bound."""
    most, separation = participation.max_participations(len(column)), participation.separation
    above, below = (sum_shifts(values, most, separation) for values in (majorant, column))
    operations = len(column) + 4 * most.bit_length()
    # The sums of a signed c have a rounding error relative to those of |c|.
    spare = gamma(2 * operations) * float(above @ above)
    attained = max(float(below @ below) - 2 * spare, float(column @ column) - spare)
    return Sensitivity.between(float(above @ above), attained, operations)


def sum_shifts(column: Array, width: int, separation: int) -> Array:
    """Return at [t] Σ_{j < width} column[t - j·b], by doubling, with additions only.

    ``column`` and the result have shape (T,).
    """
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
    """Return Σ |X| over the worst block, from X_ij = Σ_{s < T-j} c_s c_{s+j-i}, lag by lag."""
    steps, separation = len(column), participation.separation
    most = participation.max_participations(steps)
    doubt = gamma(steps) * float(column @ column)
    total = np.zeros(steps)
    for lag in range(most):
        shift = lag * separation
        partial = np.cumsum(column[: steps - shift] * column[shift:])
        # partial[T-1-j] = X_{j-shift, j}, and j = o + q·b for q = lag, ..., k-1. Reversed,
        # because partial runs from the last column to the first.
        turns = sum_shifts(np.abs(partial) + doubt, most - lag, separation)[::-1]
        total[: steps - shift] += (2 if lag else 1) * turns
    operations = 2 * steps + 4 * most
    block = toeplitz_gram(column, range(int(np.argmax(total)), steps, separation)[:most])
    signs = best_signs(block)
    spare = 2 * gamma(operations) * float(np.max(total)) + len(block) ** 2 * doubt
    attained = float(signs @ block @ signs) - spare
    return Sensitivity.between(float(np.max(total)), attained, operations)


def toeplitz_gram(column: Array, pattern: range) -> Array:
    """Return X at the steps of ``pattern``, shape (k, k), of the Toeplitz C with this column.

    ``column`` has shape (T,). An entry is wrong by γ_T ‖c‖² at most.
    """
    steps, size = len(column), len(pattern)
    block = np.zeros((size, size))
    for lag in range(size):
        shift = lag * pattern.step
        partial = np.cumsum(column[: steps - shift] * column[shift:])
        later = np.asarray(pattern[lag:])
        places = np.arange(size - lag)
        block[places, places + lag] = block[places + lag, places] = partial[steps - 1 - later]
    return block


def best_signs(gram: Array) -> Array:
    """Return signs s for which Σ s_i s_j X_ij is large, shape (k,), for X of shape (k, k).

    The search climbs by flips of one sign each from equal signs, alternating ones, those of the
    first row, those that suit all earlier steps, and those of the leading eigenvector.
    """
    size = len(gram)
    equal = np.ones(size)
    if size == 1 or np.all(gram >= 0):
        return equal
    suited = np.ones(size)
    for place in range(1, size):
        suited[place] = 1.0 if gram[place, :place] @ suited[:place] >= 0 else -1.0
    starts = [suited, equal, equal - 2 * (np.arange(size) % 2), np.where(gram[0] < 0, -1.0, 1.0)]
    if size <= MAX_LEADING:
        _, vectors = scipy.linalg.eigh(gram, subset_by_index=[size - 1, size - 1])
        starts.append(np.where(vectors[:, 0] < 0, -1.0, 1.0))
    climbed = [_climbed(gram, start) for start in starts]
    return max(climbed, key=lambda signs: float(signs @ gram @ signs))


def _climbed(gram: Array, signs: Array) -> Array:
    """Return the signs after the best flips, one by one, as long as they raise Σ s_i s_j X_ij."""
    signs, diagonal = signs.copy(), np.diagonal(gram)
    pull = gram @ signs
    for _ in range(4 * len(signs)):
        # A flip of s_i changes the sum by 4 (X_ii - s_i (X s)_i).
        gains = diagonal - signs * pull
        best = int(np.argmax(gains))
        if gains[best] <= EXACT_TOLERANCE * diagonal[best]:
            break
        pull -= 2 * signs[best] * gram[best]
        signs[best] = -signs[best]
    return signs


def _fixed_epoch(gram: Array, doubt: Array, participation: Participation) -> Sensitivity:
    steps, most = len(gram), participation.max_participations(len(gram))
    # If patterns go on to the end, those that start a turn later have no step of their own.
    goes_on = most * participation.separation >= steps
    starts = min(steps, participation.separation) if goes_on else steps
    if starts * most * most > MAX_WORK:
        raise Unaffordable(f"bounding {most} participations over {steps} steps")
    sizes, reached = np.zeros(starts), np.zeros(starts)
    for first in range(starts):
        block, unsure = _block(gram, first, participation), _block(doubt, first, participation)
        sizes[first] = float(np.sum(np.abs(block))) + float(np.sum(unsure))
        signs = np.where(block[0] < 0, -1.0, 1.0)
        reached[first] = max(float(np.sum(block)), float(signs @ block @ signs))
    attained = 0.0
    for first in {int(np.argmax(sizes)), int(np.argmax(reached))}:
        block, unsure = _block(gram, first, participation), _block(doubt, first, participation)
        signs = best_signs(block)
        spare = float(np.sum(unsure)) + 2 * gamma(most * most) * float(np.sum(np.abs(block)))
        attained = max(attained, float(signs @ block @ signs) - spare)
    return Sensitivity.between(float(np.max(sizes)), attained, most * most)


def _block(matrix: Array, first: int, participation: Participation) -> Array:
    """Return the entries at the steps o, o + b, ..., o = ``first``."""
    most, separation = participation.max_participations(len(matrix)), participation.separation
    pattern = slice(first, first + most * separation, separation)
    return matrix[pattern, pattern]


def _separated(gram: Array, doubt: Array, participation: Participation) -> Sensitivity:
    steps = len(gram)
    most, separation = participation.max_participations(steps), participation.separation
    in_order = Participation.fixed_epoch(participations=most, separation=separation)
    result = _fixed_epoch(gram, doubt, in_order)
    if most == steps:
        return result
    best = max_separated_sum(row_wise_bounds(np.abs(gram) + doubt, participation), participation)
    return Sensitivity(value=root_up(best, 4 * most + 8), attained=result.attained)


def inverse_sensitivity(computed: Sensitivity, residual: float) -> Sensitivity:
    """Return sens(N⁻¹) from sens(Ĉ), where ‖Ĉ N - I‖ ≤ ρ < 1.

    N⁻¹ = (Ĉ N)⁻¹ Ĉ, and (Ĉ N)⁻¹ stretches a vector by 1 / (1 - ρ) at most and by 1 / (1 + ρ)
    at least.
    """
    if not residual:
        return computed
    return computed.scaled((1 - 4 * UNIT) / (1 + residual), (1 + 4 * UNIT) / (1 - residual))
