"""A strategy: noise that is correlated across steps, and what it costs and buys.

The released stream is x + N·z, with N the T x T matrix of the noise that is *really
injected* (rows are steps) and z rows N(0, σ²C²). Its strategy is C = N⁻¹, lower triangular,
and the whole run is one Gaussian mechanism with μ = sens(C) / σ. Every family of strategies
is one subclass in a file of its own; all of them answer the same questions:

* ``sensitivity``: how far one record moves the run, an upper bound, and whether it is exact;
* ``errors``: how large the noise of the workload's output is, step by step, at unit noise;
* ``streaming``: what a trainer keeps in memory to generate the noise, and how;
* ``noise_matrix`` (N), ``strategy_matrix`` (C), both refused above ``LARGEST_DENSE`` steps.

Errors are for z of standard deviation 1 and before any scaling by the sensitivity; at
Gaussian-DP parameter μ and clip norm C the error of the run's sum is error · sens · C / μ.
They are numbers to compare by, not guarantees; the sensitivity is a guarantee.

References: Denisov et al., arXiv:2202.08312; Choquette-Choo et al., arXiv:2306.08153;
``docs/theorems/correlated-noise.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import Sensitivity
from affidavit.mechanisms.strategies.workload import Workload

Array = NDArray[np.float64]

LARGEST_DENSE = 4096
"""Steps up to which T x T matrices are formed, 128 MiB each."""
LARGEST_RESIDUAL = 1e-6
"""ρ above which the inverse of a noise matrix is refused."""
LARGEST_VECTOR = 5_000_000
"""Steps up to which the coefficients of a strategy are held."""
LARGEST_ERROR = 20_000
"""Steps up to which errors without Toeplitz structure are computed, in O(T²)."""


class IllConditioned(ValueError):
    """The inverse of the noise cannot be computed to any useful accuracy."""


class TooLarge(ValueError):
    """A matrix or an error that is not computed at this many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Standard deviations of (A·N·z)_t at unit z: ``per_step`` of shape (T,), rms and max."""

    per_step: Array

    @property
    def rms(self) -> float:
        """√(mean over steps of the variance)."""
        return float(np.sqrt(np.mean(self.per_step**2)))

    @property
    def max(self) -> float:
        """The largest standard deviation of any step."""
        return float(np.max(self.per_step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """How a trainer generates w_t = (N z)_t, step by step.

    ``buffers`` is the number of arrays of the model's size kept between steps,
    ``coefficients`` a.

    ==================  ===============================================================
    form                w_t
    ==================  ===============================================================
    ``independent``     z_t
    ``moving_average``  Σ_i a_i z_{t-i}, a = ``coefficients``, z before the start zero
    ``autoregressive``  (z_t - Σ_{i≥1} a_i w_{t-i}) / a_0, w before the start zero
    ``buffered``        z_t - Σ_i ω_i s_i, then s_i ← θ_i s_i + w_t; a = (θ..., ω...)
    ``tree``            the change of the sum of the tree's current nodes
    ``rows``            row t of N times all z so far
    ==================  ===============================================================

    Where ``scaled`` is true, w_t is then multiplied by the number that ``recurrence`` names.
    """

    form: Literal["independent", "moving_average", "autoregressive", "buffered", "tree", "rows"]
    buffers: int
    recurrence: str
    coefficients: tuple[float, ...] = ()
    scaled: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategy(ABC):
    """C of ``steps`` columns; ``kind`` is the plan's word for its family.

    Guarantees
        * ``sensitivity`` is at least sens of the inverse of ``noise_matrix``, rounding
          included, and is attained up to rounding where it says ``exact``.
    """

    kind: str
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("a strategy has at least one step")

    @abstractmethod
    def sensitivity(self, participation: Participation) -> Sensitivity:
        """sens(C) in clip norms, an upper bound; raises ``Unaffordable``."""

    @property
    @abstractmethod
    def streaming(self) -> Streaming:
        """What generates the noise."""

    @property
    @abstractmethod
    def is_nonnegative(self) -> bool:
        """Whether every entry of C is at least zero."""

    @property
    @abstractmethod
    def bands(self) -> int:
        """b̂: C[i, j] = 0 for i - j ≥ b̂; a full lower triangle has T."""

    @property
    def residual(self) -> float:
        """ρ ≥ ‖Ĉ N - I‖ where C was computed from a given N as Ĉ; 0 where C is given.

        Raises ``IllConditioned`` where it is too large for any use.
        """
        return 0.0

    @abstractmethod
    def noise_columns(self, first: int, last: int) -> Array:
        """Columns first..last-1 of N, shape (T, last - first)."""

    @property
    def noise_coefficients(self) -> Array | None:
        """First column of N, shape (T,), where N is Toeplitz; else None."""
        return None

    @property
    def strategy_coefficients(self) -> Array | None:
        """First column of C, shape (T,), where C is Toeplitz; else None."""
        return None

    def noise_matrix(self) -> Array:
        """N, shape (T, T), lower triangular; raises ``TooLarge``."""
        self._require_dense()
        return self.noise_columns(0, self.steps)

    def strategy_matrix(self) -> Array:
        """C, shape (T, T), lower triangular; raises ``TooLarge``."""
        return np.asarray(
            solve_triangular(
                self.noise_matrix(), np.eye(self.steps), lower=True, check_finite=False
            )
        )

    def errors(self, workload: Workload) -> Errors:
        """The errors of ``workload`` at unit noise, z of deviation 1; raises ``TooLarge``.

        O(T) where N and A are Toeplitz, O(T²) otherwise, in blocks of columns.
        """
        if self.steps > LARGEST_VECTOR:
            raise TooLarge(f"errors over {self.steps} steps")
        first = self.noise_coefficients
        if first is not None and workload.learning_rates is None:
            return Errors(per_step=np.sqrt(np.cumsum(workload.apply(first) ** 2)))
        if self.steps > LARGEST_ERROR:
            raise TooLarge(f"errors over {self.steps} steps without Toeplitz structure")
        variance = np.zeros(self.steps)
        width = max(1, 4_000_000 // self.steps)
        for start in range(0, self.steps, width):
            block = self.noise_columns(start, min(start + width, self.steps))
            variance += np.einsum("ij,ij->i", *(2 * [workload.apply(block)]))
        return Errors(per_step=np.sqrt(variance))

    def _require_dense(self) -> None:
        if self.steps > LARGEST_DENSE:
            raise TooLarge(f"a matrix of {self.steps} x {self.steps}")
