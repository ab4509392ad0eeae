"""A strategy: noise that is correlated across steps, with its sensitivity and its errors.

The released stream is x + N·z, with N the T x T matrix of the injected noise (rows are steps) and z
rows N(0, σ²C²). Its strategy is C = N⁻¹, lower triangular, and the whole run is one Gaussian
mechanism with μ = sens(C) / σ. Every family of strategies is a subclass in its own file, with

* ``sensitivity``: how far one record moves the run, an upper bound, and whether it is exact;
* ``errors``: the noise of the workload's output, step by step, at unit noise;
* ``streaming``: what a trainer keeps in memory to generate the noise, and how;
* ``noise_matrix`` (N) and ``strategy_matrix`` (C), up to ``MAX_MATRIX_STEPS`` steps.

Errors are for z of standard deviation 1, before any scaling by the sensitivity: at Gaussian-DP
parameter μ and clip norm C the error of the run's sum is error · sens · C / μ. Errors serve to
compare strategies; only the sensitivity is a guarantee.

References: Denisov et al., arXiv:2202.08312; Choquette-Choo et al., arXiv:2306.08153;
``docs/theorems/correlated-noise.md``.

**Balls in bins** (``gram``). The lots of an epoch are bins, and a record keeps its bin i for all
epochs. It takes part in steps i, i + b, i + 2b, ..., so with C ≥ 0 it adds at most
m_i = Σ_j C[:, i + jb] in every direction. The privacy of the run depends on the m_i only through
their products ⟨m_i, m_j⟩.

>>> from affidavit.mechanisms.strategies.toeplitz import identity
>>> gram(identity(4), bins=2).round(6)
array([[2., 0.],
       [0., 2.]])

References: Choquette-Choo, Ganesh, Haque, Steinke and Thakurta, arXiv:2410.06266.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # loads scipy.linalg only where noise is correlated

from affidavit.mechanisms.strategies.numerics import Array, gamma
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import Sensitivity
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import MAX_MATRIX_STEPS

MAX_RESIDUAL = 1e-6
"""ρ up to which the inverse of a noise matrix is accepted."""
MAX_VECTOR = 5_000_000
"""Steps up to which the coefficients of a strategy are computed."""
MAX_ERROR_STEPS = 20_000
"""Steps up to which errors without Toeplitz structure are computed, in O(T²)."""


class IllConditioned(ValueError):
    """The inverse of the noise cannot be computed accurately."""


def validate_inverse(computed: Array) -> Array:
    """Return the computed inverse, of any shape; raises ``IllConditioned`` for huge entries."""
    if not np.all(np.isfinite(computed)) or np.max(np.abs(computed)) > 1e150:
        raise IllConditioned("the inverse of the noise grows beyond all bounds")
    return computed


def validate_residual(residual: float) -> float:
    """Return ρ; raises ``IllConditioned`` above ``MAX_RESIDUAL``."""
    if not residual <= MAX_RESIDUAL:
        raise IllConditioned(f"the inverse of the noise is accurate only to {residual:.1g}")
    return residual


class TooLarge(ValueError):
    """A matrix or an error is not computed for this many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Standard deviations of (A·N·z)_t at unit z.

    ``per_step`` has shape (T,), or of long runs (n,), at the increasing ``places``. ``rms`` is the
    root mean square over steps, and ``max`` the largest of any step.
    """

    per_step: Array
    rms: float
    max: float
    places: Array | None = None

    @classmethod
    def of(cls, per_step: Array) -> Errors:
        """Return the errors of all steps, shape (T,)."""
        rms = float(np.sqrt(np.mean(per_step**2)))
        return cls(per_step=per_step, rms=rms, max=float(np.max(per_step)))

    def at_noise(self, multiplier: float) -> Errors:
        """Return the errors at noise of this standard deviation."""
        return Errors(
            per_step=multiplier * self.per_step,
            rms=multiplier * self.rms,
            max=multiplier * self.max,
            places=self.places,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """How a trainer generates w_t = (N z)_t, step by step.

    ``buffers`` is the number of arrays of model size kept between steps, and ``coefficients`` are
    a.

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

    If ``scaled``, w_t is then multiplied by the factor in ``recurrence``. ``period`` is the number
    of steps of one tree.
    """

    form: Literal["independent", "moving_average", "autoregressive", "buffered", "tree", "rows"]
    buffers: int
    recurrence: str
    coefficients: tuple[float, ...] = ()
    scaled: bool = False
    period: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategy(ABC):
    """C with ``steps`` columns; ``kind`` is the name of its family in a plan.

    Guarantees
        * ``sensitivity`` is at least sens of the inverse of ``noise_matrix``, rounding
          included, and is attained up to rounding if it is ``exact``.
    """

    kind: str
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("a strategy needs at least one step")

    @abstractmethod
    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens(C) in clip norms; raises ``Unaffordable``."""

    @property
    @abstractmethod
    def streaming(self) -> Streaming:
        """The recurrence that generates the noise."""

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
        """ρ ≥ ‖Ĉ N - I‖ if C was computed from a given N as Ĉ; 0 if C is given.

        Raises ``IllConditioned`` above ``MAX_RESIDUAL``.
        """
        return 0.0

    @property
    def injected(self) -> Strategy:
        """The strategy whose noise is generated, without any clip schedule."""
        return self

    @property
    def draws(self) -> int:
        """The number of independent draws in the noise of the run, the columns of N."""
        return self.steps

    @property
    def coefficients(self) -> Mapping[str, Array]:
        """The numbers that define this strategy besides its kind and steps.

        C as ``strategy`` or N as ``noise``, of shape (T, T), or (m,) if it is Toeplitz.
        """
        return {}

    @abstractmethod
    def noise_columns(self, first: int, last: int) -> Array:
        """Return columns first..last-1 of N, shape (T, last - first)."""

    @property
    def noise_coefficients(self) -> Array | None:
        """The first column of N, shape (T,), if N is Toeplitz; else None."""
        return None

    @property
    def strategy_coefficients(self) -> Array | None:
        """The first column of C, shape (T,), if C is Toeplitz; else None."""
        return None

    def noise_matrix(self) -> Array:
        """Return N, shape (T, draws), lower triangular if square; raises ``TooLarge``."""
        self._require_dense()
        return self.noise_columns(0, self.draws)

    def strategy_matrix(self) -> Array:
        """Return C, shape (T, T), lower triangular; raises ``TooLarge``."""
        return np.asarray(
            scipy.linalg.solve_triangular(
                self.noise_matrix(), np.eye(self.steps), lower=True, check_finite=False
            )
        )

    def visible_matrix(self) -> Array:
        """Return the rows of C that an observer sees, for lower bounds; raises ``TooLarge``.

        Shape (T, T); by default C itself.
        """
        return self.strategy_matrix()

    def visible_squares(self) -> Array:
        """Return the squared norms of the columns of ``visible_matrix``, shape (T,)."""
        matrix = self.visible_matrix()
        return np.asarray(np.einsum("ij,ij->j", matrix, matrix))

    def errors(self, workload: Workload) -> Errors:
        """Return the errors of ``workload`` at unit noise; raises ``TooLarge``."""
        if self.steps > MAX_VECTOR:
            raise TooLarge(f"errors over {self.steps} steps")
        toeplitz = workload.learning_rates is None
        return Errors.of(np.sqrt(self.variances(workload.apply, toeplitz=toeplitz)))

    def injected_noise(self) -> float:
        """Return the root mean square over steps of the noise at unit z; raises ``TooLarge``."""
        return float(np.sqrt(np.mean(self.variances(lambda noise: noise))))

    def variances(self, apply: Callable[[Array], Array], *, toeplitz: bool = True) -> Array:
        """Return the variances of (A·N·z)_t at unit z, shape (T,); raises ``TooLarge``.

        ``apply`` multiplies columns, of shape (T,) or (T, n), by A, which is ``toeplitz`` or not.
        It costs O(T) if N and A are Toeplitz, else O(T²), in blocks of columns.
        """
        first = self.noise_coefficients
        if first is not None and toeplitz:
            return np.asarray(np.cumsum(apply(first) ** 2))
        if self.steps > MAX_ERROR_STEPS:
            raise TooLarge(f"errors over {self.steps} steps without Toeplitz structure")
        result = np.zeros(self.steps)
        width = max(1, 4_000_000 // self.steps)
        for start in range(0, self.draws, width):
            block = apply(self.noise_columns(start, min(start + width, self.draws)))
            result += np.einsum("ij,ij->i", block, block)
        return result

    def _require_dense(self) -> None:
        if self.steps > MAX_MATRIX_STEPS:
            raise TooLarge(f"a matrix of {self.steps} x {self.steps}")


MAX_ENTRIES = 50_000_000
"""Maximum entries of all m_i together, 400 MB."""
COEFFICIENT_ERROR = 1e-12
"""Relative error of a product of coefficients that are evaluated from a formula."""


def column_norms(strategy: Strategy) -> Array:
    """Return ‖c_i‖ of the columns of C, rounded down, shape (T,).

    Raises ``TooLarge`` if C has no structure and too many steps.
    """
    column = strategy.strategy_coefficients
    squares = strategy.visible_squares() if column is None else np.cumsum(column**2)[::-1]
    slack = gamma(strategy.steps + 8) + COEFFICIENT_ERROR + strategy.residual
    return np.asarray(np.sqrt(squares) * (1 - slack))


def has_gram(strategy: Strategy, bins: int) -> bool:
    """Return whether ``gram`` has an answer."""
    is_formed = strategy.strategy_coefficients is None
    return (
        strategy.is_nonnegative
        and strategy.steps * bins <= MAX_ENTRIES
        and not (is_formed and strategy.steps > MAX_MATRIX_STEPS)
    )


def gram(strategy: Strategy, bins: int, *, visible_only: bool = False) -> Array:
    """Return ⟨m_i, m_j⟩ in squared clip norms, shape (bins, bins), rounded up; zeros stay zero.

    ``visible_only`` leaves out the rows of C that an observer does not see. Raises ``ValueError``
    if C has a negative entry, and ``TooLarge`` for more than ``MAX_ENTRIES``.
    """
    if not strategy.is_nonnegative:
        raise ValueError("the Gram matrix of bins needs a strategy without negative entries")
    steps = strategy.steps
    if steps * bins > MAX_ENTRIES:
        raise TooLarge(f"{bins} bins over {steps} steps")
    means = _means(strategy, bins, visible_only)
    result = means.T @ means
    result = np.maximum(result, result.T) * (1 + gamma(len(means) + steps) + COEFFICIENT_ERROR)
    if strategy.residual:
        # C = (I + R)⁻¹ Ĉ moves each mean by at most ρ / (1 - ρ) of its length.
        norms = np.sqrt(np.diagonal(result))
        result += 2.1 * strategy.residual / (1 - strategy.residual) * np.outer(norms, norms)
    return np.asarray(result)


def _means(strategy: Strategy, bins: int, visible_only: bool) -> Array:
    """Return m_0, ..., m_{b-1} as columns."""
    column = strategy.strategy_coefficients
    if column is None:
        matrix = strategy.visible_matrix() if visible_only else strategy.strategy_matrix()
        return np.stack([matrix[:, place::bins].sum(axis=1) for place in range(bins)], axis=1)
    steps = len(column)
    whole = -(-steps // bins)
    padded = np.zeros(whole * bins)
    padded[:steps] = column
    # The first mean is Σ_j S^(jb) c; the others are shifts of it, truncated at the end.
    first = np.cumsum(padded.reshape(whole, bins), axis=0).ravel()[:steps]
    result = np.zeros((steps, bins))
    for place in range(min(bins, steps)):
        result[place:, place] = first[: steps - place]
    return result
