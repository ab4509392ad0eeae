"""Upper bounds of allocations whose record is replaced.

Relative to the run without either record, a bin shows a and b times its record: the densities of
the two data sets are means over the bins of e^{aμz - (aμ)²/2} and e^{bμz - (bμ)²/2}, with μ = 1/σ
and z standard normal, so that

    δ(ε) = E (ΣV)_+ / n,    V = e^{aμz - (aμ)²/2} - e^ε e^{bμz - (bμ)²/2},

over n independent copies of V, which the convolution of an allocation bounds. Two records with bins
of their own are at a = 1 and b = -1. A record that takes the place of another, which is told by
nothing else, moves by the difference of the two: V is largest in convex order if positive values
have the a and b of one such record, and negative ones those of another (``MOVES``). If some V is
above a cut, all of its share counts. Lower bounds are those of a record that is present or absent.

>>> curve = ReplacedCurve((ReplacedDirection(bins=100, rate=1.0, order="independent"),))
>>> round(curve.epsilon(1e-6).upper, 2)
1.01

Reference: docs/theorems/random-allocation.md, Theorem 7; shuffled-lots.md, Theorem 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

import numpy as np
from scipy.special import ndtr, ndtri

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.random_allocation.directions import (
    Curves,
    compute_window,
    find_tilt,
    moments,
)
from affidavit.accountants.random_allocation.directions import Saddle as LatticeSaddle
from affidavit.accountants.random_allocation.inverted_sums import Saddle, upper_excess
from affidavit.accountants.random_allocation.lattice import Calls, ConvolutionPower, upper_masses
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array
from affidavit.plan import events

Order = Literal["independent", "replaced", "zeroed", "restored"]
"""Who moves: two records with bins of their own; in the place of another, a record against its
replacement, a record against one that is zero, and the reverse."""


@dataclass(frozen=True, slots=True)
class Move:
    """How often P and Q show the record in its bin, ``over`` and ``under``: 0, 1, 2 or -1."""

    over: int
    under: int


_ORDERS: dict[str | None, tuple[Order, Order]] = {
    None: ("independent", "independent"),
    "replace_one": ("replaced", "replaced"),
    "zero_out": ("zeroed", "restored"),
}
"""Both orders of the data sets, by what the record takes the place of."""
MOVES: dict[Order, tuple[Move, Move]] = {
    "independent": (Move(1, -1), Move(1, -1)),
    "replaced": (Move(2, 0), Move(0, 2)),
    "zeroed": (Move(2, 1), Move(0, 1)),
    "restored": (Move(1, 0), Move(1, 2)),
}
"""The moves of positive and of negative V."""

_INSIDE_SHARE, _LOW_SHARE, _MAX_STRAIN = 2e-3, 1e-3, 60.0
"""About the shares of δ that the chords and the added noise each cost, and the lowest terms; the
largest V in units of one over the tilt."""
_CUT_SIZES = np.geomspace(1.0, 1e4, 100)
"""Values of V over e^ε at which the cut may be."""
_FEW_BINS, _MAX_POINTS = 24, 1 << 18
"""Bins below which sums are on a lattice, and the points of that of one bin."""
_MAX_STEP_SHARE, _MIN_MEDIAN, _LATTICE_REACH, _LARGE_DELTA = 0.2, 0.02, 4.0, 1e-3
"""The longest step over the size of most V, the least size of these over e^ε, the least V over the
largest, and the δ from which on the size of V where the record is counts too."""
MIN_RATE, MAX_RATE = 0.002, 5.0
"""The range of 1/σ."""
_MAX_EPSILON = 100.0
"""Nats."""
_SHORTFALL_SHARE = 1e-3
"""Share of δ that the bound of the part above the cut gives away."""
_NODE_RATIO, _FINE_DELTA, _COARSENING, _MAX_STRIDES = 1.35, 1e-7, 0.06, 4
"""About the ratio of δ at two nodes of a curve, between which it is bounded by a chord. Below some
δ it rises like a power of δ. So many steps are tried to the next node."""
_MIN_STRIDE, _MAX_FLAT, _OTHER_GUESSES = 1e-3, 3, (1.0, 30.0, 0.1, 0.01, 1e3)
"""The least distance (nats) of two nodes, over the rate, nodes without a fall after which rounding
hides smaller δ, and factors of the guess at a node without one: another cut and other frequencies
may resolve the sum."""
MIN_DELTA = 1e-15


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The V of one bin, restricted to those at normal deviations up to ``cut``.

    ``ratio`` is e^ε and ``rate`` 1/σ.
    """

    rate: float
    ratio: float
    order: Order = "independent"
    cut: float = math.inf

    @cached_property
    def top(self) -> float:
        """The largest V. Despite rounding, none below the cut is above it."""
        if math.isinf(self.cut):
            return math.inf
        top = self.value_at(self.cut)
        return top + 1e-13 * (abs(top) + 2 * self.ratio)

    def _scale(self, move: int) -> float:
        return math.exp(-((move * self.rate) ** 2) / 2)

    def value_at(self, z: float, *, positive: bool = True) -> float:
        """Return the V of one of the two moves at the normal deviation ``z``."""
        return float(self.values(np.array([z]), positive=positive)[0])

    def values(self, z: Array, *, positive: bool = True) -> Array:
        """Return the V of one of the two moves at normal deviations ``z``, shape (n,) both."""
        return self._values(z, MOVES[self.order][0 if positive else 1])

    def _values(self, z: Array, move: Move) -> Array:
        over, under = (
            np.exp(at * self.rate * z - (at * self.rate) ** 2 / 2) for at in (move.over, move.under)
        )
        return np.asarray(over - self.ratio * under)

    def _z(self, points: Array, move: Move) -> Array:
        """Return where the V of ``move`` is ``points``, which have its sign, of their shape."""
        over, under = self._scale(move.over), self.ratio * self._scale(move.under)
        if move.under < 0:
            root = np.sqrt(points * points + 4 * over * under)
            near = 2 * under / (root - np.minimum(points, 0.0))
            return np.asarray(
                np.log(np.where(points > 0, (points + root) / (2 * over), near)) / self.rate
            )
        # The larger power less the smaller one is the size of the point.
        (high, low), power = (over, under), move.over
        if move.under > move.over:
            (high, low), power = (under, over), move.under
        size = np.abs(points)
        if 0 in (move.over, move.under):
            return np.asarray(np.log((size + low) / high) / (power * self.rate))
        return np.asarray(
            np.log((low + np.sqrt(low * low + 4 * high * size)) / (2 * high)) / self.rate
        )

    def places(self, points: Array) -> Array:
        """Return the normal deviations at which V is each of ``points`` > 0, shape (n,) both."""
        return self._z(points, MOVES[self.order][0])

    def _above(self, points: Array, *, positive: bool) -> tuple[Array, Array, Array, Array]:
        """Return Pr(V > point), the shares of P and of Q there, and z, shape (n,) each."""
        move = MOVES[self.order][0 if positive else 1]
        z = self._z(points, move)
        side = -1.0 if move.over > move.under else 1.0
        mass, over, under = (ndtr(side * (z - at * self.rate)) for at in (0, move.over, move.under))
        return mass, over, under, z

    @cached_property
    def ends(self) -> tuple[float, float, float]:
        """Pr(V > top), and the shares of P and of Q there."""
        if math.isinf(self.top):
            return 0.0, 0.0, 0.0
        mass, over, under, _ = self._above(np.array([self.top]), positive=True)
        return float(mass[0]), float(over[0]), float(under[0])

    def calls(self, points: Array) -> Calls:
        """Return T and C at ``points`` like ``Term.calls``; an error of z is second order in C."""
        positive = points >= 0
        mass, over, under, z = (np.zeros(points.size) for _ in range(4))
        for of, sign in ((positive, True), (~positive, False)):
            mass[of], over[of], under[of], z[of] = self._above(points[of], positive=sign)
        ends = self.ends
        tail = mass - ends[0]
        first = over - ends[1] - self.ratio * (under - ends[2])
        inside = points < self.top
        relative = self.relative_error(z)
        return Calls(
            tail=np.maximum(tail, 0.0),
            value=np.where(inside, np.maximum(first - points * tail, 0.0), 0.0),
            error=np.where(
                inside, relative * (over + self.ratio * under + np.abs(points) * mass), 0.0
            ),
        )

    def relative_error(self, z: Array) -> Array:
        """Return a bound of the relative error of masses at normal deviations ``z``, (n,)."""
        largest = self.rate * max(max(abs(m.over), abs(m.under)) for m in MOVES[self.order])
        reach = np.minimum(np.abs(z), 40.0) + largest + 1.0
        return np.asarray(
            UNIT_ROUNDOFF * (64.0 * (1 + 1 / self.rate) + 8.0 * reach * (reach + largest))
        )

    def square(self, z: Array) -> Array:
        """Return upper bounds of E min(V, v)², v the V > 0 at normal deviations ``z``, (n,)."""
        (a, b), (c, d) = ((move.over, move.under) for move in MOVES[self.order])
        whole, below = self.whole_square(), self.whole_square(positive=False)
        zero = float(self._z(np.zeros(1), MOVES[self.order][0])[0])
        size = math.exp(min(600.0, (a * self.rate) ** 2))
        part = size * (ndtr(2 * a * self.rate - zero) - ndtr(2 * a * self.rate - z))
        part += self.values(z) ** 2 * ndtr(-z)
        if (a, b) == (c, d):
            below = self.ratio**2 * math.exp((d * self.rate) ** 2)
            return np.asarray(np.minimum(whole, part + below) * (1 + 1e-9))
        return np.asarray((np.minimum(whole, part) + below) * (1 + 1e-9))

    def whole_square(self, *, positive: bool = True) -> float:
        """Return E V² of one of the moves, whatever its sign, rounded up."""
        move = MOVES[self.order][0 if positive else 1]
        over, under = move.over, move.under
        powers = (
            math.exp(min(600.0, i * j * self.rate**2))
            for i, j in ((over, over), (over, under), (under, under))
        )
        first, mixed, last = powers
        size = first + self.ratio**2 * last
        return max(0.0, size - 2 * self.ratio * mixed) + 1e-12 * size

    @property
    def mass(self) -> float:
        """Pr(V <= top), rounded up."""
        return min(1.0, (1 - self.ends[0]) * (1 + 1e-12))

    @cached_property
    def atoms(self) -> tuple[Array, Array]:
        """V and its log weights like ``Term.atoms``, shape (n,) each; no bound rests on them."""
        high, low = MOVES[self.order]
        end = float(self._z(np.array([self.top]), high)[0])
        z = np.arange(-9.0, end, min(0.05, 0.25 / self.rate))
        z = np.sort(np.concatenate((z, end - np.geomspace(1e-5, 0.5, 80) / self.rate)))
        values = self._values(z, high)
        weights = -z * z / 2 + np.log(np.gradient(z) / math.sqrt(2 * math.pi))
        if low == high:
            return values, weights
        values, weights = values[values > 0], weights[values > 0]
        z = np.arange(-9.0, 9.0, min(0.05, 0.25 / self.rate))
        below = self._values(z, low)
        logs = -z * z / 2 + math.log((z[1] - z[0]) / math.sqrt(2 * math.pi))
        values = np.concatenate((values, below[below < 0], [0.0]))
        weights = np.concatenate((weights, logs[below < 0]))
        rest = max(1e-12, 1 - float(np.exp(weights).sum()))
        return values, np.append(weights, math.log(rest))


