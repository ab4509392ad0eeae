"""Upper bounds of one allocation whose record is replaced.

P = (1/b) Σ_i N(e_i, σ² I) against Q = (1/b) Σ_i N(-e_i, σ² I), its own reverse. Over N(0, σ² I),
with μ = 1/σ and z_i standard normal, the densities are means of e^{±μ z_i - μ²/2}, so that

    δ(ε) = E (ΣV)_+ / b,    V = e^{-μ²/2} (e^{μz} - e^ε e^{-μz}),

over independent copies of V, which the convolution of an allocation bounds. If some V is above a
cut, all of P counts. Lower bounds are those of a record that is present or absent.

>>> curve = ReplacedCurve(bins=100, rate=1.0)
>>> round(curve.epsilon(1e-6).upper, 2)
1.01

Reference: docs/theorems/random-allocation.md, Theorem 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.random_allocation.directions import (
    Saddle,
    compute_window,
    find_tilt,
    moments,
)
from affidavit.accountants.random_allocation.lattice import Calls, ConvolutionPower, upper_masses
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array

TOLERANCE = 1e-3
"""About the share of δ of each error."""
MAX_POINTS = 1 << 18
"""Points of the lattice of one bin. If it needs more, the bound is larger."""
MIN_RATE, MAX_RATE = 0.01, 5.0
"""The range of 1/σ."""
_MAX_EPSILON = 100.0
"""Nats."""
_MAX_STEP_SHARE, _MIN_MEDIAN = 0.2, 0.02
"""The longest step over the size of most terms, and the least size of these over e^ε."""
_TAIL_SHARE = 0.02
"""Share of δ above the cut. A smaller share needs a longer lattice."""
MIN_DELTA = 1e-15


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The V of one bin, restricted to V <= ``top``; ``ratio`` is e^ε and ``rate`` 1/σ."""

    rate: float
    ratio: float
    top: float

    def value_at(self, z: float) -> float:
        """Return V at the normal deviation ``z``."""
        shrunk = -self.rate * self.rate / 2
        return math.exp(shrunk + self.rate * z) - self.ratio * math.exp(shrunk - self.rate * z)

    def z(self, points: Array) -> Array:
        """Return the normal deviations at which V is ``points``, of their shape."""
        shrink = math.exp(-self.rate * self.rate / 2)
        root = np.sqrt(points * points + 4 * self.ratio * shrink * shrink)
        near = 2 * self.ratio * shrink / (root - np.minimum(points, 0.0))
        x = np.where(points > 0, (points + root) / (2 * shrink), near)
        return np.asarray(np.log(x) / self.rate)

    def calls(self, points: Array) -> Calls:
        """Return T and C at ``points`` like ``Term.calls``; an error of z is second order in C."""
        z, end = self.z(points), float(self.z(np.array([self.top]))[0])
        (mass, over, under), ends = (
            [ndtr(shift - at) for shift in (0.0, self.rate, -self.rate)] for at in (z, end)
        )
        tail = mass - ends[0]
        first = over - ends[1] - self.ratio * (under - ends[2])
        inside = points < self.top
        reach = np.minimum(np.abs(z), 40.0) + self.rate + 1.0
        relative = UNIT_ROUNDOFF * (64.0 * (1 + 1 / self.rate) + 8.0 * reach * (reach + self.rate))
        return Calls(
            tail=np.maximum(tail, 0.0),
            value=np.where(inside, np.maximum(first - points * tail, 0.0), 0.0),
            error=np.where(
                inside, relative * (over + self.ratio * under + np.abs(points) * mass), 0.0
            ),
        )

    @property
    def mass(self) -> float:
        """Pr(V <= top), rounded up."""
        return min(1.0, float(ndtr(self.z(np.array([self.top]))[0])) * (1 + 1e-12))

    @property
    def atoms(self) -> tuple[Array, Array]:
        """V and its log weights like ``Term.atoms``, shape (n,) each; no bound rests on them."""
        end = float(self.z(np.array([self.top]))[0])
        z = np.arange(-9.0, end, min(0.05, 0.25 / self.rate))
        z = np.sort(np.concatenate((z, end - np.geomspace(1e-5, 0.5, 80) / self.rate)))
        weights = -z * z / 2 + np.log(np.gradient(z) / math.sqrt(2 * math.pi))
        return np.array([self.value_at(float(at)) for at in z]), weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedCurve:
    """Upper bounds of one allocation to ``bins`` whose record is replaced; ``rate`` is 1/σ."""

    bins: int
    rate: float

    def __post_init__(self) -> None:
        if not (MIN_RATE <= self.rate <= MAX_RATE and self.bins > 1):
            raise OutOfReach(
                f"noise multiplier {1 / self.rate:.4g} (over the root of the epochs) is out of the "
                "range in which replaced records on bins are bounded.",
                "Use another accountant.",
            )

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` for a δ below 1e-15."""
        require_delta(delta)
        if delta < MIN_DELTA:
            raise OutOfReach(f"delta {delta:g} is below {MIN_DELTA:g}.", "Choose a larger δ.")
        start = self.rate * (self.rate / 2 + 2)
        _, upper = crossing(
            lambda epsilon: self._upper(epsilon, delta), delta, start, self.rate / 2, 1e-4 * start
        )
        if math.isinf(upper):
            raise OutOfReach("no ε is reached.", "Use another accountant.")
        return Bracket(lower=0.0, upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats)."""
        require_epsilon(epsilon)
        guess, upper = 2.0, 1.0
        while upper < 0.7 * guess and guess > MIN_DELTA:
            guess = max(upper, MIN_DELTA)
            upper = min(upper, self._upper(epsilon, guess))
        return Bracket(lower=0.0, upper=upper)

    def _upper(self, epsilon: float, guess: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), within ``TOLERANCE`` of ``guess``."""
        if epsilon > _MAX_EPSILON:
            return 1.0
        bins, rate = self.bins, self.rate
        ratio = math.exp(epsilon) * (1 - 2.0**-50)
        cuts = np.linspace(0.0, rate + 12.0, 2000)
        chances = ndtr(rate - cuts) + (bins - 1) * ndtr(-cuts)
        far = int(np.count_nonzero(chances > _TAIL_SHARE * guess))
        cut = float(cuts[min(far, cuts.size - 1)])
        term = Difference(rate=rate, ratio=ratio, top=0.0)
        # Despite rounding, no V below the cut is above the top.
        slack = 1e-13 * (abs(term.value_at(cut)) + 2 * ratio)
        term = Difference(rate=rate, ratio=ratio, top=term.value_at(cut) + slack)
        # The record is in the bin of a V above the cut, or another V is above it.
        above = -math.expm1(
            (bins - 1) * math.log1p(-float(ndtr(-cut))) + math.log1p(-float(ndtr(rate - cut)))
        )
        above *= 1 + 1e-9
        if term.top <= 0:
            return min(1.0, above)
        bottom = max(term.value_at(float(ndtri(TOLERANCE / bins))), -term.top)
        size = bins * ratio
        tilt = find_tilt(bins, term.atoms, 0.0, size)
        log_moment, _, variance = moments(*term.atoms, tilt)
        saddle = Saddle(
            tilt=tilt, variance=bins * variance, log_moment=bins * log_moment, inside=0.0, delta=0.0
        )
        step = min(
            math.sqrt(4 * TOLERANCE / bins) / tilt,
            math.sqrt(bins * variance) / 2,
            _MAX_STEP_SHARE * ratio * min(rate, max(_MIN_MEDIAN, math.exp(-rate * rate / 2))),
        )
        window = compute_window(bins, term.atoms, saddle, 0.0, TOLERANCE * guess * bins, step)
        most = max(term.top - bottom, (window.high - window.low) / 4)
        step = max(step, most / MAX_POINTS)
        points = math.ceil((term.top - bottom) / step)
        nodes = term.top - step * np.arange(max(points, 2), -1.0, -1.0)
        nodes[-1] = term.top
        lattice = ConvolutionPower(nodes, upper_masses(term, nodes), bins, window)
        payoff = float(lattice.upper(np.zeros(1))[0])
        result = (payoff / bins + above) * (1 + 1e-12)
        return result if result < 1 else 1.0
