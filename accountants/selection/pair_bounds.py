"""Bounds of a pair of laws P and Q from its two privacy curves, one for each order.

Let H(γ) = sup_S P(S) - γ Q(S): the curve δ(log γ) of P against Q where γ ≥ 1, and by exchanging
them H(γ) = 1 - γ + γ H'(1/γ), with the curve H' of Q against P, where γ < 1. H is convex and falls.

* ``hockey_stick_upper``: H is at most the chord between upper bounds.
* ``min_p_mass``: for every set, P(S) ≥ 1 - H(γ) - γ (1 - Q(S)) and P(S) ≥ (Q(S) - H'(γ))/γ.
* ``masses_above`` and ``masses_below``: Q(L > t) lies between the slopes of the chords on either
  side of γ = e^t, and P(L > t) = H(γ) + γ Q(L > t). This gives a least P(L > t) for each part of
  that interval. A statement that holds for all parts holds.

Losses (nats) are signed: the first curve is sampled at those >= 0, the second at the others.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> pair = PairBounds(GaussianCurve(mu=1.0), GaussianCurve(mu=1.0))
>>> pair.sample(1e-6)
>>> least = pair.min_p_mass(np.array([0.5]))[0]  # Φ(-1)
>>> bool(0.156 < least < 0.1587)
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import AccountantError, OutOfReach, PrivacyCurve
from affidavit.accountants.rounding import Array

MAX_LOSS = 600.0
"""Nats. Beyond it e^loss is close to overflow."""
ROUNDING = 1e-12
"""Relative allowance for the few operations on each number here."""
_INITIAL_LOSSES, _MAX_LOSSES = 16, 40
"""Number of losses sampled on each side."""
_LOG_DROP = 0.8
"""Drop of log δ between two of them above which another is sampled."""
_MAX_REFINED_PARTS = 16
"""Parts of an interval between two losses after a refinement."""
_MIN_RANGE = 1e-6
"""Nats up to which every curve is sampled."""
_MASS_PARTS = 256
"""Parts of the interval of Q(L > t)."""
_ATTACK_LOSSES = 300
"""Losses on each side among which an attack is searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masses:
    """Probabilities of sets under P and under Q, of the same shape."""

    p: Array
    q: Array