@dataclass(frozen=True, kw_only=True)
class ReplacedDirection:
    """One order of an allocation to ``bins``; ``rate`` is 1/σ.

    With probability ``drawn`` the record is in one of the bins, and else in none. ``slower`` says
    how many of the bins have which other, lower rate.
    """

    bins: int
    rate: float
    order: Order
    drawn: float = 1.0
    slower: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        # One bin has a closed form.
        most = MAX_RATE if self.bins > 1 else 2 * MAX_RATE
        if not MIN_RATE <= self.rate <= most / MOVES[self.order][0].over:
            raise OutOfReach(
                f"noise multiplier {1 / self.rate:.4g} (over the root of the epochs) is out of the "
                "range in which replaced records on bins are bounded.",
                "Use another accountant.",
            )

    @property
    def max_epsilon(self) -> float:
        """The largest ε (nats) searched."""
        return min(_MAX_EPSILON, 2 * self.rate**2 + 20 * self.rate)

    def approximate_epsilon(self, delta: float) -> float:
        """Return about the ε (nats) at which δ(ε) is ``delta``; **not a bound**."""
        epsilons, deltas = _nodes(self).down_to(delta)
        logs = np.log(deltas) - 1e-9 * np.arange(deltas.size)
        return float(np.interp(-math.log(delta), -logs, epsilons))

    def approximate_delta(self, epsilon: float) -> float:
        """Return about the δ at ``epsilon`` (nats); **not a bound**."""
        epsilons, deltas = _nodes(self).up_to(epsilon)
        return math.exp(float(np.interp(epsilon, epsilons, np.log(deltas))))

    def curves(
        self,
        epsilon: float,
        _delta: float,
        _tolerance: float,
        _step: float | None = None,
        upto: float = 0.0,
    ) -> Curves:
        """Return chords between upper bounds from 0 to ``epsilon`` (nats) and ``upto`` another.

        The bounds have an accuracy of their own.
        """
        nodes, heights = _nodes(self).up_to(max(epsilon, upto))
        ratios = np.exp(nodes)

        def uppers(epsilons: Array) -> Array:
            chords = np.interp(np.exp(np.minimum(epsilons, 650.0)), ratios, heights)
            return np.where(epsilons < 0, 1.0, np.minimum(chords * (1 + 1e-12), 1.0))

        return Curves(uppers=uppers, lowers=np.zeros_like, step=float(nodes[-1]))

    @property
    def _kinds(self) -> tuple[tuple[int, float], ...]:
        """How many bins there are of which rate, those of the most first."""
        if self.slower is None:
            return ((self.bins, self.rate),)
        number, _ = self.slower
        return tuple(sorted((self.slower, (self.bins - number, self.rate)), reverse=True))

    def _laws(
        self, cut_at: Callable[[Difference], float], ratio: float
    ) -> list[tuple[Difference, int]]:
        """Return the V of each kind of bins and their number, up to the largest V of all kinds.

        ``cut_at`` returns the normal deviation above which V is cut if all bins are of its kind.
        """
        laws = [
            (Difference(rate=rate, ratio=ratio, order=self.order), number)
            for number, rate in self._kinds
        ]
        laws = [(replace(law, cut=cut_at(law)), number) for law, number in laws]
        top = max(law.top for law, _ in laws)
        if len(laws) == 1 or top <= 0:
            return laws
        return [
            (replace(law, cut=float(law.places(np.array([top]))[0])), number)
            for law, number in laws
        ]

    def _threshold(self, ratio: float) -> float:
        """Return Θ: the record that is in no bin adds the same to both."""
        return self.bins * (1 / self.drawn - 1) * (ratio - 1)

    def _cut(self, law: Difference, threshold: float, allowed: float, *, fine: bool) -> float:
        """Return the least normal deviation above which ``allowed`` of δ is given away.

        All bins count as those of ``law``.
        """
        cuts = np.linspace(0.0, 2 * law.rate + 12.0, 400)
        if fine:
            # With little noise V rises within a fraction of these steps.
            cuts = np.sort(np.append(cuts, law.places(law.ratio * _CUT_SIZES)))
        values = law.values(cuts)
        short = _shortfall([(law, self.bins - 1, cuts)], values, threshold)
        lost = self.drawn * ndtr(-cuts) * short
        good = np.flatnonzero((values > 0) & (lost <= allowed))
        return float(cuts[good[0]] if good.size else cuts[-1])

    def _above(self, laws: Sequence[tuple[Difference, int]], threshold: float) -> float:
        """Return an upper bound of the part of δ where some V is above the top of its law.

        If the event is J it is E[S - Θ; J] + E[(Θ - S)_+; J] over the bins; the first is closed.
        """
        bins = self.bins
        log_none = sum(number * math.log1p(-law.ends[0]) for law, number in laws)
        some = -math.expm1(log_none)
        linear, size, short, shares, chances = (
            -threshold * some,
            abs(threshold) * some,
            0.0,
            0.0,
            0.0,
        )
        error = 4 * max(float(law.relative_error(np.array([law.cut]))[0]) for law, _ in laws)
        for kind, (law, number) in enumerate(laws):
            (q, over, under), ratio = law.ends, law.ratio
            others = -math.expm1(log_none - math.log1p(-q))
            beyond = over - ratio * under
            linear += number * (beyond - (ratio - 1 + beyond) * others)
            size += number * (2 * (over + ratio * under) + (ratio - 1) * others)
            rest = [
                (other, count - (kind == place), np.array([other.cut]))
                for place, (other, count) in enumerate(laws)
            ]
            short += number * q * float(_shortfall(rest, np.array([law.top]), threshold)[0])
            shares, chances = shares + number * over, chances + number * q
        result = self.drawn / bins * (linear + error * size + short * (1 + error))
        # Nor is it more than the chance of the event, if it decides everything.
        least = (shares + (bins - 1 + max(0.0, -threshold)) * chances) / bins
        return max(0.0, min(result, self.drawn * least * (1 + error)))

    def least_upper(self, epsilon: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), accurate for the δ that it is."""
        return self.upper(epsilon, max(self.approximate_delta(epsilon), MIN_DELTA))

    def upper(self, epsilon: float, guess: float, *, fine: bool = False) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), narrow if that is about ``guess``."""
        if epsilon > _MAX_EPSILON:
            return 1.0
        bins, rate, order = self.bins, self.rate, self.order
        ratio = math.exp(epsilon) * (1 - 2.0**-50)
        threshold = self._threshold(ratio)
        threshold -= 1e-13 * abs(threshold)
        if bins == 1:
            calls = Difference(rate=rate, ratio=ratio, order=order).calls(np.array([threshold]))
            return min(1.0, self.drawn * float(calls.value[0] + calls.error[0]) * (1 + 1e-12))
        allowed = _SHORTFALL_SHARE * guess
        laws = self._laws(
            lambda law: self._cut(law, threshold, allowed, fine=fine),
            ratio,
        )
        if max(law.top for law, _ in laws) <= 0:
            # Without a normal deviation above its cut, nothing is positive.
            reach = MOVES[order][0].over
            chance = sum(
                number * float(ndtr(reach * law.rate - law.cut) + (bins - 1) * ndtr(-law.cut))
                for law, number in laws
            )
            return min(1.0, self.drawn * chance / bins * (1 + 1e-9))
        above = self._above(laws, threshold)
        low = float(ndtri(_LOW_SHARE / bins))
        is_low = MOVES[order][1].over < MOVES[order][1].under
        pieces = [
            (law, number, law.value_at(-low if is_low else low, positive=False))
            for law, number in laws
        ]
        size = guess * bins / self.drawn
        inside = (_by_lattice if bins < _FEW_BINS else _by_inversion)(
            pieces, threshold, size, share=max(0.02, 1 - above / guess)
        )
        result = (inside * self.drawn / bins + above) * (1 + 1e-12)
        return result if result < 1 else 1.0


