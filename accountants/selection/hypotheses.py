"""What is known of a pair of laws P and Q from its two privacy curves, one for each order.

Let H(γ) = sup_S P(S) - γ Q(S): the curve δ(log γ) of P against Q where γ ≥ 1, and by exchanging
them H(γ) = 1 - γ + γ H'(1/γ), with the curve H' of Q against P, where γ < 1. H is convex and falls.

* ``highest``: H anywhere is at most the chord between upper ends.
* ``least_mass``: for every set, P(S) ≥ 1 - H(γ) - γ (1 - Q(S)) and P(S) ≥ (Q(S) - H'(γ))/γ.
* ``above`` and ``below``: Q(L > t) lies between the slopes of the chords on either side of
  γ = e^t, and P(L > t) = H(γ) + γ Q(L > t). So for each part of that interval there is a least
  P(L > t), and what holds of all of them holds.

Places are signed losses (nats): from 0 on they are asked of the first curve, below of the other.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> pair = Hypotheses(GaussianCurve(mu=1.0), GaussianCurve(mu=1.0))
>>> pair.begin(1e-6)
>>> least = pair.least_mass(np.array([0.5]))[0]  # Φ(-1)
>>> bool(0.156 < least < 0.1587)
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.protocol import AccountantError, OutOfReach, PrivacyCurve

MAX_LOSS = 600.0
"""Nats. Beyond it e^loss nears the end of the doubles."""
ROUNDING = 1e-12
"""Relative allowance for the few operations on each number here."""
_FIRST, _MOST = 16, 40
"""Places to begin with on each side, and at most."""
_FALL = 0.8
"""By how much log δ may fall from one of them to the next, where there may be more."""
_PLACES = 16
"""Parts of a gap between two places, at most."""
_MIN_TOP = 1e-6
"""Nats up to which a curve is followed at least."""
_PARTS = 256
"""Parts of an interval of Q(L > t)."""
_SEARCHED = 300
"""Places on each side among which an attack is searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masses:
    """Of a set under P and under Q, of the same shape."""

    p: Array
    q: Array


