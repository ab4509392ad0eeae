"""A proved lower bound on the error of *any* strategy, which makes a duality gap a fact.

Let A be the workload, C any invertible matrix of T columns, X = CᵀC, and let patterns
π_1, ..., π_m be disjoint. For each pattern and each positive semidefinite G of unit
diagonal on it, contributions x_i with Gram matrix G show that ⟨X_π, G⟩ ≤ sens(C)². Take
L with rows grouped by pattern (row i of L is zero outside its pattern's columns) and let
v_π be the largest squared row norm in π. Then ‖C L‖_F² = ⟨X, L Lᵀ⟩ ≤ sens(C)² Σ v_π, and
for row weights w ≥ 0, W = diag(w),

    ‖W^½ A L‖_* = ‖(W^½ A C⁻¹)(C L)‖_* ≤ ‖W^½ A C⁻¹‖_F · sens(C) · √(Σ v_π),

so the weighted squared error times the squared sensitivity of every C is at least
‖W^½ A L‖_*² / Σ v_π. With k = 1 this is tr((V^½ AᵀA V^½)^½)² / Σ v. Any L and w give a
valid bound; good ones come from the optimiser. With Σ w = 1 the bound holds for the
largest squared error too, because a mean is at most a maximum.

The nuclear norm is bounded from below by ⟨U, F⟩ / ‖U‖_2 for a U near the polar factor of
F = W^½ A L, a product of two matrices of nearly orthonormal rows or columns, and
‖R‖_2² ≤ 1 + ‖R Rᵀ - I‖_F for each; every rounding is charged, so what is returned is a bound
in the reals and not an estimate.

>>> import numpy as np
>>> bound = smallest_error(np.tri(2), np.ones((2, 1, 1)), np.full(2, 0.5))
>>> bool(bound <= 1.25), round(bound, 12)  # (1.618 + 0.618)² / 4
(True, 1.25)

References: Denisov, McMahan, Rush, Smith and Thakurta, arXiv:2202.08312, section 4;
Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530, section 3; Henzinger,
Upadhyay and Upadhyay, arXiv:2202.11205 (γ₂ norm and the largest error);
``docs/theorems/optimal-strategies.md``, Theorem 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from affidavit.mechanisms.strategies.rounding import gamma

Array = NDArray[np.float64]


def smallest_error(workload: Array, factors: Array, weights: Array) -> float:
    """A lower bound on Σ w_t error_t² · sens² over every C, both as one record sees them.

    ``workload`` is A of shape (T, T); ``factors`` L of shape (b, k, k): row m of block o
    belongs to step o + m·b, and steps beyond T are left out; ``weights`` w ≥ 0 of shape (T,).
    The patterns are the b residues modulo b, each of at most k = ⌈T/b⌉ steps; a schema that
    allows them all (any k participations at least, or exactly, b apart) obeys the bound.
    """
    counted = weights > 1e-15 * np.max(weights)
    rows = np.sqrt(weights[counted])[:, None]
    product = rows * spread(workload[counted], factors)
    size = rows * spread(np.abs(workload[counted]), np.abs(factors))
    values, vectors = eigh(product @ product.T, driver="evd", check_finite=False)
    # Directions that an eigendecomposition of the square does not resolve are given up.
    kept = values > values[-1] * 1e-13
    basis = vectors[:, kept]
    polar = (basis.T @ product) / np.sqrt(values[kept])[:, None]
    for _ in range(2):
        polar = 1.5 * polar - 0.5 * (polar @ polar.T) @ polar
    unit = basis @ polar
    # The rounding of W^½ A L, of its products with U, and of their sum are charged together.
    doubt = gamma(factors.shape[1] + product.size + 4) * float(np.sum(np.abs(unit) * size))
    inner = float(np.sum(unit * product)) - doubt
    if not inner > 0:
        return 0.0
    # U is a computed product: what it differs by from basis · polar is bounded, not assumed.
    away = gamma(polar.size) * float(np.linalg.norm(basis) * np.linalg.norm(polar))
    stretch = _stretch(basis.T) * _stretch(polar) * (1 + gamma(4)) + away
    largest = np.max(_square_norms(factors, len(workload)), axis=1)
    cost = float(np.sum(largest)) * (1 + gamma(factors.shape[2] + len(largest) + 2))
    return inner * inner / stretch**2 / cost * (1 - gamma(8))


def _stretch(rows: Array) -> float:
    """An upper bound of ‖R‖_2 for R with nearly orthonormal rows: √(1 + ‖R Rᵀ - I‖_F)."""
    rounding = gamma(rows.shape[1] + 1) * float(np.sum(rows * rows))
    excess = float(np.linalg.norm(rows @ rows.T - np.eye(len(rows))))
    return float(np.sqrt(1 + excess * (1 + gamma(rows.size)) + rounding)) * (1 + gamma(2))


def spread(workload: Array, factors: Array) -> Array:
    """A·L as a matrix of shape (rows of A, b·k), L of shape (b, k, k) block by block."""
    blocks = by_pattern(workload, *factors.shape[:2])
    return np.asarray((blocks @ factors).transpose(1, 0, 2).reshape(len(workload), -1))


def by_pattern(matrix: Array, patterns: int, most: int) -> Array:
    """Columns o, o + b, o + 2b, ... together, zeros beyond the last; shape (b, rows, k).

    ``matrix`` has shape (rows, T); b is ``patterns`` and k ``most``.
    """
    padded = np.zeros((len(matrix), most * patterns))
    padded[:, : matrix.shape[1]] = matrix
    grouped = padded.reshape(len(matrix), most, patterns).transpose(2, 0, 1)
    return np.ascontiguousarray(grouped)


def _square_norms(factors: Array, steps: int) -> Array:
    """‖row (o, m) of L‖², zero for steps beyond T; shape (b, k)."""
    patterns, most, _ = factors.shape
    places = np.arange(patterns)[:, None] + patterns * np.arange(most)
    return np.where(places < steps, np.sum(factors**2, axis=2), 0.0)