def _shortfall(
    others: Sequence[tuple[Difference, int, Array]], tops: Array, threshold: float
) -> Array:
    """Return bounds of E (Θ - top - W)_+, W the sum of the V of all ``others``, shape (n,).

    With each law are its copies and the normal deviations at which V is each of ``tops``, shape
    (n,). Scarf's bound, by the mean and the variance of the sum of min(V, top).
    """
    above, size, variance = tops - threshold, np.abs(tops) + abs(threshold), np.zeros(tops.size)
    for law, copies, cuts in others:
        mean = 1 - law.ratio
        # The tail's share of P, with its rounding, is more than the mean of (V - top)_+.
        share = ndtr(MOVES[law.order][0].over * law.rate - cuts)
        least = mean - share * (1 + 1e-9)
        square = np.maximum(0.0, law.square(cuts) - mean * mean * (1 - 1e-12))
        above, size = above + copies * least, size + copies * np.abs(least)
        variance = variance + copies * square
    spread = np.sqrt(variance + above * above)
    # The difference, without cancellation.
    short = np.where(above > 0, variance / (spread + np.abs(above) + 1e-300), spread - above)
    return np.asarray(short / 2 * (1 + 1e-9) + 1e-12 * size)


Piece = tuple[Difference, int, float]
"""The V of some bins, how many there are, and the value to which lower V are raised."""


