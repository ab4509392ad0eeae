"""The likelihood ratio of one bin on a lattice, and its b-fold convolution.

**One bin.** Under the hypothesis without the record, bin i contributes X_i = exp(z_i/σ - 1/(2σ²))
to the likelihood ratio S = (X_1 + ... + X_b) / b, with z_i standard normal. Both directions need
the mean of (ΣV - Θ)_+ over independent copies of one V:

========  =====  =======================================  ============
side      V      δ(ε)                                     Θ
========  =====  =======================================  ============
remove    X      E (ΣV - Θ)_+ / b                         b e^ε
add       -X     e^ε E (ΣV - Θ)_+ / b                     -b e^-ε
========  =====  =======================================  ============

``Term`` gives the call function C(a) = E (V - a)_+ and the tail T(a) = Pr(V >= a) of V below
``top``; the caller accounts for larger values. Both are normal probabilities, because the mean of a
lognormal beyond a point is one. ``Calls.error`` bounds the rounding of C in units of u = 2**-53:
cephes' ``ndtr`` is exp(-z²/2) times a rational function, so its relative error grows like z²/2
roundings, and z has the error of its logarithm.

**Lattice.** The payoff (ΣV - Θ)_+ is convex and increasing in every V. So replacing the law of V by
a measure whose call function is nowhere lower (higher) raises (lowers) its mean, one term after the
other. With nodes a_0 < ... < a_K and edges e_i half-way between them:

* upper: the chords of C over the nodes. Right of a_K the function is 0, so a_K must be at least
  ``top``. Left of a_0 its slope is the whole mass, which raises smaller V to a_0, or no bound is
  claimed there.
* lower: the values v_i = min(t_i(a_i), t_{i+1}(a_i)) of the tangents t_i of C at e_i, whose chords
  lie below them. The outer tangents are 0 on the right, so the last node must lie at or below the
  barycentre of its cell, and on the left either the line of all mass and mean or the tangent at
  e_0, which drops what lies below it.

A measure's call function is the integral of its tails from the right, so raising (lowering) the
tails raises (lowers) it. This is how rounding enters and how the tails are made monotone. Both
constructions keep the mean and are second order in the step.

**Convolution.** Tilting the measure by exp(θ a) and dividing by its total M gives a law π. With c
its b-fold convolution and g(y) = y e^{-θy} for y >= 0,

    E (ΣV - Θ)_+ = M^b e^{-θΘ} Σ_x c(x) g(x - Θ),

so the Fourier transform is most accurate where the payoff is made. The sum is over a window of x
as long as the transform. Errors are added (upper) or subtracted (lower), with u = 2**-53:

* aliasing: cyclic c is never below c. Mass outside the window, which may replace mass inside, is
  bounded by Chernoff with the lattice law's own moments;
* the forward transform of π wrapped to n points (``rounding``), b-fold in the power, the
  power (64 + 16 b roundings a frequency) and the inverse transform; by Cauchy-Schwarz at most
  ‖g‖₂ times as much in the sum, where ‖g‖₂² <= max g (max g + 1/(hθ²)), max g = 1/(eθ);
* tilting: θ|a| + 8 roundings a mass, b-fold;
* the positions x of the sums, which move Θ.

References: docs/theorems/random-allocation.md; Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., §24.1; Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots",
PoPETs 2022, for the chords; docs/theorems/fourier-lattice.md for the same on losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import ndtr

from affidavit.accountants.rounding import (
    UNIT_ROUNDOFF,
    Array,
    folded,
    norm,
    transform_error,
    transform_rounding,
)

Side = Literal["remove", "add"]
Copies = tuple[Array, Array, int]
"""Nodes, masses on them, of one shape (n,), and how many independent copies there are."""

_MAX_EXPONENT = 40.0
"""θ times the distance beyond which the payoff y e^{-θy} is below a rounding."""
_MAX_ATOM_Z = 12.5
"""Normal deviations of the atoms; the mass beyond is below 1e-35."""
_CONVEXITY_ROUNDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """T and C at n points, with a bound of the error of C; shape (n,) each."""

    tail: Array
    value: Array
    error: Array


@dataclass(frozen=True, kw_only=True)
class Term:
    """The V of one bin, restricted to V <= ``top``; ``rate`` is 1/σ."""

    rate: float
    side: Side
    top: float

    def z(self, x: Array) -> Array:
        """Return the normal deviation at which X is ``x``, -inf at 0, of the shape of ``x``."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(x) / self.rate + self.rate / 2)

    def value_at(self, z: float) -> float:
        """Return X at the normal deviation ``z``."""
        return math.exp(self.rate * z - self.rate**2 / 2)

    def calls(self, points: Array) -> Calls:
        """Return T and C at ``points``, shape (n,) each."""
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
        """Return the relative error of the terms of C at normal deviations ``z``."""
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
        """V and its log weights by the trapezoid rule, shape (n,) each; no bound rests on them.

        Under ``remove`` they are denser towards the top, where a strong tilt needs them.
        """
        z = np.arange(-_MAX_ATOM_Z, _MAX_ATOM_Z + self.rate, min(0.05, 0.25 / self.rate))
        if self.side == "remove":
            end = float(self.z(np.array([self.top]))[0])
            z = np.sort(np.concatenate((z[z < end], end - np.geomspace(1e-5, 0.5, 80) / self.rate)))
        weights = -z * z / 2 + np.log(np.gradient(z) / math.sqrt(2 * math.pi))
        x = np.exp(self.rate * z - self.rate**2 / 2)
        return (x if self.side == "remove" else -x), weights


