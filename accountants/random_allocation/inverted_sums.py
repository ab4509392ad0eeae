"""Upper bounds of E (ΣV - Θ)_+ over independent copies of discrete V, without a lattice.

With masses m_j at nodes v_j let M(s) = Σ m_j e^{s v_j}, b the number of copies, and Z standard
normal and independent. For every θ, P > 0 and η >= 0, with s_k = θ + 2πik/P,

    E (ΣV - Θ)_+ <= E (ΣV + ηZ - Θ)_+ <= (1/P) Σ_k M(s_k)^b e^{η² s_k² / 2 - s_k Θ} / s_k² :

noise of mean zero raises the mean of a convex function, and by Poisson's formula the sum is that
mean and others like it, at Θ + nP, times e^{nθP}. None of these is negative. The noise makes the
frequencies beyond the last, y, small: they add at most M(θ)^b e^{η² (θ² - y²) / 2 - θΘ} / (πy). So
the nodes need no common step, and a heavy tail costs few of them. Any choice of the parameters is
sound; good ones are tight. Of several laws their powers multiply.

Rounding, with u = 2**-53: the weights of the tilted law are rounded by (64 + 4 θ|v|) u of
themselves, b-fold; its transform at y by (2n + 128 + 16 y E|V - EV|) u, n the number of nodes and
each e^{iyx} a product of at most 14 factors, and the power by b times as much; its power and phase
by their own sizes.

Reference: docs/theorems/random-allocation.md, Theorem 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.random_allocation.lattice import Copies
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array

_MIN_NODES, _MAX_NODES, _MAX_FREQUENCIES = 64, 1500, 1 << 13
"""Nodes of one law and frequencies. With fewer than it needs, the bound is larger."""
_SHARES_BELOW = np.array([0.05, 0.2, 0.4, 0.6, 0.8])
_SHARES_ABOVE = np.array([0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 7.0, 12.0])
"""Tilts that are tried for the images: below θ as shares of it, and above it in units of one over
the deviation of the sum."""
_NEGLIGIBLE_SHARE = 1e-4
"""Share of the result that the nearest images and the frequencies left out may each have."""
_MAX_TURNS = 60


@dataclass(frozen=True, kw_only=True)
class Contour:
    """The numbers of the sum over frequencies: θ, P, η and how many there are."""

    tilt: float
    period: float
    noise: float
    frequencies: int


@dataclass(frozen=True, kw_only=True)
class Saddle:
    """Where the mean of (ΣV - Θ)_+ is made; nothing here bounds anything.

    Each of the ``laws`` has values, log weights, shape (n,) each, and copies; Θ is the
    ``threshold``. ``tilt`` is the θ with E ΣV = Θ + 2/θ under the tilted laws.
    """

    laws: tuple[Copies, ...]
    threshold: float
    tilt: float

    @classmethod
    def of(cls, laws: Sequence[Copies], threshold: float, size: float) -> Saddle:
        """Return the saddle of ``laws``, searched around 1/``size``."""
        low, high, at = -20.0, 25.0, 0.0
        for _ in range(_MAX_TURNS):
            saddle = cls(laws=tuple(laws), threshold=threshold, tilt=math.exp(at) / size)
            mean, variance = saddle._moments
            inverse = 2 / saddle.tilt
            excess = mean - inverse - threshold
            low, high = (at, high) if excess < 0 else (low, at)
            move = -excess / (variance * saddle.tilt + inverse)
            if abs(move) < 0.01 or high - low < 1e-3:
                break
            aim = at + max(-3.0, min(3.0, move))
            at = aim if low < aim < high else (low + high) / 2
        return saddle

    @cached_property
    def _tilted(self) -> list[tuple[Array, float]]:
        """Each law, tilted, shape (n,), and its log E e^{θV}."""
        result = []
        for values, weights, _ in self.laws:
            exponents = self.tilt * values + weights
            peak = float(exponents.max())
            law = np.exp(exponents - peak)
            total = float(law.sum())
            result.append((law / total, peak + math.log(total)))
        return result

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """The mean and the variance of the sum under the tilted laws."""
        whole, variance = 0.0, 0.0
        for (values, _, copies), (law, _) in zip(self.laws, self._tilted, strict=True):
            mean = float(law @ values)
            centred = values - mean
            whole += copies * mean
            variance += copies * float(law @ (centred * centred))
        return whole, variance

    @cached_property
    def _log_scale(self) -> float:
        """The log of E e^{θ(ΣV - Θ)}."""
        logs = zip(self.laws, self._tilted, strict=True)
        return sum(copies * log for (_, _, copies), (_, log) in logs) - self.tilt * self.threshold

    def nodes(self, bottom: float, top: float, tolerance: float, *, of: int = 0) -> Array:
        """Return increasing nodes from ``bottom`` to ``top`` for one of the laws, shape (n,).

        Their chords cost about ``tolerance`` of the mean: a chord over h widens the variance of V
        by h²/6. They are closest where the tilted law is most. 0, where V may have a mass, is one
        of them.
        """
        (values, _, copies), (law, _) = self.laws[of], self._tilted[of]
        order = np.argsort(values)
        values, law = values[order], law[order]
        apart = np.append(np.diff(values), 0.0)
        inside = (values > bottom) & (values < top) & (values != 0)
        lengths = np.cumsum(np.cbrt(law * apart * apart)[inside])
        ends = np.array([bottom, 0.0, top])
        places = ends
        if lengths.size and lengths[-1] > 0:
            whole = float(lengths[-1])
            cost = copies * self.tilt**2 * whole**3 / 12
            number = min(_MAX_NODES, max(_MIN_NODES, math.ceil(math.sqrt(cost / tolerance))))
            steps = np.linspace(0.0, whole, number + 1)
            places = np.concatenate((ends, np.interp(steps, lengths, values[inside])))
        return np.unique(places[(places >= bottom) & (places <= top)])

    def contour(self, tolerance: float, size: float) -> Contour:
        """Return a contour that costs about ``tolerance`` of ``size``, about the mean."""
        noise = math.sqrt(2 * tolerance) / self.tilt
        # What the frequencies left out and the images may add, over E e^{θ(ΣV - Θ)}.
        room = math.log(_NEGLIGIBLE_SHARE * size) - self._log_scale
        last = 4 / noise
        for _ in range(2):
            last = math.sqrt(2 * max(1.0, -room - math.log(math.pi * last))) / noise
        deviation = math.sqrt(self._moments[1]) + 1e-300
        tilts = np.append(self.tilt * _SHARES_BELOW, self.tilt + _SHARES_ABOVE / deviation)
        # Chernoff's bound of the images on one side of Θ.
        images = -tilts * self.threshold - np.log(math.e * tilts)
        for values, weights, copies in self.laws:
            exponents = np.outer(tilts, values) + weights
            peaks = exponents.max(axis=1)
            images += copies * (peaks + np.log(np.exp(exponents - peaks[:, None]).sum(axis=1)))
        lengths = np.maximum(images - self._log_scale - room, 1.0) / np.abs(tilts - self.tilt)
        below = _SHARES_BELOW.size
        period = float(max(lengths[:below].min(), lengths[below:].min()))
        return Contour(
            tilt=self.tilt,
            period=period,
            noise=noise,
            frequencies=min(_MAX_FREQUENCIES, math.ceil(last * period / (2 * math.pi)) + 2),
        )


def upper_excess(laws: Sequence[Copies], threshold: float, contour: Contour) -> float:
    """Return an upper bound of E (ΣV - Θ)_+ for Θ = ``threshold`` over copies of ``laws``.

    Each has masses, not negative and not all zero, at its nodes. Any ``contour`` is sound.
    """
    tilt, noise = contour.tilt, contour.noise
    unit = 2 * math.pi / contour.period
    # e^{i(j + wk)x} is the product of e^{ijx} and e^{iwkx}.
    width = math.isqrt(contour.frequencies) + 1
    y = unit * np.arange(width * width)
    logs, most = np.zeros(y.size, dtype=np.complex128), np.zeros(y.size)
    wrongs, turns = np.zeros(y.size), np.zeros(y.size)
    log_scale = centres = reach = sizes_of_logs = rounding = spread = 0.0
    for nodes, masses, copies in laws:
        exponents = tilt * nodes
        peak = float(exponents[masses > 0].max())
        weights = np.exp(np.minimum(exponents - peak, 0.0)) * masses
        total = float(weights.sum())
        weights /= total
        log_total = peak + math.log(total)
        centre = float(weights @ nodes)
        offsets = nodes - centre
        near, far = _turns(unit * offsets, width), _turns(unit * width * offsets, width)
        transform = ((far * weights) @ near.T).ravel()
        wrong = UNIT_ROUNDOFF * (2 * nodes.size + 128 + 16 * float(weights @ np.abs(offsets)) * y)
        logs += copies * np.log(np.where(transform == 0, 1e-320, transform))
        own = np.log(np.abs(transform) + wrong)
        most += copies * own
        wrongs += copies * wrong * np.exp(-own)
        turns += copies * (4 + np.abs(own))
        centres, reach = centres + copies * centre, reach + copies * abs(centre)
        log_scale += copies * log_total
        sizes_of_logs += copies * abs(log_total)
        size = float(np.abs(exponents).max()) + abs(peak) + abs(log_total)
        rounding += copies * UNIT_ROUNDOFF * (64 + 4 * size)
        spread += copies * UNIT_ROUNDOFF * 4 * nodes.size
    shift = centres - threshold + noise * noise * tilt
    reach += abs(threshold) + noise * noise * tilt
    s = tilt + 1j * y
    kernel = np.exp(-((noise * y) ** 2) / 2) * (2 / contour.period) / (tilt * tilt + y * y)
    kernel[0] /= 2
    last = float(y[-1])
    beyond = math.exp(-((noise * last) ** 2) / 2) / (math.pi * last)
    beyond *= math.exp(spread) * (1 + 1e-9)
    # Powers of a transform that rounding makes larger than one may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.exp(logs + 1j * shift * y) * (s.conjugate() / s) * kernel
        # A power below the least of these is covered by the rounding of that.
        sizes = np.exp(np.maximum(most, -700.0)) * kernel
        turned = 8 * (turns + reach * y) + 64 + y.size
        errors = wrongs + UNIT_ROUNDOFF * turned
        summed = float(terms.real.sum()) + float(sizes @ errors) * (1 + 1e-9) + beyond
    rounding += 16 * UNIT_ROUNDOFF * (1 + sizes_of_logs + abs(tilt * threshold))
    exponent = log_scale - tilt * threshold + (noise * tilt) ** 2 / 2 + rounding
    # Chernoff's bound, as x_+ <= e^{θx} / (eθ), is also that of a sum that is infinite or NaN.
    chernoff = (1 + 1e-9) / (math.e * tilt)
    summed = max(0.0, summed) if summed < chernoff else chernoff
    return summed * math.exp(exponent) if exponent < 700.0 else math.inf


def _turns(angles: Array, count: int) -> NDArray[np.complex128]:
    """Return e^{ijx}, shape (count, n), for j < count <= 128 and the x of ``angles``, shape (n,).

    Each is a product of at most seven e^{ix 2^m}, since products cost less than exponentials.
    """
    turns = np.ones((count, angles.size), dtype=np.complex128)
    known = 1
    while known < count:
        end = min(2 * known, count)
        turns[known:end] = turns[: end - known] * np.exp(1j * (known * angles))
        known = end
    return turns