def _by_inversion(pieces: Sequence[Piece], threshold: float, size: float, *, share: float) -> float:
    """Return an upper bound of E (ΣV - Θ)_+, of which ``size`` is about the ``share``."""
    top = max(law.top for law, _, _ in pieces)
    size_of_sum = sum(number * law.ratio for law, number, _ in pieces)
    atoms = [(*law.atoms, number) for law, number, _ in pieces]
    saddle = Saddle.of(atoms, threshold, size_of_sum)
    if saddle.tilt * top > _MAX_STRAIN:
        # Hardly any sum is above the threshold.
        saddle = replace(saddle, tilt=_MAX_STRAIN / top)
    tolerance = _INSIDE_SHARE / share
    # Where the tilt favours the largest V, the sum is made by smaller ones.
    strain = saddle.tilt * top
    finest = min(0.01, tolerance * math.exp(-max(0.0, strain - 18) / 3))
    contour = saddle.contour(min(0.01, tolerance * math.exp(-max(0.0, strain - 24) / 4)), size)
    laws = []
    for place, (law, number, bottom) in enumerate(pieces):
        nodes = saddle.nodes(bottom, law.top, finest, of=place)
        laws.append((nodes, upper_masses(law, nodes), number))
    return upper_excess(laws, threshold, contour)