class BoundedLaw(Protocol):
    """The law of one V, restricted to V <= ``top``."""

    @property
    def top(self) -> float:
        """The largest V."""
        ...

    @property
    def mass(self) -> float:
        """Pr(V <= top), rounded up."""
        ...

    def calls(self, points: Array) -> Calls:
        """Return T and C at ``points``, shape (n,) each."""
        ...


def upper_masses(term: BoundedLaw, nodes: Array, *, raise_below: bool = True) -> Array:
    """Return masses on ``nodes`` whose call function is nowhere below that of ``term``.

    The last node must not lie below ``term.top``. Without ``raise_below`` smaller V are dropped and
    the call function is bounded from the first node on only, which suffices if V <= 0 and no Θ lies
    below that node. ``nodes`` increase; they and the masses have shape (n,).
    """
    calls = term.calls(nodes)
    values = calls.value + calls.error
    steps = np.diff(nodes)
    slopes = (values[:-1] - values[1:] + 4 * UNIT_ROUNDOFF * values[:-1]) / steps
    slopes = slopes * (1 + 4 * UNIT_ROUNDOFF)
    tails = np.concatenate(([term.mass if raise_below else slopes[0]], slopes))
    tails = np.maximum.accumulate(tails[::-1])[::-1]
    return np.maximum(-np.diff(tails, append=0.0), 0.0)


def lower_masses(term: Term, nodes: Array, *, open_left: bool) -> Array:
    """Return masses on ``nodes`` whose call function is nowhere above that of ``term``.

    ``open_left`` extends the first cell down to X = 0 (on the side ``remove``). ``nodes`` increase;
    they and the masses have shape (n,).
    """
    half = (nodes[1] - nodes[0]) / 2
    edges = np.concatenate(([nodes[0] - half], (nodes[:-1] + nodes[1:]) / 2))
    calls = term.calls(edges)
    left = calls.value - (nodes - edges) * calls.tail
    mass = float(calls.tail[0])
    if open_left:
        bottom = term.calls(np.zeros(1))
        mass = float(bottom.tail[0])
        left[0] = float(bottom.value[0]) - nodes[0] * mass
    right = calls.value[1:] - (nodes[:-1] - edges[1:]) * calls.tail[1:]
    error = calls.error + 8 * UNIT_ROUNDOFF * (np.abs(left) + calls.value)
    slack = 2 * np.maximum(error, np.append(error[1:], 0.0))
    # Values that do not decrease are lowered; the measure ends where they do.
    values = np.minimum.accumulate(np.minimum(left[:-1], right) - slack[:-1])
    end = int(np.count_nonzero(values > 0))
    positive = np.flatnonzero(left[: end + 1] > slack[: end + 1])
    masses = np.zeros(nodes.size)
    if end == 0 or positive.size == 0:
        return masses
    last = int(positive[-1])
    values = np.append(values[:last], 0.0)
    convex = _convex_nodes(nodes[: last + 1], values)
    slopes = -np.diff(values[convex]) / np.diff(nodes[convex]) * (1 - 4 * UNIT_ROUNDOFF)
    tails = np.concatenate(([mass * (1 - 1e-13)], slopes))
    tails = np.minimum.accumulate(tails)
    masses[convex] = -np.diff(tails, append=0.0)
    return masses


