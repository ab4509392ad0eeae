"""δ of a composition of lattice measures, through one transform a measure.

Tilting every measure by exp(λ l) and dividing by its total M gives a law π; the T-fold
convolution of the measures is exp(-λ x) M^T times that of the laws, so the digits of the
Fourier transform stand where δ is made. With C the product of M^T over the measures, x
the composed loss, y = x - ε and g(y) = e^{-λy} (1 - e^{-y})_+,

    δ(ε) = C e^{-λε} Σ_x c(x) g(x - ε) + (infinite mass),      c = convolution of the π.

The sum is taken over a window [low, high) of x as long as the transform, in the frequency
domain: frequencies at which the product of transforms is negligible are left out, so the
work after the one forward transform does not depend on its length.

Errors bounded here, each added (upper) or subtracted (lower), with u = 2**-53:

* aliasing: cyclic c is never below c. Mass outside the window, which may stand in for
  mass inside, is bounded by Chernoff at a further tilt of the lattice laws themselves; mass
  above the window contributes at most that times e^{-λ(high - ε)}.
* the forward transform of n points: 2-norm error at most 16 u log2(n) times the norm
  ([1] Theorem 24.2 gives 7 u for radix 2 with rounded twiddles; doubled for mixed radix),
  T-fold in the product, and by Cauchy-Schwarz at most ‖g‖₂ times as much in δ;
* the powers (T roundings by repeated squaring), and the sum over frequencies;
* frequencies left out: at most their threshold times ‖g‖₁;
* tilting: λ|l| + 8 roundings a mass, T-fold;
* infinite masses (a union bound) and shifted nodes (``loss_error``, T-fold in ε).

References: [1] Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., §24.1.
[2] Koskela, Jälkö and Honkela, arXiv:1906.03049, for δ by transforms; Gopi, Lee and
Wutschitz, arXiv:2106.02848, for windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from affidavit.accountants.fourier.lattice import LatticeMeasure
from affidavit.accountants.fourier.losses import UNIT_ROUNDOFF, Array

_NEGLIGIBLE = 1e-24
"""Frequencies whose composed transform is below this are left out (and accounted)."""
_SMALLEST_SUM = 1e-200
"""Below this a sum may have lost terms to underflow, and is taken in logarithms instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The composed losses that the transform stands for, and the tilts that shape it.

    ``order`` is λ; ``below`` and ``above`` are the further tilts with which Chernoff's
    bound holds the mass outside. Any positive values are sound, good ones are tight.
    """

    low: float
    high: float
    order: float
    below: float
    above: float


class ComposedTransform:
    """The tilted transform of a composition, from which δ(ε) is read with its error.

    Guarantees
    ----------
    * ``upper(ε)`` is at least, and ``lower(ε)`` at most, the hockey-stick curve at e^ε of
      the composition of the measures, for every ε; outside the window they are loose.
    """

    def __init__(self, parts: Sequence[tuple[LatticeMeasure, int]], window: Window) -> None:
        self._order = window.order
        self._peak = math.exp(log_peak(window.order))
        self._step = parts[0][0].grid.step
        self._size = _length(window, self._step)
        origins = [part.grid.origin * count for part, count in parts]
        self._origin = math.fsum(origins)
        self._first = math.ceil((window.low - self._origin) / self._step)
        self._last = self._first + self._size - 1
        self._placing = 8 * UNIT_ROUNDOFF * (sum(map(abs, origins)) + self._loss(self._last, 1))
        self._shift = sum(part.loss_error * count for part, count in parts)
        self._infinite = sum(part.infinite * count for part, count in parts)
        self._log_total = 0.0
        self._relative = 0.0
        self._transform_error = 0.0
        self._alive = True
        self._steps = sum(count for _, count in parts)
        low, high = self._loss(self._first), self._loss(self._last)
        log_below, log_above = window.below * low, -window.above * high
        kept = np.arange(self._size // 2 + 1)
        log_product = np.zeros(kept.size, dtype=np.complex128)
        worst = 0.0
        for part, count in parts:
            law = self._tilt(part, count)
            if law is None:
                self._alive = False
                return
            losses = part.grid.losses()
            log_below += count * _log_moment(law, losses, -window.below)
            log_above += count * _log_moment(law, losses, window.above)
            norm = math.sqrt(float(law @ law)) * (1 + 1e-10)
            error = 16 * UNIT_ROUNDOFF * math.log2(self._size) * norm
            self._transform_error += count * error
            worst += count * error * math.sqrt(self._size)
            spectrum = fft.rfft(_fold(law, self._size))[kept]
            # No factor exceeds 1 by more than the error above, so that what is negligible
            # after some measures stays so after all.
            with np.errstate(divide="ignore"):
                size = 0.5 * np.log(spectrum.real**2 + spectrum.imag**2)
            large = np.flatnonzero(log_product.real + count * size > math.log(_NEGLIGIBLE))
            kept = kept[large]
            log_product = log_product[large] + count * np.log(spectrum[large])
        # (|F| + e)^T <= 1 + ... <= e^{Te}: how far the errors of T factors can reinforce.
        growth = math.exp(min(700.0, worst))
        self._transform_error *= growth
        self._left_out = _NEGLIGIBLE * growth
        slack = 1 + 1e-9
        self._below = math.exp(min(0.0, log_below)) * slack
        self._above = math.exp(min(0.0, log_above)) * slack
        self._keep(kept, log_product)

    def _loss(self, index: int, magnitude: int = 0) -> float:
        if magnitude:
            return abs(self._origin) + abs(index * self._step)
        return self._origin + index * self._step

    def _tilt(self, part: LatticeMeasure, count: int) -> Array | None:
        """The tilted law of one measure; its log mass and rounding join the totals."""
        exponents = self._order * part.grid.losses()
        stride = max(1, part.grid.size // 1024)
        sample = np.append(np.arange(0, part.grid.size, stride), np.argmax(part.masses))
        peak = float(_log_weights(part.masses[sample], exponents[sample]).max())
        if peak == -math.inf:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            law: Array = np.exp(exponents - peak) * part.masses
            total = float(law.sum())
        if not math.isfinite(total):
            # The sample missed a peak by more than a double's range.
            weights = _log_weights(part.masses, exponents)
            peak = float(weights.max())
            law = np.exp(weights - peak)
            total = float(law.sum())
        law /= total
        log_total = peak + math.log(total)
        self._log_total += count * log_total
        size = float(max(abs(exponents[0]), abs(exponents[-1]))) + abs(peak) + abs(log_total)
        self._relative += count * UNIT_ROUNDOFF * (64.0 + 4.0 * size)
        return law

    def _keep(self, kept: NDArray[np.intp], log_product: NDArray[np.complex128]) -> None:
        """Keep the frequencies that matter, divided by the geometric sums' denominators."""
        values = np.exp(log_product) / self._size
        # A real transform stands for both k and -k, except at k = 0 and the middle.
        twice = np.where((kept == 0) | (2 * kept == self._size), 1.0, 2.0)
        angle = 2j * math.pi * kept / self._size
        self._frequencies = kept
        self._slow = values * twice / -np.expm1(angle - self._order * self._step)
        self._fast = values * twice / -np.expm1(angle - (self._order + 1) * self._step)
        # The far end of both geometric sums sits at a fixed loss, so it is summed once.
        turn = self._turn(self._last + 1)
        self._slow_end = float(np.sum(self._slow * turn).real)
        self._fast_end = float(np.sum(self._fast * turn).real)
        self._size_of_sum = 2 * float(np.abs(self._slow).sum() + np.abs(self._fast).sum())

    def _turn(self, index: int) -> NDArray[np.complex128]:
        phases = (self._frequencies * (index % self._size)) % self._size
        turn: NDArray[np.complex128] = np.exp(2j * math.pi / self._size * phases)
        return turn

    def _sum(self, epsilon: float) -> tuple[float, float]:
        """Σ c(x) g(x - ε) over the window, and a bound of its computed value's error."""
        index = max(self._first, math.ceil((epsilon - self._origin) / self._step))
        near = max(0.0, self._loss(index) - epsilon)
        far = self._loss(self._last + 1) - epsilon
        turn = self._turn(index)
        slow, fast = self._order, self._order + 1
        total = math.exp(-slow * near) * float(np.sum(self._slow * turn).real)
        total -= math.exp(-fast * near) * float(np.sum(self._fast * turn).real)
        total -= math.exp(-slow * far) * self._slow_end - math.exp(-fast * far) * self._fast_end
        peak = self._peak
        sum_of_g = 1 / (self._step * slow * fast) + peak
        powers = UNIT_ROUNDOFF * (64.0 + 16.0 * self._steps) * self._size_of_sum
        error = (
            self._transform_error * math.sqrt(peak * sum_of_g) + powers + self._left_out * sum_of_g
        )
        return total, error

    def _scale(self, epsilon: float) -> tuple[float, float]:
        """log of C e^{-λε}, and a bound of the relative error of everything times it."""
        log_scale = self._log_total - self._order * epsilon
        size = abs(self._log_total) + abs(self._order * epsilon)
        return log_scale, self._relative + 16 * UNIT_ROUNDOFF * (1 + size)

    def upper(self, epsilon: float) -> float:
        """An upper bound of δ at ``epsilon``, at most 1."""
        if not self._alive:
            return min(1.0, self._infinite)
        epsilon = min(epsilon - self._shift - self._placing, self._loss(self._last))
        total, error = self._sum(epsilon)
        log_scale, relative = self._scale(epsilon)
        beyond = math.exp(min(0.0, -self._order * (self._loss(self._last) - epsilon)))
        total = max(total, 0.0) + error + self._above * beyond
        if epsilon < self._loss(self._first):
            total += self._below * self._peak
        return min(1.0, _exp(log_scale + relative) * total + self._infinite * (1 + 1e-12))

    def lower(self, epsilon: float) -> float:
        """A lower bound of δ at ``epsilon``, at least 0."""
        if not self._alive:
            return 0.0
        epsilon = epsilon + self._shift + self._placing
        if epsilon >= self._loss(self._last):
            return 0.0
        total, error = self._sum(epsilon)
        log_scale, relative = self._scale(epsilon)
        total -= error + (self._below + self._above) * self._peak
        return max(0.0, _exp(log_scale - relative) * total)