def _by_lattice(pieces: Sequence[Piece], threshold: float, size: float, *, share: float) -> float:
    """Return what ``_by_inversion`` does, for few bins, whose sums no tilt resolves."""
    laws = [(law.atoms, number) for law, number, _ in pieces]
    bins, (largest, *_) = sum(number for _, number in laws), pieces[0]
    for law, *_ in pieces:
        largest = max(largest, law, key=lambda one: one.rate)
    tilt = find_tilt(laws, threshold, bins * largest.ratio)
    log_moment, variance = moments(laws, tilt)
    saddle = LatticeSaddle(
        tilt=tilt, variance=variance, log_moment=log_moment, inside=0.0, delta=0.0
    )
    most = min(
        law.ratio * min(law.rate, max(_MIN_MEDIAN, math.exp(-law.rate * law.rate / 2)))
        for law, *_ in pieces
    )
    if size > _LARGE_DELTA * bins:
        # The V of the bin in which the record is make the mean.
        most = min(most, math.exp(largest.rate * largest.rate / 2))
    step = min(
        math.sqrt(4 * _INSIDE_SHARE / bins / share) / tilt,
        math.sqrt(variance) / 2,
        _MAX_STEP_SHARE * most,
    )
    window = compute_window(laws, saddle, threshold, _INSIDE_SHARE * size, step)
    lowest = min(max(bottom, -_LATTICE_REACH * law.top) for law, _, bottom in pieces)
    top = max(law.top for law, *_ in pieces)
    step = max(step, max(top - lowest, (window.high - window.low) / 4) / _MAX_POINTS)
    measures = []
    for law, number, bottom in pieces:
        reach = law.top - max(bottom, -_LATTICE_REACH * law.top)
        nodes = law.top - step * np.arange(max(math.ceil(reach / step), 2), -1.0, -1.0)
        nodes[-1] = law.top
        measures.append((nodes, upper_masses(law, nodes), number))
    return float(ConvolutionPower(measures, window).upper(np.array([threshold]))[0])