def _convex_nodes(nodes: Array, values: Array) -> NDArray[np.intp]:
    """Return the indices of nodes that remain after chords replaced concave kinks."""
    indices = np.arange(nodes.size)
    for _ in range(_CONVEXITY_ROUNDS):
        slopes = np.diff(values[indices]) / np.diff(nodes[indices])
        concave = np.flatnonzero(slopes[1:] < slopes[:-1]) + 1
        if concave.size == 0:
            break
        indices = np.delete(indices, concave)
    return indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The range of sums that the transform covers, and its tilts.

    ``tilt`` is θ; ``below`` and ``above`` are the further tilts of Chernoff's bounds of the mass
    outside. Any positive values are sound, good ones are tight.
    """

    low: float
    high: float
    tilt: float
    below: float
    above: float


class ConvolutionPower:
    """The tilted convolution of several copies of each of some lattice measures, and its payoffs.

    ``measures`` are nodes, evenly and equally spaced, masses of the same shape (n,), and copies.

    Guarantees
    ----------
    * ``upper`` is at least, and ``lower`` at most, the mean of (ΣV - Θ)_+ for every Θ. Both are
      loose far from the window.
    """

    def __init__(self, measures: Sequence[Copies], window: Window) -> None:
        nodes, *_ = measures[0]
        self._tilt = window.tilt
        self._step = float(nodes[-1] - nodes[0]) / (nodes.size - 1)
        self._has_mass = all(bool(masses.any()) for _, masses, _ in measures)
        if not self._has_mass:
            return
        self._log_total = self._relative = 0.0
        laws = [
            (nodes, self._tilted(nodes, masses, copies), copies)
            for nodes, masses, copies in measures
        ]
        size = transform_length(window, self._step)
        least = sum(copies * float(nodes[0]) for nodes, _, copies in laws)
        first = math.floor((window.low - least) / self._step)
        self._sums = least + self._step * (first + np.arange(size))
        powers, one, every = [], 0.0, 0
        for _, law, copies in laws:
            wrapped = folded(law, size)
            powers.append(_power(fft.rfft(wrapped), copies))
            one += copies * transform_error(wrapped, law.size)
            every += copies
        result = np.roll(fft.irfft(math.prod(powers[1:], start=powers[0]), size), -(first % size))
        growth = math.exp(min(700.0, one * math.sqrt(size)))
        transform = one * growth
        power_error = UNIT_ROUNDOFF * (64 + 16 * every) + transform_rounding(size)
        self._error = transform + 2 * power_error * (norm(result) + transform)
        low, high = float(self._sums[0]), float(self._sums[-1])
        self._below = _chernoff(laws, -window.below, low)
        self._above = _chernoff(laws, window.above, high)
        reach = sum(copies * float(np.abs(nodes).max()) for nodes, _, copies in laws)
        self._position_error = 16 * UNIT_ROUNDOFF * (reach + max(abs(low), abs(high)))
        self._sum_in_blocks(result)

    def _tilted(self, nodes: Array, masses: Array, copies: int) -> Array:
        exponents = self._tilt * nodes
        peak = float(exponents[masses > 0].max())
        law: Array = np.exp(np.minimum(exponents - peak, 0.0)) * masses
        total = float(law.sum())
        log_total = peak + math.log(total)
        self._log_total += copies * log_total
        size = float(np.abs(exponents).max()) + abs(peak) + abs(log_total)
        self._relative += copies * UNIT_ROUNDOFF * (64.0 + 4.0 * size)
        return law / total

    def _sum_in_blocks(self, sums_law: Array) -> None:
        """Sum c(x) e^{-θ(x - x₀)} and (x - x₀) times as much in blocks that start at x₀."""
        size = sums_law.size
        self._width = max(1, min(size, math.ceil(_MAX_EXPONENT / (self._tilt * self._step))))
        law = np.zeros((-(-size // self._width) + 1) * self._width)
        law[:size] = sums_law
        offsets = self._step * np.arange(self._width)
        weighted = law.reshape(-1, self._width) * np.exp(-self._tilt * offsets)
        self._masses = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
        self._moments = np.cumsum((weighted * offsets)[:, ::-1], axis=1)[:, ::-1]
        span = self._width * self._step + 2 / self._tilt
        total = 1 + self._error * math.sqrt(size)
        # Blocks are summed term by term; after two of them g is negligible.
        self._summation_error = total * (
            2 * UNIT_ROUNDOFF * (self._width + 32) * span
            + _MAX_EXPONENT * math.exp(-_MAX_EXPONENT) / self._tilt
        )

    def _sum(self, thresholds: Array) -> tuple[Array, float]:
        """Return Σ c(x) g(x - Θ) over the window, and a bound of its error."""
        start = np.searchsorted(self._sums, thresholds)
        row, column = np.divmod(np.minimum(start, self._sums.size - 1), self._width)
        inside = np.where(start < self._sums.size, thresholds - self._sums[row * self._width], 0.0)
        total = np.zeros(thresholds.size)
        following = inside - self._width * self._step
        for first, index in ((inside, (row, column)), (following, (row + 1, 0))):
            moment = self._moments[index] - first * self._masses[index]
            total += np.exp(self._tilt * first) * moment
        total[start == self._sums.size] = 0.0
        peak = self._peak
        spread = math.sqrt(peak * (peak + 1 / (self._step * self._tilt**2)))
        return total, self._error * spread + self._summation_error

    @property
    def _peak(self) -> float:
        return 1 / (math.e * self._tilt)

    def _scale(self, thresholds: Array, outwards: float) -> Array:
        """Return M^b e^{-θΘ}, moved ``outwards`` (1 or -1) by the errors of its factors."""
        exponents = self._tilt * thresholds
        sizes = 1 + abs(self._log_total) + np.abs(exponents)
        relative = self._relative + 16 * UNIT_ROUNDOFF * sizes
        return _exp(self._log_total - exponents + outwards * relative)

    def upper(self, thresholds: Array) -> Array:
        """Return upper bounds of E (ΣV - Θ)_+ at each Θ of ``thresholds``, shape (m,)."""
        if not self._has_mass:
            return np.zeros(thresholds.size)
        thresholds = thresholds - self._position_error
        totals, error = self._sum(thresholds)
        reach = np.maximum(float(self._sums[-1]) - thresholds, 1 / self._tilt)
        totals = np.maximum(totals, 0.0) + error
        totals += self._above * reach * np.exp(-self._tilt * reach)
        totals[thresholds < self._sums[0]] += self._below * self._peak
        return self._scale(thresholds, 1) * totals

    def lower(self, thresholds: Array) -> Array:
        """Return lower bounds >= 0 of E (ΣV - Θ)_+ at each Θ of ``thresholds``, shape (m,)."""
        if not self._has_mass:
            return np.zeros(thresholds.size)
        thresholds = thresholds + self._position_error
        totals, error = self._sum(thresholds)
        totals -= error + (self._below + self._above) * self._peak
        return np.maximum(0.0, self._scale(thresholds, -1) * totals)


def _power(values: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Return ``values``, shape (n,), to a power >= 1, by squarings: a product is cheaper than exp.

    A product has a relative error of √5 u, so that of the power is less than 3 ``exponent`` u.
    """
    result = None
    while True:
        if exponent & 1:
            result = values if result is None else result * values
        exponent >>= 1
        if not exponent:
            return values if result is None else result
        values = values * values


