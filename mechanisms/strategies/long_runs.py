"""Errors over runs of any length, for noise whose response to one draw is a sum of powers.

A draw z_s moves the output of step t by a_{t-s}, with m first values given and then
``a_{m+u} = κ + Σ_j h_j φ_j^u``. The variance of the output after t steps is Σ_{u<t} a_u², by
geometric sums in O(log t), so that no array has an entry for each step.

>>> walk = Response(head=np.ones(1), constant=1.0)
>>> walk.errors(100_000_000).max
10000.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from affidavit.mechanisms.strategies.geometric_sums import geometric_sums, outer, pairs
from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.strategy import Errors

_PLACES = 400
"""Steps at which the errors are returned."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """``head`` of shape (m,), then ``constant`` + Σ ``weights`` · ``powers``^u, shape (d,) both."""

    head: Array
    constant: float = 0.0
    weights: Array = field(default_factory=lambda: np.zeros(0))
    powers: Array = field(default_factory=lambda: np.zeros(0))

    def _sums(self, count: int) -> tuple[float, float]:
        """Return Σ a_u² and Σ (K - u) a_u² over the first K = ``count``."""
        first = self.head[:count] ** 2
        plain = float(first.sum())
        weighted = float(first @ (count - np.arange(first.size, dtype=np.float64)))
        rest = count - self.head.size
        if rest <= 0:
            return plain, weighted
        plain += self.constant**2 * rest
        weighted += self.constant**2 * rest * (rest + 1) / 2
        if self.powers.size:
            rates = -np.log(self.powers.astype(np.complex128))
            single = geometric_sums(rates, rest)
            both = geometric_sums(pairs(rates), rest)
            products = outer(self.weights, self.weights)
            added = [
                2 * self.constant * float((self.weights @ one).real)
                + float(np.sum(products * two.real))
                for one, two in zip(single, both, strict=True)
            ]
            plain, weighted = plain + added[0], weighted + added[1]
        return plain, weighted

    def rms(self, steps: int) -> float:
        """Return the root mean square over ``steps`` of the output's standard deviation."""
        return math.sqrt(self._sums(steps)[1] / steps)

    def errors(self, steps: int) -> Errors:
        """Return the errors of a run of ``steps``."""
        places = np.unique(np.linspace(0, steps - 1, min(steps, _PLACES)).round().astype(int))
        per_step = np.sqrt([self._sums(int(place) + 1)[0] for place in places])
        return Errors(
            per_step=per_step, rms=self.rms(steps), max=float(per_step[-1]), places=places
        )