def is_in_reach(leaf: events.ReplacedAllocationGaussian) -> bool:
    """Return whether ``leaf`` is in the range of these bounds."""
    try:
        replaced_orders(leaf)
    except OutOfReach:
        return False
    return True


def orders_like(place: str) -> tuple[Order, Order]:
    """Return both orders of the data sets for a ``place``, or for any other word without one."""
    return _ORDERS[place if place in _ORDERS else None]


def sample_like(leaf: events.ReplacedAllocationGaussian) -> events.PoissonSubsampledGaussian:
    """Return a Poisson sample whose χ² is about that of one bin; no bound rests on it."""
    first = ReplacedDirection(
        bins=leaf.bins, rate=1 / leaf.noise_multiplier, order=_ORDERS[leaf.place][0]
    )
    square = Difference(rate=first.rate, ratio=1.0, order=first.order).whole_square()
    return events.PoissonSubsampledGaussian(
        sampling_probability=leaf.drawn / leaf.bins,
        noise_multiplier=1 / math.sqrt(math.log1p(square)),
    )


def replaced_orders(
    leaf: events.ReplacedAllocationGaussian,
) -> tuple[ReplacedDirection, ReplacedDirection]:
    """Return both orders of what dominates ``leaf``; raises ``OutOfReach``."""
    slower = None
    if leaf.longer is not None and leaf.others_at is not None:
        slower = (leaf.bins - leaf.longer, 1 / leaf.others_at)
    one, other = (
        ReplacedDirection(
            bins=leaf.bins,
            rate=1 / leaf.noise_multiplier,
            order=order,
            drawn=leaf.drawn,
            slower=slower,
        )
        for order in _ORDERS[leaf.place]
    )
    return one, other


