"""Dense strategies: any lower-triangular N or C, as a matrix.

If N is given, C = N⁻¹ is computed by forward substitution and *checked*: with R = Ĉ N - I, bounded
entry by entry with the rounding of the product, sens(N⁻¹) ≤ sens(Ĉ) / (1 - ‖R‖), because
N⁻¹ = (I + R)⁻¹ Ĉ. A matrix whose inverse is not accurate to a millionth is refused.

For a Gram matrix X = CᵀC the lower-triangular C is (chol(X[::-1, ::-1])ᵀ)[::-1, ::-1], while
chol(X) is the L of X = LLᵀ, whose columns have other norms.

>>> import numpy as np
>>> X = np.array([[2.0, 0.5], [0.5, 1.0]])
>>> C = factor_of_gram(X)
>>> bool(np.allclose(C.T @ C, X) and C[0, 1] == 0)
True

References: Denisov et al., arXiv:2202.08312; ``docs/theorems/correlated-noise.md``, Theorem 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from affidavit.mechanisms.strategies.numerics import Array, gamma
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import (
    Sensitivity,
    inverse_sensitivity,
    matrix_sensitivity,
)
from affidavit.mechanisms.strategies.strategy import (
    Strategy,
    Streaming,
    validate_inverse,
    validate_residual,
)
from affidavit.plan import INVERSE_ROUNDING


@dataclass(frozen=True, kw_only=True, eq=False)
class Dense(Strategy):
    """C or N as a T x T lower-triangular array without zeros on its diagonal; one is given.

    ``gap`` is set if C was optimised: the squared loss of every strategy is proved to be at least
    that of C over 1 + gap. ``above`` is the rounding above the diagonal of a given N. The
    sensitivity holds with and without it, because noise of equal covariance is the same noise.
    """

    strategy: Array | None = None
    noise: Array | None = None
    above: Array | None = None
    gap: float | None = None

    @classmethod
    def from_strategy(
        cls, matrix: Array, *, kind: str = "dense", gap: float | None = None
    ) -> Dense:
        """Return the strategy with this lower-triangular C, shape (T, T)."""
        return cls(kind=kind, steps=len(matrix), strategy=_lower(matrix), gap=gap)

    @classmethod
    def from_noise(cls, matrix: Array, *, kind: str = "matrix") -> Dense:
        """Return the strategy with this N, shape (T, T), lower triangular up to rounding."""
        full = np.array(matrix, dtype=np.float64)
        above = np.triu(full, 1) if full.ndim == 2 else np.zeros(0)
        if not np.any(above) or full.shape[0] != full.shape[1]:
            return cls(kind=kind, steps=len(matrix), noise=_lower(full))
        size = np.abs(np.diagonal(full))
        if np.all(np.abs(above) <= INVERSE_ROUNDING * np.minimum.outer(size, size)):
            return cls(kind=kind, steps=len(matrix), noise=_lower(np.tril(full)), above=above)
        return cls(kind=kind, steps=len(matrix), noise=_lower(full))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens(C); raises ``Unaffordable`` and ``IllConditioned``."""
        residual = self.residual
        return inverse_sensitivity(matrix_sensitivity(self._strategy, participation), residual)

    @property
    def streaming(self) -> Streaming:
        """All z so far, or the last b̂ - 1 of w or z for b̂ bands of C or N."""
        bands, noise_bands = self.bands, bandwidth(self._noise)
        if bands <= min(noise_bands, self.steps - 1):
            return Streaming(
                form="rows",
                buffers=bands - 1,
                recurrence="w_t = (z_t - Σ_{i≥1} C[t, t-i] w_{t-i}) / C[t, t]",
            )
        return Streaming(
            form="rows", buffers=noise_bands - 1, recurrence="w_t = Σ_i N[t, t-i] z_{t-i}"
        )

    @property
    def is_nonnegative(self) -> bool:
        """Whether no entry of C is negative."""
        return bool(np.all(self._strategy >= 0))

    @property
    def bands(self) -> int:
        """b̂ of C; T for a given N that is not diagonal, because its inverse has no band."""
        if self.strategy is not None:
            return bandwidth(self.strategy)
        return 1 if bandwidth(self._noise) == 1 else self.steps

    def noise_columns(self, first: int, last: int) -> Array:
        """Return columns first..last-1 of N, shape (T, last - first)."""
        return self._noise[:, first:last]

    def strategy_matrix(self) -> Array:
        """Return C, shape (T, T)."""
        return self._strategy

    @cached_property
    def _strategy(self) -> Array:
        return _inverse(self.noise) if self.strategy is None else self.strategy

    @cached_property
    def _noise(self) -> Array:
        return _inverse(self.strategy) if self.noise is None else self.noise

    @property
    def coefficients(self) -> Mapping[str, Array]:
        """The given matrix, as ``strategy`` or ``noise``."""
        provided = {"strategy": self.strategy, "noise": self.noise}
        return {name: array for name, array in provided.items() if array is not None}

    @cached_property
    def residual(self) -> float:
        """ρ ≥ ‖Ĉ N - I‖, rounding included.

        It is 0 if C is given; raises ``IllConditioned`` above ``MAX_RESIDUAL``.
        """
        noise = self.noise
        if noise is None:
            return 0.0
        computed = validate_inverse(self._strategy)
        residual = np.abs(computed @ noise - np.eye(self.steps))
        residual += gamma(self.steps + 2) * (np.abs(computed) @ np.abs(noise) + np.eye(self.steps))
        if self.above is not None:
            residual += np.abs(computed) @ np.abs(self.above) * (1 + gamma(self.steps))
        rows, columns = np.max(np.sum(residual, axis=1)), np.max(np.sum(residual, axis=0))
        # ‖R‖₂² ≤ ‖R‖₁ ‖R‖_∞, and both sums are of non-negative terms.
        norm = float(np.sqrt(rows * columns)) * (1 + gamma(self.steps + 4))
        return validate_residual(norm)


def factor_of_gram(gram: Array) -> Array:
    """Return the lower-triangular C with CᵀC = X, both of shape (T, T).

    It is not chol(X), the L of X = LLᵀ. Raises ``ValueError`` if X is not positive definite.
    """
    try:
        reversed_factor = cholesky(gram[::-1, ::-1], lower=True)
    except LinAlgError:
        raise ValueError("the Gram matrix is not positive definite") from None
    return np.ascontiguousarray(reversed_factor.T[::-1, ::-1])


def bandwidth(matrix: Array) -> int:
    """Return the number of diagonals of a lower-triangular matrix up to the last nonzero one.

    ``matrix`` has shape (T, T).
    """
    rows, columns = np.nonzero(matrix)
    return int(np.max(rows - columns)) + 1


def _lower(matrix: Array) -> Array:
    result = np.array(matrix, dtype=np.float64)
    if result.ndim != 2 or result.shape[0] != result.shape[1] or not len(result):
        raise ValueError("the matrix must be square")
    if not np.all(np.isfinite(result)):
        raise ValueError("the matrix must be finite")
    if np.any(np.triu(result, 1)):
        raise ValueError("the matrix must be lower triangular: noise may not use later noise")
    if np.any(np.diagonal(result) == 0):
        raise ValueError(
            "the diagonal must not contain zero: that step would be released without noise"
        )
    result.flags.writeable = False
    return result


def _inverse(matrix: Array | None) -> Array:
    assert matrix is not None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.tril(solve_triangular(matrix, np.eye(len(matrix)), lower=True)))