class PairBounds:
    """Bounds of the pair whose curve is ``front`` in one order and ``back`` in the other."""

    def __init__(self, front: PrivacyCurve, back: PrivacyCurve) -> None:
        self._front, self._back = front, back
        self._deltas: dict[float, Bracket] = {}

    def sample(self, delta: float) -> None:
        """Sample both curves until δ is about ``delta`` or the curves end.

        Raises ``OutOfReach`` if a curve bounds δ nowhere.
        """
        for sign, curve in ((1.0, self._front), (-1.0, self._back)):
            top = max(_max_loss(curve, delta), _MIN_RANGE)
            losses = [top * index / (_INITIAL_LOSSES - 1) for index in range(_INITIAL_LOSSES)]
            self._sample_at([sign * loss for loss in losses])
            while 0 < len(losses) < _MAX_LOSSES:
                logs = [self._log_delta(sign * loss) for loss in losses]
                drops = [one - other for one, other in pairwise(logs)]
                steepest = max(range(len(drops)), key=drops.__getitem__)
                if not drops[steepest] > _LOG_DROP:
                    break
                losses.insert(steepest + 1, (losses[steepest] + losses[steepest + 1]) / 2)
                self._sample_at([sign * losses[steepest + 1]])

    def _sample_at(self, losses: list[float]) -> None:
        """Add δ at ``losses`` (nats), except those that a curve refuses."""
        for loss in losses:
            if loss not in self._deltas and abs(loss) <= MAX_LOSS:
                curve = self._front if loss >= 0 else self._back
                try:
                    self._deltas[loss] = curve.delta(abs(loss))
                except AccountantError:
                    continue

    def refine(self, first: float, last: float, log_drop: float) -> None:
        """Sample from ``first`` to ``last`` (nats) until log δ drops by at most ``log_drop``."""
        for low, high in pairwise(sorted(self._deltas)):
            if low <= last and high >= first:
                drop = abs(self._log_delta(low) - self._log_delta(high))
                parts = min(_MAX_REFINED_PARTS, math.ceil(drop / log_drop))
                self._sample_at([low + (high - low) * part / parts for part in range(1, parts)])

    @property
    def _losses(self) -> Array:
        """The sampled losses, increasing. Nats, shape (n,)."""
        return np.array(sorted(self._deltas))

    def hockey_stick_upper(self, gamma: Array) -> Array:
        """Return upper bounds of H at each ``gamma`` ≥ 0, any shape."""
        losses = self._losses
        at = np.exp(losses)
        high = np.array([self._deltas[loss].upper for loss in losses])
        high = np.where(losses >= 0, high, 1 - at * (1 - high)) * (1 + ROUNDING) + 1e-15 * (at < 1)
        at, high = np.concatenate(([0.0], at)), np.concatenate(([1.0], high))
        falling = np.minimum.accumulate(high)
        return np.asarray(np.interp(gamma * (1 - ROUNDING), at, falling))

    def min_p_mass(self, q: Array) -> Array:
        """Return lower bounds of P(S) for every set with Q(S) at least ``q``, shape (n,)."""
        return np.asarray(np.clip(self._lines(q).max(axis=0), 0.0, 1.0) * (1 - ROUNDING))

    def active_losses(self, q: Array) -> Array:
        """Return the sampled loss (nats) that decides ``min_p_mass`` of each ``q``, shape (n,)."""
        return np.asarray(self._losses[self._lines(q).argmax(axis=0)])

    def _lines(self, q: Array) -> Array:
        result = []
        for loss in self._losses:
            high, gamma = self._deltas[loss].upper, math.exp(abs(loss))
            if loss >= 0:
                result.append((1 - high) - gamma * (1 - q) * (1 + ROUNDING) - ROUNDING)
            else:
                result.append((q * (1 - ROUNDING) - high) / gamma)
        return np.array(result)

    def approximate_masses(self) -> tuple[Array, Masses, Masses]:
        """Return increasing losses and approximate masses above and below them; **not bounds**.

        Shape (n,) each. Raises ``OutOfReach`` if too few losses were sampled.
        """
        sides = []
        for sign in (-1.0, 1.0):
            own = sorted(loss for loss in self._losses * sign if loss >= 0)
            if len(own) < 3:
                raise OutOfReach(
                    "the curves of one run bound too little.", "Change the noise or the rate."
                )
            logs = np.array([self._log_delta(sign * loss) for loss in own])
            at = np.linspace(0.0, own[-1], _ATTACK_LOSSES)[1:-1]
            value = np.exp(np.interp(at, own, logs))
            mass = -value * np.interp(at, own, np.gradient(logs, own, edge_order=2)) * np.exp(-at)
            sides.append((sign * at, value + np.exp(at) * mass, mass))
        (behind, q_below, p_below), (ahead, p_above, q_above) = sides
        behind, p_below, q_below = behind[::-1], p_below[::-1], q_below[::-1]
        above = Masses(
            p=np.concatenate((1 - p_below, p_above)), q=np.concatenate((1 - q_below, q_above))
        )
        below = Masses(
            p=np.concatenate((p_below, 1 - p_above)), q=np.concatenate((q_below, 1 - q_above))
        )
        return np.concatenate((behind, ahead)), above, below

    def masses_above(self, loss: float) -> Masses:
        """Return a least P-mass and a largest Q-mass of the losses above ``loss`` (nats).

        There is one pair for each part of the interval of Q, shape (parts,), and none if the curve
        refuses.
        """
        if loss >= 0:
            return self._tail(self._front, loss)
        rest = self._tail(self._back, -loss)
        return Masses(p=np.maximum(1 - rest.q - ROUNDING, 0.0), q=1 - rest.p + ROUNDING)

    def masses_below(self, loss: float) -> Masses:
        """Return a largest P-mass and a least Q-mass of the losses below ``loss`` (nats)."""
        if loss >= 0:
            rest = self._tail(self._front, loss)
            return Masses(p=1 - rest.p + ROUNDING, q=np.maximum(1 - rest.q - ROUNDING, 0.0))
        exchanged = self._tail(self._back, -loss)
        return Masses(p=exchanged.q, q=exchanged.p)

    @staticmethod
    def _tail(curve: PrivacyCurve, at: float) -> Masses:
        """Return ``masses_above`` of the pair of ``curve`` at a loss ``at`` >= 0 (nats)."""
        try:
            middle = curve.delta(at)
            step = _chord_length(curve, at, middle)
            ends = at - step, at + step
            near, far = (curve.delta(end) for end in ends)
        except AccountantError:
            return Masses(p=np.empty(0), q=np.empty(0))
        gamma = math.exp(at)
        # The ends are doubles, so use their exact distances.
        before, behind = -math.expm1(ends[0] - at) * gamma, math.expm1(ends[1] - at) * gamma
        most = min(1.0, (near.upper - middle.lower) / before * (1 + ROUNDING))
        least = max(0.0, (middle.lower - far.upper) / behind * (1 - ROUNDING))
        edges = np.linspace(least, max(least, most), _MASS_PARTS + 1)
        return Masses(
            p=np.minimum((middle.lower + gamma * edges[:-1]) * (1 - ROUNDING), 1.0),
            q=np.minimum(edges[1:] * (1 + ROUNDING), 1.0),
        )

    def _log_delta(self, loss: float) -> float:
        known = self._deltas.get(loss)
        return math.log(max(known.upper, 1e-300)) if known else math.nan


def _chord_length(curve: PrivacyCurve, at: float, middle: Bracket) -> float:
    """Return the length (nats) of a chord from ``at`` over which δ drops by more than its width."""
    if not middle.lower > 0:
        raise OutOfReach("δ has no lower bound there.", "Ask at a smaller ε.")
    loose = 2 * math.sqrt(middle.upper / middle.lower - 1 + 10 * ROUNDING)
    probe = 1e-3 * max(at, 1e-6)
    fall = math.log(middle.upper / max(curve.delta(at + probe).lower, 1e-300)) / probe
    return min(loose / max(fall, 1e-9), at / 2)


def _max_loss(curve: PrivacyCurve, delta: float) -> float:
    """Return an ε (nats) at which δ is about ``delta``, or the last that the curve bounds."""
    while delta < 0.1:
        try:
            return min(curve.epsilon(delta).upper, MAX_LOSS)
        except AccountantError:
            delta *= 10
    raise OutOfReach("the curve of one run is not available.", "Change the noise or the rate.")