class _Nodes:
    """Upper bounds of δ at growing ε (nats) from 0 on, as far as they were asked for.

    From one to the next δ falls about by ``_NODE_RATIO``.
    """

    def __init__(self, direction: ReplacedDirection) -> None:
        self._direction = direction
        guess, least = 1.0, 0.5
        while least < 0.7 * guess and guess > MIN_DELTA:
            guess = max(least, MIN_DELTA)
            least = direction.upper(0.0, guess)
        self._epsilons, self._deltas = [0.0], [least]
        self._stride = 0.1 * direction.rate

    def down_to(self, delta: float) -> tuple[Array, Array]:
        """Return ε and δ, shape (n,) each, the last δ at most ``delta`` if it is in reach."""
        while self._deltas[-1] > delta and self._can_grow:
            self._grow()
        return np.array(self._epsilons), np.array(self._deltas)

    def up_to(self, epsilon: float) -> tuple[Array, Array]:
        """Return ε and δ, shape (n,) each, the last ε at least ``epsilon`` if it is in reach."""
        while self._epsilons[-1] < epsilon and self._can_grow:
            self._grow()
        return np.array(self._epsilons), np.array(self._deltas)

    @property
    def _can_grow(self) -> bool:
        most = self._direction.max_epsilon
        is_stuck = self._deltas[-_MAX_FLAT:].count(self._deltas[-1]) == _MAX_FLAT
        return self._epsilons[-1] < most and self._deltas[-1] > MIN_DELTA and not is_stuck

    def _grow(self) -> None:
        last, least = self._epsilons[-1], self._deltas[-1]
        ratio = _NODE_RATIO * max(1.0, _FINE_DELTA / least) ** _COARSENING
        for _ in range(_MAX_STRIDES):
            self._stride = max(self._stride, _MIN_STRIDE * self._direction.rate)
            at = last + self._stride
            delta = self._lower_at(at, least, max(least / ratio, MIN_DELTA))
            fall = math.log(least / delta) if delta > 0 else math.inf
            # The slope grows a little from node to node.
            self._stride *= min(3.0, max(0.2, math.log(ratio) / max(fall, 0.05)))
            if fall < 2 * math.log(ratio):
                break
        self._epsilons.append(at)
        self._deltas.append(max(delta, MIN_DELTA / 1e3))

    def _lower_at(self, epsilon: float, least: float, guess: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), below ``least`` if one is found."""
        delta = self._direction.upper(epsilon, guess)
        for factor in _OTHER_GUESSES:
            if delta < least:
                break
            delta = self._direction.upper(epsilon, max(factor * guess, MIN_DELTA), fine=True)
        return min(delta, least)


@lru_cache(maxsize=64)
def _nodes(direction: ReplacedDirection) -> _Nodes:
    return _Nodes(direction)


@dataclass(frozen=True, slots=True)
class ReplacedCurve:
    """Upper bounds of one allocation, over all its ``directions``."""

    directions: tuple[ReplacedDirection, ...]

    @property
    def orders(self) -> tuple[ReplacedCurve, ReplacedCurve]:
        """The curves of P against Q, and of Q against P."""
        first, last = self.directions[0], self.directions[-1]
        return ReplacedCurve((first,)), ReplacedCurve((last,))

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` for a δ below 1e-15."""
        require_delta(delta)
        if delta < MIN_DELTA:
            raise OutOfReach(f"delta {delta:g} is below {MIN_DELTA:g}.", "Choose a larger δ.")
        highest = 0.0
        for direction in self.directions:
            if not highest or direction.upper(highest, delta) > delta:
                start = direction.rate * (direction.rate / 2 + 2)
                upper_at = partial(direction.upper, guess=delta)
                _, highest = crossing(
                    upper_at, delta, max(start, highest), direction.rate / 2, 1e-4 * start
                )
        if math.isinf(highest):
            raise OutOfReach("no ε is reached.", "Use another accountant.")
        return Bracket(lower=0.0, upper=highest)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats)."""
        require_epsilon(epsilon)
        highest = 0.0
        for direction in self.directions:
            highest = max(highest, direction.least_upper(epsilon))
        return Bracket(lower=0.0, upper=highest)
