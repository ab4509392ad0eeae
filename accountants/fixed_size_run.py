"""Upper bounds of a whole run over lots of fixed size, by how far a record moves it.

Given that a record moves the run by s, it is s away from what replaces it and from the records
whose places it takes. What is common to both data sets, that the record is in no lot, is shared out
over the s so that the sum of the curves is least. With R the Mills ratio, φ the normal density and
μ_k = k/σ the distances in deviations of the noise,

    δ(ε) <= Σ_k P(s = k) φ(z - μ_k) (R(z - μ_k) - R(z)),   z = max(z*, ε/μ_k + μ_k/2),

for every z* with Σ_k P(s = k) (e^{μ_k z* - μ_k²/2 - ε} - 1)_+ <= (1 - e^-ε) P(s = 0).

>>> run = events.FixedSizeRun(weights=(0.99, 0.01), noise_multiplier=0.5)
>>> round(FixedSizeRunCurve(run).epsilon(1e-5).upper, 2)
3.03

Reference: docs/theorems/correlated-noise.md, Theorem 18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.rounding import Array
from affidavit.plan import events

_ROUNDING = 1e-9
"""Relative allowance for the rounding of normal tails and sums, far above its size."""
_CANCELLED = 1e-14
"""The same for a difference of two Mills ratios, relative to the larger one."""
_UNDERFLOW = 1e-300
"""A smaller probability counts as this one."""
_HALVINGS = 60
_MAX_EPSILON = 1e9


@dataclass(frozen=True, slots=True)
class FixedSizeRunCurve:
    """Upper bounds of ``run`` in both orders."""

    run: events.FixedSizeRun

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` if all of δ is conceded."""
        require_delta(delta)
        moves, _ = self._moves()
        low, high = 0.0, float(moves[-1] ** 2 / 2 + 40 * moves[-1] + 1)
        if high > _MAX_EPSILON or self._delta(high) > delta:
            raise OutOfReach("no bound of the run is small enough.", "Add noise or raise δ.")
        if self._delta(0.0) <= delta:
            return Bracket(lower=0.0, upper=0.0)
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._delta(middle) <= delta else (middle, high)
        return Bracket(lower=0.0, upper=high)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        return Bracket(lower=0.0, upper=min(1.0, self._delta(epsilon)))

    def _moves(self) -> tuple[Array, Array]:
        """Return the distances above zero, in deviations of the noise, and their weights."""
        weights = np.array(self.run.weights[1:])
        return np.arange(1, len(weights) + 1) / self.run.noise_multiplier, weights

    def _delta(self, epsilon: float) -> float:
        moves, weights = self._moves()
        own = epsilon / moves + moves / 2
        place = np.maximum(own, self._common_place(epsilon, moves, weights))
        gained = float(weights @ _gain(moves, place)) * (1 + _ROUNDING)
        return self.run.conceded + max(gained, _UNDERFLOW)

    def _common_place(self, epsilon: float, moves: Array, weights: Array) -> float:
        """Return about the largest z*, from below."""
        shared = -math.expm1(-epsilon) * self.run.weights[0] * (1 - _ROUNDING)
        own = epsilon / moves + moves / 2

        def is_shared(place: float) -> bool:
            excess = np.minimum(moves * (place - own), 600.0)
            return float(weights @ np.expm1(np.maximum(excess, 0.0))) <= shared

        # At the least of the places of their own nothing is shared out.
        low = float(own.min())
        high = low + 40.0 + 40.0 / float(moves[0])
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_shared(middle) else (low, middle)
        return low


def _gain(moves: Array, place: Array) -> Array:
    """Return P(Z > z - μ) - e^{μz - μ²/2} P(Z > z), rounded up, for places z and moves μ > 0."""
    left = place - moves
    density = np.exp(-np.square(left) / 2) / math.sqrt(2 * math.pi)
    # Mills ratios; that of a negative argument overflows, and its tail is not small.
    scale = math.sqrt(math.pi / 2)
    rest = scale * erfcx(place / math.sqrt(2))
    near = scale * erfcx(np.maximum(left, 0.0) / math.sqrt(2))
    far = density * (near - rest + _CANCELLED * near)
    return np.where(left >= 0, far, ndtr(-left) * (1 + _CANCELLED) - density * rest)