class Hypotheses:
    """The pair whose curve is ``front`` in one order and ``back`` in the other."""

    def __init__(self, front: PrivacyCurve, back: PrivacyCurve) -> None:
        self._front, self._back = front, back
        self._deltas: dict[float, Bracket] = {}

    def begin(self, delta: float) -> None:
        """Ask at places on both sides, up to where δ is about ``delta`` or the curves end.

        Raises ``OutOfReach`` where neither can be asked.
        """
        for sign, curve in ((1.0, self._front), (-1.0, self._back)):
            top = max(_top(curve, delta), _MIN_TOP)
            places = [top * index / (_FIRST - 1) for index in range(_FIRST)]
            self.ask([sign * place for place in places])
            while 0 < len(places) < _MOST:
                logs = [self._log(sign * place) for place in places]
                falls = [one - other for one, other in pairwise(logs)]
                widest = max(range(len(falls)), key=falls.__getitem__)
                if not falls[widest] > _FALL:
                    break
                places.insert(widest + 1, (places[widest] + places[widest + 1]) / 2)
                self.ask([sign * places[widest + 1]])

    def ask(self, places: list[float]) -> None:
        """Learn δ at further ``places``; those that a curve refuses are left out."""
        for place in places:
            if place not in self._deltas and abs(place) <= MAX_LOSS:
                curve = self._front if place >= 0 else self._back
                try:
                    self._deltas[place] = curve.delta(abs(place))
                except AccountantError:
                    continue

    def fill(self, first: float, last: float, fall: float) -> None:
        """Ask so densely from ``first`` to ``last`` (nats) that log δ moves by at most ``fall``."""
        known = sorted(self._deltas)
        for low, high in pairwise(known):
            if low <= last and high >= first:
                parts = min(_PLACES, math.ceil(abs(self._log(low) - self._log(high)) / fall))
                self.ask([low + (high - low) * part / parts for part in range(1, parts)])

    @property
    def places(self) -> Array:
        """Where δ is known, in order. Nats, shape (n,)."""
        return np.array(sorted(self._deltas))

    def highest(self, gamma: Array) -> Array:
        """Upper bounds of H at each ``gamma`` ≥ 0, any shape."""
        places = self.places
        at = np.exp(places)
        high = np.array([self._deltas[place].upper for place in places])
        high = np.where(places >= 0, high, 1 - at * (1 - high)) * (1 + ROUNDING) + 1e-15 * (at < 1)
        at, high = np.concatenate(([0.0], at)), np.concatenate(([1.0], high))
        falling = np.minimum.accumulate(high)
        return np.asarray(np.interp(gamma * (1 - ROUNDING), at, falling))

    def least_mass(self, q: Array) -> Array:
        """A lower bound of P(S) for every set with Q(S) at least ``q``, shape (n,)."""
        return np.asarray(np.clip(self._lines(q).max(axis=0), 0.0, 1.0) * (1 - ROUNDING))

    def lines(self, q: Array) -> NDArray[np.intp]:
        """Which of ``places`` bounds ``least_mass`` of ``q``, shape (n,), by index."""
        return np.asarray(self._lines(q).argmax(axis=0))

    def _lines(self, q: Array) -> Array:
        result = []
        for place in self.places:
            high, gamma = self._deltas[place].upper, math.exp(abs(place))
            if place >= 0:
                result.append((1 - high) - gamma * (1 - q) * (1 + ROUNDING) - ROUNDING)
            else:
                result.append((q * (1 - ROUNDING) - high) / gamma)
        return np.array(result)

    def about(self) -> tuple[Array, Masses, Masses]:
        """Places in order, and about the masses above and below them: no bounds. Shape (n,).

        Raises ``OutOfReach`` where too little is known.
        """
        sides = []
        for sign in (-1.0, 1.0):
            own = sorted(place for place in self.places * sign if place >= 0)
            if len(own) < 3:
                raise OutOfReach(
                    "too little is known about one run.", "Change the noise or the rate."
                )
            logs = np.array([self._log(sign * place) for place in own])
            at = np.linspace(0.0, own[-1], _SEARCHED)[1:-1]
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

    def above(self, place: float) -> Masses:
        """Of losses above ``place`` (nats): at least so much of P, and at most so much of Q.

        For each part of what they may be, shape (parts,); no parts where nothing is known.
        """
        if place >= 0:
            return self._tail(self._front, place)
        rest = self._tail(self._back, -place)
        return Masses(p=np.maximum(1 - rest.q - ROUNDING, 0.0), q=1 - rest.p + ROUNDING)

    def below(self, place: float) -> Masses:
        """Of losses below ``place`` (nats): at most so much of P, and at least so much of Q."""
        if place >= 0:
            rest = self._tail(self._front, place)
            return Masses(p=1 - rest.p + ROUNDING, q=np.maximum(1 - rest.q - ROUNDING, 0.0))
        exchanged = self._tail(self._back, -place)
        return Masses(p=exchanged.q, q=exchanged.p)

    @staticmethod
    def _tail(curve: PrivacyCurve, at: float) -> Masses:
        """``above`` for the pair of a ``curve``, at a place that is not negative."""
        try:
            middle = curve.delta(at)
            step = _step(curve, at, middle)
            ends = at - step, at + step
            near, far = (curve.delta(end) for end in ends)
        except AccountantError:
            return Masses(p=np.empty(0), q=np.empty(0))
        gamma = math.exp(at)
        # The places are doubles, and so are their differences.
        before, behind = -math.expm1(ends[0] - at) * gamma, math.expm1(ends[1] - at) * gamma
        most = min(1.0, (near.upper - middle.lower) / before * (1 + ROUNDING))
        least = max(0.0, (middle.lower - far.upper) / behind * (1 - ROUNDING))
        edges = np.linspace(least, max(least, most), _PARTS + 1)
        return Masses(
            p=np.minimum((middle.lower + gamma * edges[:-1]) * (1 - ROUNDING), 1.0),
            q=np.minimum(edges[1:] * (1 + ROUNDING), 1.0),
        )

    def _log(self, place: float) -> float:
        known = self._deltas.get(place)
        return math.log(max(known.upper, 1e-300)) if known else math.nan


def _step(curve: PrivacyCurve, at: float, middle: Bracket) -> float:
    """How far from ``at`` to end a chord: δ falls by more than its bracket is wide."""
    if not middle.lower > 0:
        raise OutOfReach("δ has no lower bound there.", "Ask at a smaller ε.")
    loose = 2 * math.sqrt(middle.upper / middle.lower - 1 + 10 * ROUNDING)
    probe = 1e-3 * max(at, 1e-6)
    fall = math.log(middle.upper / max(curve.delta(at + probe).lower, 1e-300)) / probe
    return min(loose / max(fall, 1e-9), at / 2)


def _top(curve: PrivacyCurve, delta: float) -> float:
    """An ε at which δ is about ``delta``, or where the curve can be asked no further."""
    while delta < 0.1:
        try:
            return min(curve.epsilon(delta).upper, MAX_LOSS)
        except AccountantError:
            delta *= 10
    raise OutOfReach("the curve of one run is not available.", "Change the noise or the rate.")
