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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]
Side = Literal["remove", "add"]

UNIT_ROUNDOFF = 2.0**-53
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
