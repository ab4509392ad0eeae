"""A lower bound for passes whose bins are drawn afresh: an attack on each, and their composition.

In each pass the attacker rounds the likelihood ratio e^{μz - μ²/2} of every bin down to a lattice
and adds up the multiples, modulo the length L of a transform. That is a number that he computes
from what is released, so that the hockey-stick divergence between its laws with and without the
record is no larger than the run's. Its laws are b-fold convolutions; its loss in a pass is rounded
down to a lattice, and the passes' sum is a convolution again. What the transforms round, and
whatever has no place on a lattice, is subtracted (docs/theorems/random-allocation.md, Theorem 6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array, normal_masses

_ROUGHEST, _FINEST = 8, 400
"""Lattice steps in a deviation of one bin's ratio at least, and of the sum of all at most."""
_DEVIATIONS = 41
"""Of the sum that fit into the transform."""
_REACH = 6.0
"""Standard deviations of a bin's release whose ratio fits into the transform as well, if it may."""
_MOST_LEVELS = 18
"""Of a transform of ratios, log₂ of its length."""
_LENGTH = 1 << 20
"""Lattice of the passes' losses."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Masses of losses (nats) from ``first`` on in steps of ``step``; ``error`` is of ‖masses‖₂."""

    masses: Array
    first: float
    step: float
    error: float

    def delta(self, epsilon: float) -> float:
        """At most the δ of the run at ``epsilon`` (nats)."""
        epsilon += 1e-12 * (1 + abs(epsilon))
        begin = max(0, math.floor((epsilon - self.first) / self.step) + 1)
        tail = self.masses[begin:]
        places = self.first + self.step * np.arange(begin, begin + tail.size)
        gains = -np.expm1(epsilon - places)
        total = float(tail @ gains) - self.error * math.sqrt(tail.size)
        return max(0.0, total * (1 - 1e-12))

    def epsilon(self, delta: float) -> float:
        """At most the ε (nats) of the run at ``delta``."""
        low, high = 0.0, self.first + self.step * self.masses.size
        if self.delta(0.0) < delta:
            return 0.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) >= delta else (low, middle)
        return low


@lru_cache(maxsize=32)
def repeated_attack(bins: int, rate: float, passes: int) -> tuple[Losses, ...]:
    """The losses of so many passes over ``bins`` bins in both directions, ``rate`` = 1/σ."""
    without, present, error = _laws(bins, rate)
    sides = (present, without), (without, present)
    return tuple(_composed(p - error, q + error, passes) for p, q in sides)


def _laws(bins: int, rate: float) -> tuple[Array, Array, float]:
    """The laws of the rounded sum without the record and with it, and how far each is off."""
    deviation = math.sqrt(math.expm1(min(rate * rate, 300.0)))
    step = min(math.sqrt(bins) * deviation / _FINEST, deviation / _ROUGHEST)
    largest = max(_DEVIATIONS * math.sqrt(bins) * deviation, math.exp(min(_REACH * rate, 300.0)))
    length = 1 << min(_MOST_LEVELS, math.ceil(math.log2(largest / step)))
    edges = (np.log(step * np.arange(1, length)) + rate * rate / 2) / rate
    (one, one_off), (other, other_off) = (_transformed(edges, mean) for mean in (0.0, rate))
    rest = one ** (bins - 1)
    laws = [np.fft.irfft(rest * factor, length) for factor in (one, other)]
    # Transforms round some units a level, and each is multiplied as often as there are bins.
    rounded = UNIT_ROUNDOFF * (100 + 20 * math.log2(length))
    error = (bins + 1) * (rounded + max(one_off, other_off))
    return laws[0], laws[1], error


def _transformed(edges: Array, mean: float) -> tuple[Any, float]:
    """The transform of the masses of N(mean, 1) between ``edges``, and the sum of their errors."""
    masses, errors = normal_masses(edges, mean)
    return np.fft.rfft(masses), float(errors.sum())


def _composed(p: Array, q: Array, passes: int) -> Losses:
    """Losses log p/q, rounded down, of so many passes; ``p`` is a lower and ``q`` an upper bound.

    Losses that are too low for the lattice are left out, and too high ones lowered to its end.
    """
    inside = p > 0
    losses, masses = np.log(p[inside] / q[inside]) - 1e-13, p[inside]
    common = losses[masses > 1e-15 * masses.max()]
    reach = float(np.abs(common).max())
    step = 2 * reach * passes / (_LENGTH - passes)
    places = np.floor((np.minimum(losses, reach) + reach) / step - 1e-6).astype(np.int64)
    lattice = np.bincount(places[places >= 0], masses[places >= 0], minlength=1)
    transformed = np.fft.rfft(lattice, _LENGTH)
    error = UNIT_ROUNDOFF * (passes + 1) * (8 + 5 * math.log2(_LENGTH)) * 2
    return Losses(
        masses=np.fft.irfft(transformed**passes, _LENGTH),
        first=-reach * passes,
        step=step,
        error=error,
    )
