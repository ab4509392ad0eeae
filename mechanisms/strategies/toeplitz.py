"""Toeplitz strategies: one column of C, or of N, shifted down step by step.

The first column of C is a power series c(x), that of N = C⁻¹ its reciprocal n(x) = 1/c(x). Either
one may be given; further coefficients are zero. The noise is generated from the given one:
w_t = Σ_i n_i z_{t-i}, or w_t = (z_t - Σ_{i≥1} c_i w_{t-i}) / c_0.

If N is given, C is computed by its recurrence and *checked*: with ĉ·n = 1 + r, rounding included,
sens(C) ≤ sens(Ĉ) / (1 - ‖r‖₁). A reciprocal that is not accurate to a millionth is refused.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> half = Toeplitz.from_noise([1.0, -0.5], steps=4)
>>> half.strategy_coefficients
array([1.   , 0.5  , 0.25 , 0.125])
>>> round(half.sensitivity(Participation.single()).value, 6)
1.152443

**Square roots** of the workload of heavy-ball momentum β at a constant rate, the Toeplitz matrix of
1 / ((1-x)(1-βx)): c(x) = (1-x)^(-1/2) (1-βx)^(-1/2), non-negative, decreasing and close to optimal.

* ``sqrt``: C = A^(1/2), all coefficients.
* ``bsr``: its first b̂ coefficients, so C is banded.
* ``bisr``: the first b̂ coefficients of N = A^(-1/2), so the *inverse* is banded.
* ``bifr``: those of N = A^-γ; few bands want a γ above 1/2.

Learning rates are ignored, because a Toeplitz strategy cannot follow them.

>>> square_root(4).strategy_coefficients
array([1.    , 0.5   , 0.375 , 0.3125])
>>> banded_inverse_root(4, bands=2).noise_coefficients
array([ 1. , -0.5,  0. ,  0. ])

**Identity**: independent noise as a strategy.

>>> epochs = Participation.fixed_epoch(participations=4, separation=5)
>>> round(identity(steps=20).sensitivity(epochs).value, 12)
2.0

References: Choquette-Choo et al., arXiv:2306.08153 (banded Toeplitz); Fichtenberger, Henzinger and
Upadhyay, arXiv:2202.11205 (square roots); Kalinin and Lampert, arXiv:2405.13763 (BSR, momentum);
Kalinin, McKenna, Upadhyay and Lampert, arXiv:2505.12128 (banded inverse); Kalinin, Rehn, Andersson,
Honkela and Lampert, arXiv:2605.18379 (γ); ``docs/theorems/correlated-noise.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies.long_runs import Response
from affidavit.mechanisms.strategies.numerics import Array, fftconvolve, gamma, lfilter, padded
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import (
    Sensitivity,
    Unaffordable,
    inverse_sensitivity,
    toeplitz_sensitivity,
)
from affidavit.mechanisms.strategies.strategy import (
    MAX_VECTOR,
    Errors,
    Strategy,
    Streaming,
    validate_inverse,
    validate_residual,
)
from affidavit.mechanisms.strategies.workload import Workload

MAX_PRODUCTS = 2_000_000_000
"""Products that a checked reciprocal may take, in about a second."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Toeplitz(Strategy):
    """C with first column ``column``, or N with first column ``noise_column``.

    Exactly one is given, with at most ``steps`` coefficients; further ones are zero. The first one
    is positive, because noise of the other sign is the same noise.
    """

    column: Array | None = None
    noise_column: Array | None = None

    @classmethod
    def from_strategy(
        cls, coefficients: Sequence[float] | Array, steps: int, *, kind: str = "toeplitz"
    ) -> Toeplitz:
        """Return the strategy with this first column of C, shape (m,), zero afterwards.

        Raises ``ValueError`` unless it is finite and its first entry is not 0.
        """
        return cls(kind=kind, steps=steps, column=_column(coefficients, steps))

    @classmethod
    def from_noise(
        cls, coefficients: Sequence[float] | Array, steps: int, *, kind: str = "toeplitz_inverse"
    ) -> Toeplitz:
        """Return the strategy with this first column of N, like ``from_strategy``.

        ``coefficients`` have shape (m,). Raises ``ValueError``.
        """
        return cls(kind=kind, steps=steps, noise_column=_column(coefficients, steps))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens(C); raises ``Unaffordable`` and ``IllConditioned``."""
        if self.column is not None:
            return toeplitz_sensitivity(self.column, self.steps, participation)
        residual = self.residual
        bound = toeplitz_sensitivity(self.strategy_coefficients, self.steps, participation)
        return inverse_sensitivity(bound, residual)

    @property
    def streaming(self) -> Streaming:
        """A moving average of z for a given N, an autoregression for a given C."""
        if self.noise_column is not None:
            return Streaming(
                form="moving_average",
                buffers=len(self.noise_column) - 1,
                recurrence="w_t = Σ_i a_i z_{t-i}, with z before the first step zero",
                coefficients=tuple(self.noise_column.tolist()),
            )
        assert self.column is not None
        return Streaming(
            form="autoregressive",
            buffers=len(self.column) - 1,
            recurrence="w_t = (z_t - Σ_{i≥1} a_i w_{t-i}) / a_0, with w before the first step zero",
            coefficients=tuple(self.column.tolist()),
        )

    def errors(self, workload: Workload) -> Errors:
        """Return the errors of ``workload`` at unit noise; raises ``TooLarge``.

        Those of prefix sums are known for runs of any length if N has few coefficients.
        """
        if self.steps > MAX_VECTOR and workload.is_prefix_sum and self.noise_column is not None:
            sums = np.cumsum(self.noise_column)
            return Response(head=sums, constant=float(sums[-1])).errors(self.steps)
        return super().errors(workload)

    def injected_noise(self) -> float:
        """Return the rms over steps of the noise at unit z; raises ``TooLarge``."""
        if self.steps > MAX_VECTOR and self.noise_column is not None:
            return Response(head=self.noise_column).rms(self.steps)
        return super().injected_noise()

    @property
    def is_nonnegative(self) -> bool:
        """Whether no coefficient of C is negative."""
        return bool(np.all(self.strategy_coefficients >= 0))

    @property
    def bands(self) -> int:
        """The number of coefficients of C up to the last nonzero one; T for a given N.

        An inverse has no last coefficient, even if the doubles end in zeros.
        """
        if self.column is not None:
            return len(np.trim_zeros(self.column, "b"))
        return 1 if not np.any(self.noise_coefficients[1:]) else self.steps

    @cached_property
    def strategy_coefficients(self) -> Array:
        """The first column of C, shape (T,).

        Raises ``Unaffordable`` if inverting N takes more than ``MAX_PRODUCTS`` operations.
        """
        if self.column is not None:
            return padded(self.column, self.steps)
        assert self.noise_column is not None
        if self.steps * len(self.noise_column) > MAX_PRODUCTS:
            raise Unaffordable(
                f"inverting {len(self.noise_column)} coefficients over {self.steps} steps"
            )
        return reciprocal(self.noise_column, self.steps)

    @cached_property
    def noise_coefficients(self) -> Array:
        """The first column of N, shape (T,), for errors and streaming, not for sensitivity."""
        if self.noise_column is not None:
            return padded(self.noise_column, self.steps)
        assert self.column is not None
        if self.steps * len(self.column) <= MAX_PRODUCTS:
            return reciprocal(self.column, self.steps)
        return newton_reciprocal(self.column, self.steps)

    def noise_columns(self, first: int, last: int) -> Array:
        """Return columns first..last-1 of N, shape (T, last - first)."""
        result = np.zeros((self.steps, last - first))
        for place in range(first, last):
            result[place:, place - first] = self.noise_coefficients[: self.steps - place]
        return result

    def strategy_matrix(self) -> Array:
        """Return C, shape (T, T)."""
        self._require_dense()
        return np.asarray(toeplitz(self.strategy_coefficients, np.zeros(self.steps)))

    @property
    def coefficients(self) -> Mapping[str, Array]:
        """The given first column, as ``strategy`` or ``noise``."""
        provided = {"strategy": self.column, "noise": self.noise_column}
        return {name: array for name, array in provided.items() if array is not None}

    @cached_property
    def residual(self) -> float:
        """ρ ≥ ‖Ĉ N - I‖, rounding included.

        It is 0 if C is given; raises ``IllConditioned`` above ``MAX_RESIDUAL``.
        """
        noise = self.noise_column
        if noise is None:
            return 0.0
        computed = validate_inverse(self.strategy_coefficients)
        residual = lfilter(noise, [1.0], computed)
        residual[0] -= 1.0
        size = lfilter(np.abs(noise), [1.0], np.abs(computed))
        doubt = gamma(len(noise) + 2) * (size + 1.0)
        total = float(np.sum(np.abs(residual) + doubt)) * (1 + gamma(self.steps))
        return validate_residual(total)


def _column(coefficients: Sequence[float] | Array, steps: int) -> Array:
    result = np.array(coefficients[:steps], dtype=np.float64)
    if not len(result) or result[0] == 0 or not np.all(np.isfinite(result)):
        raise ValueError("coefficients must be finite, and the first not zero")
    if result[0] < 0:
        result = -result  # noise is symmetric
    result.flags.writeable = False
    return result


def reciprocal(series: Array, steps: int) -> Array:
    """Return 1 / ``series``, shape (m,), by its recurrence, in O(T · m); shape (steps,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(lfilter([1.0], series, padded(np.ones(1), steps)))


def newton_reciprocal(series: Array, steps: int) -> Array:
    """Return 1 / ``series`` by Newton's y ← y (2 - series·y), in O(T log T); shape (steps,).

    ``series`` has shape (m,).
    """
    result = np.array([1.0 / series[0]])
    while len(result) < steps:
        size = min(2 * len(result), steps)
        correction = -_product(padded(series, size), result, size)
        correction[0] += 2.0
        result = _product(result, correction, size)
    return result


def _product(left: Array, right: Array, size: int) -> Array:
    length = next_fast_len(len(left) + len(right), real=True)
    return np.asarray(irfft(rfft(left, length) * rfft(right, length), length)[:size])


MAX_DIRECT_LENGTH = 8192
"""Length up to which two series are multiplied term by term."""


def square_root(steps: int, *, momentum: float = 0.0) -> Toeplitz:
    """Return C = A^(1/2) over ``steps``; ``momentum`` is β in [0, 1), here and below."""
    return Toeplitz.from_strategy(_root(steps, momentum, -0.5), steps, kind="sqrt")


def banded_root(steps: int, *, bands: int, momentum: float = 0.0) -> Toeplitz:
    """Return BSR: C has the first ``bands`` coefficients of A^(1/2)."""
    return Toeplitz.from_strategy(_root(min(bands, steps), momentum, -0.5), steps, kind="bsr")


def banded_inverse_root(steps: int, *, bands: int, momentum: float = 0.0) -> Toeplitz:
    """Return BISR: N has the first ``bands`` coefficients of A^(-1/2)."""
    return Toeplitz.from_noise(_root(min(bands, steps), momentum, 0.5), steps, kind="bisr")


def banded_inverse_fractional_root(
    steps: int, *, bands: int, gamma: float, momentum: float = 0.0
) -> Toeplitz:
    """Return γ-BIFR: N has the first ``bands`` coefficients of A^-γ; ``gamma`` is in (0, 1]."""
    return Toeplitz.from_noise(_root(min(bands, steps), momentum, gamma), steps, kind="bifr")


def _root(length: int, momentum: float, power: float) -> Array:
    """Return the first coefficients of ((1-x)(1-βx))^power."""
    plain = _binomial(length, power)
    if not momentum:
        return plain
    other = plain * momentum ** np.arange(length, dtype=np.float64)
    product = np.convolve if length <= MAX_DIRECT_LENGTH else fftconvolve
    return np.asarray(product(plain, other)[:length])


def _binomial(length: int, power: float) -> Array:
    """Return the coefficients of (1-x)^power: a_j = a_{j-1} (j - 1 - power) / j."""
    places = np.arange(1, length, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((places - 1 - power) / places)])


def identity(steps: int) -> Toeplitz:
    """Return C = N = I, whose sensitivity for k participations is √k."""
    return Toeplitz.from_noise([1.0], steps, kind="independent")