def transform_length(window: Window, step: float) -> int:
    """Return the number of points of the transform for ``window`` at ``step``."""
    points = math.ceil((window.high - window.low) / step) + 2
    return int(fft.next_fast_len(max(64, points), real=True))


def chernoff_payoffs(measures: Sequence[Copies], tilts: Array) -> Callable[[Array], Array]:
    """Return an upper bound of E (ΣV - Θ)_+ by Chernoff, e^{-θΘ} E e^{θΣV} / (eθ).

    The result maps Θ of shape (k,) to the least bound over the ``tilts`` θ, shape (m,).
    ``measures`` are those of ``ConvolutionPower``.
    """
    log_bounds = np.array([_log_power(measures, float(tilt)) for tilt in tilts])
    log_bounds -= np.log(math.e * tilts)

    def upper(thresholds: Array) -> Array:
        exponents = log_bounds - np.outer(thresholds, tilts)
        rounding = 16 * UNIT_ROUNDOFF * (1 + np.abs(log_bounds) + np.abs(exponents))
        return _exp((exponents + rounding).min(axis=1))

    return upper


def _log_power(measures: Sequence[Copies], tilt: float) -> float:
    """Return the log of the product of (Σ masses · exp(tilt · nodes))^copies, rounded up."""
    result = 0.0
    for nodes, masses, copies in measures:
        with np.errstate(divide="ignore"):
            weights = tilt * nodes + np.log(masses)
        peak = float(weights.max())
        if peak == -math.inf:
            return -math.inf
        log_moment = peak + math.log(float(np.exp(weights - peak).sum()))
        size = float(np.abs(tilt * nodes).max()) + abs(peak)
        result += copies * (log_moment + UNIT_ROUNDOFF * (128.0 + 8.0 * size))
    return result


def _chernoff(measures: Sequence[Copies], tilt: float, end: float) -> float:
    """Return a bound of the mass of the sums beyond ``end``, on the side of ``tilt``."""
    log_mass = _log_power(measures, tilt) - tilt * end
    return math.exp(min(0.0, log_mass)) * (1 + 1e-9)


def _exp(exponents: Array) -> Array:
    return np.where(exponents < 700.0, np.exp(np.minimum(exponents, 700.0)), np.inf)
