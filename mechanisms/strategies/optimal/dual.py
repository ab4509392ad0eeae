"""The dual of the optimal dense strategy, and a proved lower bound of the loss.

V = L Lᵀ has a positive semidefinite block for each pattern, with constant diagonal v_π. With
A_w = diag(w)^½ A and h(V) = tr((A_w V A_wᵀ)^½), the squared loss of every strategy is at least
h(V)² / Σ v_π (docs/theorems/optimal-strategies.md, Theorem 1). log h is concave in V, with

    ∂h/∂V = X/2,    X = A_wᵀ (A_w V A_wᵀ)^{-½} A_w,    ∂h/∂w_t = ((A_w V A_wᵀ)^½)_tt / (2 w_t).

The search uses L-BFGS over log v_π, L_π = L⁰_π (I + W_π) with rows scaled to length √v_π, and √w.
L⁰ is the block of X⁻¹ AᵀA X⁻¹ for the best Toeplitz strategy of b bands, or, for one participation,
three steps of the fixed point v_i ← v_i X_ii. For the largest error the search may end before the
gap is closed, if the weights of most steps vanish.

>>> dual = Dual.of(np.tri(4), np.full(4, 0.25), patterns=4, most=1, searched=False)
>>> best = dual.strategy(dual.solve(1e-6))
>>> np.linalg.norm(best, axis=0).round(6).tolist()
[1.0, 1.0, 1.0, 1.0]

``error_lower_bound`` evaluates the bound for any L and w, with all rounding included, from
‖F‖_* ≥ ⟨U, F⟩ / ‖U‖_2 for a computed polar factor U of F = W^½ A L.

>>> bound = error_lower_bound(np.tri(2), np.ones((2, 1, 1)), np.full(2, 0.5))
>>> bool(bound <= 1.25), round(bound, 12)  # (1.618 + 0.618)² / 4
(True, 1.25)

References: Denisov, McMahan, Rush, Smith and Thakurta, arXiv:2202.08312, section 4;
Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530, section 3; Henzinger,
Upadhyay and Upadhyay, arXiv:2202.11205 (γ₂ norm and the largest error).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import eigh, solve_triangular, toeplitz

from affidavit.mechanisms.strategies.dense import factor_of_gram
from affidavit.mechanisms.strategies.numerics import Array, gamma
from affidavit.mechanisms.strategies.optimal.loss import minimize_loss
from affidavit.mechanisms.strategies.optimal.toeplitz import optimal_toeplitz
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.workload import Workload

MIN_ROW_WEIGHT = 4e-4
"""The least mean weight of the rows if weights are searched, because rows without weight leave X
undetermined. The gap cannot close below about twice this."""
MAX_LOG_CHANGE = 60.0
"""The largest change of log v from its start."""
MIN_MULTIPLIER_SHARE = 1e-10
"""The least multiplier of a start over its largest one."""


class _State(NamedTuple):
    """h, Z with X = ZᵀZ, and the diagonal of (A_w V A_wᵀ)^½."""

    value: float
    half: Array
    diagonal: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Dual:
    """The dual for the residues modulo ``patterns`` (b), with at most ``most`` (k) steps each.

    ``matrix`` is A, shape (rows, T), with at least T rows. ``weights`` w > 0 of the rows of A add
    up to 1 and are the start of the search if they are ``searched`` (largest error). ``start`` is
    L⁰, shape (b, k, k), with rows of length √v.
    """

    matrix: Array
    weights: Array
    patterns: int
    most: int
    searched: bool
    start: Array

    @classmethod
    def of(cls, matrix: Array, weights: Array, *, patterns: int, most: int, searched: bool) -> Dual:
        """Return the dual with a start near its maximum.

        ``matrix`` A has shape (rows, T), and ``weights`` of the squared errors (rows,).
        """
        begin = np.ones((patterns, 1, 1)) if most == 1 else _blocks(matrix, weights, patterns, most)
        dual = cls(
            matrix=matrix,
            weights=weights,
            patterns=patterns,
            most=most,
            searched=searched,
            start=begin,
        )
        return dual._by_fixed_point() if most == 1 else dual

    def solve(self, tolerance: float) -> Array:
        """Return the best point, shape (n,): changes of log v, W and, if searched, of √w.

        The search ends when the squared loss of its strategy is within the relative ``tolerance``
        of the dual, or when it no longer improves.
        """
        last, near = [np.inf], 1 + 0.9 * tolerance + 2 * MIN_ROW_WEIGHT * self.searched

        def finished(point: Array, loss: float) -> bool:
            gained, last[0] = last[0] - loss, loss
            if gained > tolerance:
                return False
            weights = None if self.searched else self.weights
            achieved = squared_error(self.matrix, self.strategy(point), weights)
            return bool(achieved <= np.exp(-loss) * near)

        size = self.patterns + (self.most > 1) * self.patterns * self.most**2
        start = np.zeros(size + self.searched * len(self.matrix))
        bounds = [(-MAX_LOG_CHANGE, MAX_LOG_CHANGE)] * self.patterns
        bounds += [(-np.inf, np.inf)] * (len(start) - self.patterns)
        return minimize_loss(
            self._loss, start, bounds=bounds, finished=finished, iterations=500
        ).point

    def factors(self, point: Array) -> Array:
        """Return L, shape (b, k, k); row (o, m) belongs to step o + m·b."""
        scale = np.exp(point[: self.patterns] / 2)
        if self.most == 1:
            return np.asarray(self.start * scale[:, None, None])
        lengths = np.linalg.norm(self.start, axis=2, keepdims=True)
        return np.asarray(scale[:, None, None] * lengths * self._unit(point)[0])

    def row_weights(self, point: Array) -> Array:
        """Return w, shape (rows,), Σ w = 1."""
        if not self.searched:
            return self.weights
        return np.asarray(
            (1 - MIN_ROW_WEIGHT) * self._shares(point) + MIN_ROW_WEIGHT / len(self.matrix)
        )

    def strategy(self, point: Array) -> Array:
        """Return C of sensitivity 1, with X without entries inside patterns and traces 1."""
        half = self._state(self.factors(point), self.row_weights(point)).half
        gram = half.T @ half
        steps = np.arange(len(gram))
        for lag in range(self.patterns, len(gram), self.patterns):
            gram[steps[lag:], steps[:-lag]] = gram[steps[:-lag], steps[lag:]] = 0.0
        traces = np.bincount(steps % self.patterns, np.diagonal(gram))[steps % self.patterns]
        gram /= np.sqrt(np.outer(traces, traces))
        diagonal = np.diag(np.diagonal(gram))
        # Far from the maximum X may not be positive definite; its diagonal always is.
        for share in (1.0, 0.99, 0.9, 0.5):
            try:
                return factor_of_gram(share * gram + (1 - share) * diagonal)
            except ValueError:
                continue
        return np.asarray(np.sqrt(diagonal))

    def _loss(self, point: Array) -> tuple[float, Array]:
        """Return -log(h² / Σ v) and its gradient."""
        factors, weights = self.factors(point), self.row_weights(point)
        costs = np.sum(factors[:, 0, :] ** 2, axis=1)
        state = self._state(factors, weights)
        grouped = by_pattern(state.half, self.patterns, self.most)
        # -∂(2 log h)/∂L = -2 X L / h inside every block.
        by_factor = -2 / state.value * (grouped.transpose(0, 2, 1) @ (grouped @ factors))
        total = float(np.sum(costs))
        parts = [np.sum(by_factor * factors, axis=(1, 2)) / 2 + costs / total]
        if self.most > 1:
            parts.append(self._by_shape(point, factors, by_factor).ravel())
        if self.searched:
            shares, by_weight = self._shares(point), -state.diagonal / (state.value * weights)
            roots = self.weights * (1 + point[-len(self.matrix) :])
            pulled = (1 - MIN_ROW_WEIGHT) * (by_weight - shares @ by_weight)
            parts.append(2 * pulled * roots / np.sum(roots * (1 + point[-len(self.matrix) :])))
        return np.log(total) - 2 * np.log(state.value), np.concatenate(parts)

    def _shares(self, point: Array) -> Array:
        """Return the searched weights, Σ = 1."""
        # Squares, because weights near zero would hardly move in logarithms.
        raised = self.weights * (1 + point[-len(self.matrix) :]) ** 2
        return np.asarray(raised / np.sum(raised))

    def _by_shape(self, point: Array, factors: Array, by_factor: Array) -> Array:
        """Return the gradient in W, through the scaling of rows."""
        unit, lengths = self._unit(point)
        rows = np.linalg.norm(factors, axis=2, keepdims=True)
        pulled = by_factor * rows
        pulled = (pulled - np.sum(pulled * unit, axis=2, keepdims=True) * unit) / lengths
        return np.asarray(self.start.transpose(0, 2, 1) @ pulled)

    def _unit(self, point: Array) -> tuple[Array, Array]:
        """Return the rows of L⁰ (I + W) at length 1, and their lengths before."""
        size = self.patterns * self.most**2
        change = point[self.patterns : self.patterns + size]
        change = change.reshape(self.patterns, self.most, self.most)
        turned = self.start @ (np.eye(self.most) + change)
        lengths = np.linalg.norm(turned, axis=2, keepdims=True)
        return turned / lengths, lengths

    def _state(self, factors: Array, weights: Array) -> _State:
        rows = np.sqrt(weights)[:, None]
        product = rows * spread(self.matrix, factors)
        values, vectors = eigh(product @ product.T, driver="evd", check_finite=False)
        roots = np.sqrt(np.maximum(values, values[-1] * 1e-26))
        half = (vectors / np.sqrt(roots)).T @ (rows * self.matrix)
        return _State(float(np.sum(roots)), half, (vectors**2) @ roots)

    def _by_fixed_point(self) -> Dual:
        """Return the dual after three steps v_i ← v_i X_ii, w_t ← ((A_w V A_wᵀ)^½)_tt."""
        costs, weights = np.ones(self.matrix.shape[1]), self.weights
        for _ in range(3):
            state = self._state(np.sqrt(costs)[:, None, None], weights)
            costs = costs * np.sum(state.half**2, axis=0)
            costs = np.maximum(costs / np.max(costs), MIN_MULTIPLIER_SHARE)
            if self.searched:
                weights = state.diagonal / state.value
        return Dual(
            matrix=self.matrix,
            weights=weights,
            patterns=self.patterns,
            most=1,
            searched=self.searched,
            start=np.sqrt(costs)[:, None, None],
        )


def _blocks(matrix: Array, weights: Array, patterns: int, most: int) -> Array:
    """Return L⁰, Cholesky factors of the blocks of X⁻¹ AᵀA X⁻¹ with equal diagonals."""
    steps = matrix.shape[1]
    apart = Participation.fixed_epoch(participations=most, separation=patterns)
    column = np.zeros(steps)
    start = optimal_toeplitz(steps, Workload(), apart, bands=patterns)
    column[: len(start)] = start
    noise = solve_triangular(toeplitz(column, np.zeros(steps)), np.eye(steps), lower=True)
    pulled = (np.sqrt(weights)[:, None] * (matrix @ noise)) @ noise.T
    grouped = by_pattern(pulled, patterns, most)
    blocks = grouped.transpose(0, 2, 1) @ grouped
    diagonal = np.diagonal(blocks, axis1=1, axis2=2)
    # Steps beyond T in the last epoch have no entries, and steps of tiny weight have tiny ones.
    missing = diagonal <= MIN_MULTIPLIER_SHARE * np.max(diagonal)
    costs = np.maximum(np.mean(diagonal, axis=1), MIN_MULTIPLIER_SHARE * np.max(diagonal))
    lengths = np.sqrt(np.where(missing, np.inf, diagonal))
    unit = blocks / (lengths[:, :, None] * lengths[:, None, :])
    unit += (missing[:, :, None] + MIN_MULTIPLIER_SHARE) * np.eye(most)
    return np.asarray(np.sqrt(costs)[:, None, None] * np.linalg.cholesky(unit))


def squared_error(workload: Array, strategy: Array, weights: Array | None) -> float:
    """Return Σ w_t error_t² of C, shape (T, T), at unit noise; the largest without ``weights``.

    ``workload`` A has shape (rows, T), and ``weights`` (rows,).
    """
    noise = solve_triangular(strategy, np.eye(len(strategy)), lower=True)
    variance = np.sum((workload @ noise) ** 2, axis=1)
    return float(np.max(variance) if weights is None else weights @ variance)


def error_lower_bound(workload: Array, factors: Array, weights: Array) -> float:
    """Return a lower bound of Σ w_t error_t² · sens² over every C.

    ``workload`` is A, shape (T, T). ``factors`` is L, shape (b, k, k): row m of block o belongs to
    step o + m·b, and steps beyond T are ignored. ``weights`` are w ≥ 0, shape (T,). The patterns
    are the b residues modulo b, each of at most k = ⌈T/b⌉ steps. The bound holds for every schema
    that allows them all (any k participations at least, or exactly, b apart).
    """
    counted = weights > 1e-15 * np.max(weights)
    rows = np.sqrt(weights[counted])[:, None]
    product = rows * spread(workload[counted], factors)
    size = rows * spread(np.abs(workload[counted]), np.abs(factors))
    values, vectors = eigh(product @ product.T, driver="evd", check_finite=False)
    # Directions that the eigendecomposition does not resolve are ignored.
    resolved = values > values[-1] * 1e-13
    basis = vectors[:, resolved]
    polar = (basis.T @ product) / np.sqrt(values[resolved])[:, None]
    for _ in range(2):
        polar = 1.5 * polar - 0.5 * (polar @ polar.T) @ polar
    unit = basis @ polar
    # The rounding of W^½ A L, of its products with U, and of their sum are bounded together.
    doubt = gamma(factors.shape[1] + product.size + 4) * float(np.sum(np.abs(unit) * size))
    inner = float(np.sum(unit * product)) - doubt
    if not inner > 0:
        return 0.0
    # U is a computed product, whose difference from basis · polar is bounded.
    away = gamma(polar.size) * float(np.linalg.norm(basis) * np.linalg.norm(polar))
    stretch = _stretch(basis.T) * _stretch(polar) * (1 + gamma(4)) + away
    largest = np.max(_square_norms(factors, len(workload)), axis=1)
    cost = float(np.sum(largest)) * (1 + gamma(factors.shape[2] + len(largest) + 2))
    return inner * inner / stretch**2 / cost * (1 - gamma(8))


def _stretch(rows: Array) -> float:
    """Return an upper bound of ‖R‖_2 for nearly orthonormal rows: √(1 + ‖R Rᵀ - I‖_F)."""
    rounding = gamma(rows.shape[1] + 1) * float(np.sum(rows * rows))
    excess = float(np.linalg.norm(rows @ rows.T - np.eye(len(rows))))
    return float(np.sqrt(1 + excess * (1 + gamma(rows.size)) + rounding)) * (1 + gamma(2))


def spread(workload: Array, factors: Array) -> Array:
    """Return A·L, shape (rows of A, b·k), for L of shape (b, k, k)."""
    blocks = by_pattern(workload, *factors.shape[:2])
    return np.asarray((blocks @ factors).transpose(1, 0, 2).reshape(len(workload), -1))


def by_pattern(matrix: Array, patterns: int, most: int) -> Array:
    """Return columns o, o + b, o + 2b, ... together, padded with zeros, shape (b, rows, k).

    ``matrix`` has shape (rows, T); b is ``patterns`` and k ``most``.
    """
    padded = np.zeros((len(matrix), most * patterns))
    padded[:, : matrix.shape[1]] = matrix
    grouped = padded.reshape(len(matrix), most, patterns).transpose(2, 0, 1)
    return np.ascontiguousarray(grouped)


def _square_norms(factors: Array, steps: int) -> Array:
    """Return ‖row (o, m) of L‖², zero for steps beyond T, shape (b, k)."""
    patterns, most, _ = factors.shape
    places = np.arange(patterns)[:, None] + patterns * np.arange(most)
    return np.where(places < steps, np.sum(factors**2, axis=2), 0.0)
