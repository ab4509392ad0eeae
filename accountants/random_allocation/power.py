"""One bin's likelihood ratio, as a law on the real line.

Under the hypothesis without the record, bin i contributes X_i = exp(z_i/σ - 1/(2σ²)) to
the likelihood ratio S = (X_1 + ... + X_b) / b, with z_i standard normal. Both directions
ask for the mean of (ΣV - Θ)_+ over independent copies of one V:

========  =====  =======================================  ============
side      V      δ(ε)                                     Θ
========  =====  =======================================  ============
remove    X      E (ΣV - Θ)_+ / b                         b e^ε
add       -X     e^ε E (ΣV - Θ)_+ / b                     -b e^-ε
========  =====  =======================================  ============

``Term`` knows V through its call function C(a) = E (V - a)_+ and its tail
T(a) = Pr(V >= a), both of V below ``top``; larger values are the caller's to count. They
are normal probabilities, because the mean of a lognormal beyond a point is one too.

``Calls.error`` bounds how far the computed C is from the true one, in units of
u = 2**-53 from the operations made: cephes' ``ndtr`` is exp(-z²/2) times a rational
function, so its relative error grows like z²/2 roundings, and z is off by as much as the
logarithm that it is made of.

Reference: ``docs/theorems/random-allocation.md``.

The mean of (ΣV - Θ)_+ over b independent copies of one lattice measure.

Tilting the measure by exp(θ a) and dividing by its total M gives a law π; with c its
b-fold convolution, y = x - Θ and g(y) = y e^{-θy} for y >= 0,

    E (ΣV - Θ)_+ = M^b e^{-θΘ} Σ_x c(x) g(x - Θ),

so that the digits of one Fourier transform stand where the payoff is made. The sum is
taken over a window of x as long as the transform.

Errors bounded here, each added (upper) or subtracted (lower), with u = 2**-53:

* aliasing: cyclic c is never below c. Mass outside the window, which may stand in for
  mass inside, is bounded by Chernoff with the lattice law's own moments;
* the forward transform of π wrapped to n points (``affidavit.accountants.composition``), b-fold in
  the power; the
  power (64 + 16 b roundings a frequency) and the transform back; by Cauchy-Schwarz at most
  ‖g‖₂ times as much in the sum, where ‖g‖₂² <= max g (max g + 1/(hθ²)), max g = 1/(eθ);
* tilting: θ|a| + 8 roundings a mass, b-fold;
* the places x of the sums, which move Θ.

Reference: [1] Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., §24.1;
docs/theorems/random-allocation.md for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from scipy import fft
from scipy.special import ndtr

from affidavit.accountants.cyclic_convolution import (
    UNIT_ROUNDOFF,
    Array,
    folded,
    norm,
    rounding,
    transform_error,
)

Side = Literal["remove", "add"]

_FAR = 40.0
"""θ times the distance beyond which the payoff is an error: y e^{-θy} is below a rounding there."""
_Z_REACH = 12.5
"""Normal deviations kept by the atoms; mass beyond is below 1e-35."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """T and C on a grid of n values a, with a bound of the error of C; shape (n,) each."""

    tail: Array
    value: Array
    error: Array


@dataclass(frozen=True, kw_only=True)
class Term:
    """V of one bin, restricted to V <= ``top``; ``rate`` is 1/σ."""

    rate: float
    side: Side
    top: float

    def z(self, x: Array) -> Array:
        """The normal deviation at which X is ``x``; -inf at 0. Of the shape of ``x``."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(x) / self.rate + self.rate / 2)

    def place(self, z: float) -> float:
        """X at the normal deviation ``z``."""
        return math.exp(self.rate * z - self.rate**2 / 2)

    def calls(self, points: Array) -> Calls:
        """T and C at ``points``. ``points`` and both functions have shape (n,)."""
        x = np.maximum(points if self.side == "remove" else -points, 0.0)
        z = self.z(x)
        if self.side == "remove":
            end = self.z(np.array([self.top]))[0]
            mass, mean = ndtr(-z), ndtr(self.rate - z)
            tail, first = mass - ndtr(-end), mean - ndtr(self.rate - end)
            value = np.where(x < self.top, first - points * tail, 0.0)
            size = np.where(x < self.top, mean + np.abs(points) * mass, 0.0)
        else:
            end = self.z(np.array([-self.top]))[0]
            mass, mean = ndtr(z), ndtr(z - self.rate)
            tail, first = mass - ndtr(end), mean - ndtr(end - self.rate)
            value = np.where(x > -self.top, x * tail - first, 0.0)
            size = np.where(x > -self.top, x * mass + mean, 0.0)
        return Calls(
            tail=np.maximum(tail, 0.0), value=np.maximum(value, 0.0), error=self._relative(z) * size
        )

    def _relative(self, z: Array) -> Array:
        """Relative error of the terms that C is made of, at normal deviations ``z``."""
        reach = np.minimum(np.abs(z), 40.0) + self.rate + 1.0
        return UNIT_ROUNDOFF * (32.0 + 4.0 * reach * (reach + self.rate))

    @cached_property
    def mass(self) -> float:
        """Pr(V <= top), rounded up."""
        if self.side == "add":
            return 1.0
        return min(1.0, float(ndtr(self.z(np.array([self.top]))[0])) * (1 + 1e-13))

    @cached_property
    def atoms(self) -> tuple[Array, Array]:
        """V and its log weights by the trapezoid rule, for steering; no bound rests on them.

        Under ``remove`` they crowd towards the top, where a strong tilt finds them.

        Both have shape (n,).
        """
        z = np.arange(-_Z_REACH, _Z_REACH + self.rate, min(0.05, 0.25 / self.rate))
        if self.side == "remove":
            end = float(self.z(np.array([self.top]))[0])
            z = np.sort(np.concatenate((z[z < end], end - np.geomspace(1e-5, 0.5, 80) / self.rate)))
        weights = -z * z / 2 + np.log(np.gradient(z) / math.sqrt(2 * math.pi))
        x = np.exp(self.rate * z - self.rate**2 / 2)
        return (x if self.side == "remove" else -x), weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The sums that the transform stands for, and the tilts that shape it.

    ``tilt`` is θ; ``below`` and ``above`` are the further tilts with which Chernoff's
    bound holds the mass outside. Any positive values are sound, good ones are tight.
    """

    low: float
    high: float
    tilt: float
    below: float
    above: float


class PowerOfMeasure:
    """The ``copies``-fold convolution of one lattice measure, tilted, and its payoffs.

    ``nodes``, evenly spaced, and ``masses`` have shape (n,).

    Guarantees
    ----------
    * ``upper`` is at least, and ``lower`` at most, the mean of (ΣV - Θ)_+, for
      every Θ; far from the window they are loose.
    """

    def __init__(self, nodes: Array, masses: Array, copies: int, window: Window) -> None:
        self._tilt = window.tilt
        self._step = float(nodes[-1] - nodes[0]) / (nodes.size - 1)
        self._alive = bool(masses.any())
        if not self._alive:
            return
        law = self._tilted(nodes, masses, copies)
        size = transform_length(window, self._step)
        first = math.floor((window.low - copies * float(nodes[0])) / self._step)
        self._sums = copies * float(nodes[0]) + self._step * (first + np.arange(size))
        wrapped = folded(law, size)
        spectrum = fft.rfft(wrapped)
        with np.errstate(divide="ignore", invalid="ignore"):
            power = np.where(spectrum == 0, 0.0, np.exp(copies * np.log(spectrum)))
        result = np.roll(fft.irfft(power, size), -(first % size))
        one = transform_error(wrapped, law.size)
        growth = math.exp(min(700.0, copies * one * math.sqrt(size)))
        transform = copies * one * growth
        self._error = transform + 2 * (UNIT_ROUNDOFF * (64 + 16 * copies) + rounding(size)) * (
            norm(result) + transform
        )
        low, high = float(self._sums[0]), float(self._sums[-1])
        self._below = _chernoff(law, nodes, copies, -window.below, low)
        self._above = _chernoff(law, nodes, copies, window.above, high)
        reach = copies * float(np.abs(nodes).max()) + max(abs(low), abs(high))
        self._placing = 16 * UNIT_ROUNDOFF * reach
        self._sum_in_blocks(result)

    def _tilted(self, nodes: Array, masses: Array, copies: int) -> Array:
        exponents = self._tilt * nodes
        peak = float(exponents[masses > 0].max())
        law: Array = np.exp(np.minimum(exponents - peak, 0.0)) * masses
        total = float(law.sum())
        log_total = peak + math.log(total)
        self._log_total = copies * log_total
        size = float(np.abs(exponents).max()) + abs(peak) + abs(log_total)
        self._relative = copies * UNIT_ROUNDOFF * (64.0 + 4.0 * size)
        return law / total

    def _sum_in_blocks(self, sums_law: Array) -> None:
        """Sums of c(x) e^{-θ(x - x₀)} and of (x - x₀) times as much, in blocks that begin at x₀."""
        size = sums_law.size
        self._width = max(1, min(size, math.ceil(_FAR / (self._tilt * self._step))))
        law = np.zeros((-(-size // self._width) + 1) * self._width)
        law[:size] = sums_law
        offsets = self._step * np.arange(self._width)
        weighted = law.reshape(-1, self._width) * np.exp(-self._tilt * offsets)
        self._masses = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
        self._moments = np.cumsum((weighted * offsets)[:, ::-1], axis=1)[:, ::-1]
        span = self._width * self._step + 2 / self._tilt
        total = 1 + self._error * math.sqrt(size)
        # Blocks are summed one term after the other; after two of them g is next to nothing.
        self._summing = total * (
            2 * UNIT_ROUNDOFF * (self._width + 32) * span + _FAR * math.exp(-_FAR) / self._tilt
        )

    def _sum(self, thresholds: Array) -> tuple[Array, float]:
        """Σ c(x) g(x - Θ) over the window, and a bound of its computed values' error."""
        start = np.searchsorted(self._sums, thresholds)
        row, column = np.divmod(np.minimum(start, self._sums.size - 1), self._width)
        inside = np.where(start < self._sums.size, thresholds - self._sums[row * self._width], 0.0)
        total = np.zeros(thresholds.size)
        for first, index in (
            (inside, (row, column)),
            (
                inside - self._width * self._step,
                (row + 1, 0),
            ),
        ):
            moment = self._moments[index] - first * self._masses[index]
            total += np.exp(self._tilt * first) * moment
        total[start == self._sums.size] = 0.0
        peak = self._peak
        spread = math.sqrt(peak * (peak + 1 / (self._step * self._tilt**2)))
        return total, self._error * spread + self._summing

    @property
    def _peak(self) -> float:
        return 1 / (math.e * self._tilt)

    def _scale(self, thresholds: Array, outwards: float) -> Array:
        """M^b e^{-θΘ}, moved ``outwards`` (1 or -1) by the errors of all that it multiplies."""
        exponents = self._tilt * thresholds
        sizes = 1 + abs(self._log_total) + np.abs(exponents)
        relative = self._relative + 16 * UNIT_ROUNDOFF * sizes
        return _exp(self._log_total - exponents + outwards * relative)

    def upper(self, thresholds: Array) -> Array:
        """Upper bounds of E (ΣV - Θ)_+ at each Θ of ``thresholds``, shape (m,) as they."""
        if not self._alive:
            return np.zeros(thresholds.size)
        thresholds = thresholds - self._placing
        totals, error = self._sum(thresholds)
        reach = np.maximum(float(self._sums[-1]) - thresholds, 1 / self._tilt)
        totals = np.maximum(totals, 0.0) + error
        totals += self._above * reach * np.exp(-self._tilt * reach)
        totals[thresholds < self._sums[0]] += self._below * self._peak
        return self._scale(thresholds, 1) * totals

    def lower(self, thresholds: Array) -> Array:
        """Lower bounds of E (ΣV - Θ)_+ at each Θ of ``thresholds``, at least 0; (m,) as they."""
        if not self._alive:
            return np.zeros(thresholds.size)
        thresholds = thresholds + self._placing
        totals, error = self._sum(thresholds)
        totals -= error + (self._below + self._above) * self._peak
        return np.maximum(0.0, self._scale(thresholds, -1) * totals)