def log_peak(order: float) -> float:
    """The logarithm of the largest value of g, λ^λ / (1+λ)^(1+λ)."""
    return -math.log1p(order) - order * math.log1p(1 / order)


def _length(window: Window, step: float) -> int:
    points = math.ceil((window.high - window.low) / step) + 2
    return int(fft.next_fast_len(max(32, points), real=True))


def _log_weights(masses: Array, exponents: Array) -> Array:
    """log(mass) + exponent; -inf where there is no mass."""
    with np.errstate(divide="ignore"):
        weights: Array = exponents + np.log(masses)
    return weights


def _log_moment(law: Array, losses: Array, order: float) -> float:
    """log Σ law · exp(order · losses), raised by its own rounding."""
    exponents = order * losses
    peak = float(exponents.max())
    total = float(law @ np.exp(exponents - peak))
    if total < _SMALLEST_SUM:
        # The law is nothing where the exponential is largest: weigh the two together.
        weights = _log_weights(law, exponents)
        peak = float(weights.max())
        total = float(np.exp(weights - peak).sum())
    value = peak + math.log(total)
    size = float(max(abs(exponents[0]), abs(exponents[-1])))
    return value + UNIT_ROUNDOFF * (128.0 + 8.0 * size)


def _fold(law: Array, size: int) -> Array:
    """``law`` wrapped around to ``size`` points."""
    rows = -(-law.size // size)
    padded = np.zeros(rows * size)
    padded[: law.size] = law
    folded: Array = padded.reshape(rows, size).sum(axis=0)
    return folded


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700.0 else math.inf