def transform_length(window: Window, step: float) -> int:
    """Points of the transform for ``window`` at ``step``."""
    points = math.ceil((window.high - window.low) / step) + 2
    return int(fft.next_fast_len(max(64, points), real=True))


class PayoffCeiling:
    """An upper bound of E (ΣV - Θ)_+ by Chernoff alone: e^{-θΘ} (E e^{θV})^b / (eθ).

    ``nodes`` and ``masses`` have shape (n,), the ``tilts`` θ that are tried (m,).
    """

    def __init__(self, nodes: Array, masses: Array, copies: int, tilts: Array) -> None:
        self._tilts = tilts
        self._log_bounds = np.array(
            [_log_power(masses, nodes, copies, float(tilt)) for tilt in tilts]
        ) - np.log(math.e * tilts)

    def upper(self, thresholds: Array) -> Array:
        """The least of the bounds at each Θ of ``thresholds``, shape (k,) as they."""
        exponents = self._log_bounds - np.outer(thresholds, self._tilts)
        rounding = 16 * UNIT_ROUNDOFF * (1 + np.abs(self._log_bounds) + np.abs(exponents))
        return _exp((exponents + rounding).min(axis=1))


def _log_power(masses: Array, nodes: Array, copies: int, tilt: float) -> float:
    """log of (Σ masses · exp(tilt · nodes))^copies, raised by its own rounding."""
    with np.errstate(divide="ignore"):
        weights = tilt * nodes + np.log(masses)
    peak = float(weights.max())
    if peak == -math.inf:
        return -math.inf
    log_moment = peak + math.log(float(np.exp(weights - peak).sum()))
    size = float(np.abs(tilt * nodes).max()) + abs(peak)
    return copies * (log_moment + UNIT_ROUNDOFF * (128.0 + 8.0 * size))


def _chernoff(law: Array, nodes: Array, copies: int, tilt: float, end: float) -> float:
    """A bound of the ``copies``-fold law's mass beyond ``end``, on the side of ``tilt``."""
    log_mass = _log_power(law, nodes, copies, tilt) - tilt * end
    return math.exp(min(0.0, log_mass)) * (1 + 1e-9)


def _exp(exponents: Array) -> Array:
    return np.where(exponents < 700.0, np.exp(np.minimum(exponents, 700.0)), np.inf)
