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
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Literal

import numpy as np
from scipy.special import ndtr, ndtri

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.random_allocation.directions import (
    Curves,
    Saddle,
    compute_window,
    find_tilt,
    moments,
)
from affidavit.accountants.random_allocation.lattice import Calls, ConvolutionPower, upper_masses
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array
from affidavit.plan import ReplacedAllocationGaussian

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

TOLERANCE = 1e-3
"""About the share of δ of each error."""
MAX_POINTS = 1 << 18
"""Points of the lattice of one bin. If it needs more, the bound is larger."""
MIN_RATE, MAX_RATE = 0.002, 5.0
"""The range of 1/σ."""
_MAX_EPSILON = 100.0
"""Nats."""
_MAX_STEP_SHARE, _MIN_MEDIAN = 0.2, 0.02
"""The longest step over the size of most terms, and the least size of these over e^ε."""
_TAIL_SHARE = 0.02
"""Share of δ above the cut. A smaller share needs a longer lattice."""
_NODE_RATIO = 1.35
"""Ratio of δ at two nodes of a curve, between which it is bounded by a chord."""
MIN_DELTA = 1e-15
_MIN_ROUGH_DELTA, _ROUGH_FALL = 1e-20, 2.0
"""The least δ of a rough curve, and about the fall of log δ between its points."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The V of one bin, restricted to V <= ``top``; ``ratio`` is e^ε and ``rate`` 1/σ."""

    rate: float
    ratio: float
    top: float
    order: Order = "independent"

    def _scale(self, move: int) -> float:
        return math.exp(-((move * self.rate) ** 2) / 2)

    def value_at(self, z: float, *, positive: bool = True) -> float:
        """Return the V of one of the two moves at the normal deviation ``z``."""
        return float(self._values(np.array([z]), MOVES[self.order][0 if positive else 1])[0])

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

    def _above(self, points: Array, *, positive: bool) -> tuple[Array, Array, Array, Array]:
        """Return Pr(V > point), the shares of P and of Q there, and z, shape (n,) each."""
        move = MOVES[self.order][0 if positive else 1]
        z = self._z(points, move)
        side = -1.0 if move.over > move.under else 1.0
        mass, over, under = (ndtr(side * (z - at * self.rate)) for at in (0, move.over, move.under))
        return mass, over, under, z

    @cached_property
    def _ends(self) -> tuple[float, float, float]:
        mass, over, under, _ = self._above(np.array([self.top]), positive=True)
        return float(mass[0]), float(over[0]), float(under[0])

    def calls(self, points: Array) -> Calls:
        """Return T and C at ``points`` like ``Term.calls``; an error of z is second order in C."""
        positive = points >= 0
        mass, over, under, z = (np.zeros(points.size) for _ in range(4))
        for of, sign in ((positive, True), (~positive, False)):
            mass[of], over[of], under[of], z[of] = self._above(points[of], positive=sign)
        ends = self._ends
        tail = mass - ends[0]
        first = over - ends[1] - self.ratio * (under - ends[2])
        inside = points < self.top
        largest = self.rate * max(max(abs(m.over), abs(m.under)) for m in MOVES[self.order])
        reach = np.minimum(np.abs(z), 40.0) + largest + 1.0
        relative = UNIT_ROUNDOFF * (64.0 * (1 + 1 / self.rate) + 8.0 * reach * (reach + largest))
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
        return min(1.0, (1 - self._ends[0]) * (1 + 1e-12))

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

    With probability ``drawn`` the record is in one of the bins, and else in none.
    """

    bins: int
    rate: float
    order: Order
    drawn: float = 1.0

    def __post_init__(self) -> None:
        if not MIN_RATE <= self.rate <= MAX_RATE / MOVES[self.order][0].over:
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
        epsilons, logs = _rough_curve(self)
        return float(np.interp(-math.log(delta), -logs, epsilons))

    def approximate_delta(self, epsilon: float) -> float:
        """Return about the δ at ``epsilon`` (nats); **not a bound**."""
        return math.exp(float(np.interp(epsilon, *_rough_curve(self))))

    def rough_delta(self, epsilon: float, most: float) -> float:
        """Return about the δ at ``epsilon`` (nats), which is at most ``most``; **not a bound**."""
        guess, result = 2 * most, most
        while result < 0.7 * guess and guess > _MIN_ROUGH_DELTA:
            guess = result
            result = min(result, self._inside(epsilon, _TAIL_SHARE * guess) + _TAIL_SHARE * guess)
        return result

    def curves(
        self,
        epsilon: float,
        delta: float,
        _tolerance: float,
        _step: float | None = None,
        upto: float = 0.0,
    ) -> Curves:
        """Return chords between upper bounds from ``epsilon`` (nats) ``upto`` another.

        ``delta`` approximates δ at ``epsilon``. The bounds have an accuracy of their own.
        """
        last = max(epsilon, upto)
        fall = math.log(max(delta, MIN_DELTA) / max(self.approximate_delta(last), 1e-30))
        number = max(1, math.ceil(fall / math.log(_NODE_RATIO))) if last > epsilon else 0
        nodes = np.linspace(epsilon, last, number + 1)
        values = [self.least_upper(epsilon)]
        for node in nodes[1:].tolist():
            # The value before is near enough for its accuracy.
            values.append(self.upper(node, max(values[-1], MIN_DELTA)))
            if values[-1] < 0.5 * values[-2]:
                values[-1] = self.upper(node, max(values[-1], MIN_DELTA))
        heights, ratios = np.array(values), np.exp(nodes)

        def uppers(epsilons: Array) -> Array:
            chords = np.interp(np.exp(np.minimum(epsilons, 650.0)), ratios, heights)
            return np.where(epsilons < nodes[0], 1.0, np.minimum(chords * (1 + 1e-12), 1.0))

        return Curves(uppers=uppers, lowers=np.zeros_like, step=last - epsilon)

    def _threshold(self, ratio: float) -> float:
        """Return Θ: the record that is in no bin adds the same to both."""
        return self.bins * (1 / self.drawn - 1) * (ratio - 1)

    def _cut(self, allowed: float) -> float:
        """Return the normal deviation above which about ``allowed`` of δ is lost."""
        (move, _), cuts = MOVES[self.order], np.linspace(0.0, 2 * self.rate + 12.0, 500)
        chances = ndtr(move.over * self.rate - cuts) + (self.bins - 1) * ndtr(-cuts)
        far = int(np.count_nonzero(self.drawn * chances > allowed))
        return float(cuts[min(far, cuts.size - 1)])

    def _inside(self, epsilon: float, allowed: float) -> float:
        """Return about the δ below the cut above which ``allowed`` is lost; **not a bound**."""
        ratio, cut = math.exp(epsilon), self._cut(allowed)
        top = Difference(rate=self.rate, ratio=ratio, top=0.0, order=self.order).value_at(cut)
        if top <= 0:
            return 0.0
        law = Difference(rate=self.rate, ratio=ratio, top=top, order=self.order)
        threshold = self._threshold(ratio)
        tilt = find_tilt(self.bins, law.atoms, threshold, self.bins * ratio)
        log_moment, _, variance = moments(*law.atoms, tilt)
        spread = self.bins * variance + 2 / tilt**2
        exponent = self.bins * log_moment - tilt * threshold - 2 * math.log(tilt)
        exponent += math.log(self.drawn / self.bins) - math.log(2 * math.pi * spread) / 2
        return math.exp(min(0.0, exponent))

    def least_upper(self, epsilon: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), accurate for the δ that it is."""
        guess, result = 2.0, min(1.0, self.approximate_delta(epsilon))
        while result < 0.7 * guess and guess > MIN_DELTA:
            guess = max(result, MIN_DELTA)
            result = self.upper(epsilon, guess)
        return result

    def upper(self, epsilon: float, guess: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), within ``TOLERANCE`` of ``guess``."""
        if epsilon > _MAX_EPSILON:
            return 1.0
        bins, rate, order = self.bins, self.rate, self.order
        ratio = math.exp(epsilon) * (1 - 2.0**-50)
        cut = self._cut(_TAIL_SHARE * guess)
        law = Difference(rate=rate, ratio=ratio, top=0.0, order=order)
        # Despite rounding, no V below the cut is above the top.
        slack = 1e-13 * (abs(law.value_at(cut)) + 2 * ratio)
        law = Difference(rate=rate, ratio=ratio, top=law.value_at(cut) + slack, order=order)
        threshold = self._threshold(ratio)
        threshold -= 1e-13 * abs(threshold)
        # The record is in the bin of a V above the cut, or another V is above it.
        others = bins - 1 + max(0.0, -threshold)
        above = self.drawn * (
            float(ndtr(MOVES[order][0].over * rate - cut)) + others * float(ndtr(-cut))
        )
        above *= 1 + 1e-9
        if law.top <= 0:
            return min(1.0, above)
        low = float(ndtri(TOLERANCE / bins))
        is_low = MOVES[order][1].over < MOVES[order][1].under
        bottom = max(law.value_at(-low if is_low else low, positive=False), -law.top)
        tilt = find_tilt(bins, law.atoms, threshold, bins * ratio)
        log_moment, _, variance = moments(*law.atoms, tilt)
        saddle = Saddle(
            tilt=tilt, variance=bins * variance, log_moment=bins * log_moment, inside=0.0, delta=0.0
        )
        step = min(
            math.sqrt(4 * TOLERANCE / bins) / tilt,
            math.sqrt(bins * variance) / 2,
            _MAX_STEP_SHARE * ratio * min(rate, max(_MIN_MEDIAN, math.exp(-rate * rate / 2))),
        )
        share = TOLERANCE * guess * bins / self.drawn
        window = compute_window(bins, law.atoms, saddle, threshold, share, step)
        most = max(law.top - bottom, (window.high - window.low) / 4)
        step = max(step, most / MAX_POINTS)
        points = math.ceil((law.top - bottom) / step)
        nodes = law.top - step * np.arange(max(points, 2), -1.0, -1.0)
        nodes[-1] = law.top
        lattice = ConvolutionPower(nodes, upper_masses(law, nodes), bins, window)
        payoff = float(lattice.upper(np.array([threshold]))[0])
        result = (payoff * self.drawn / bins + above) * (1 + 1e-12)
        return result if result < 1 else 1.0


def is_in_reach(leaf: ReplacedAllocationGaussian) -> bool:
    """Return whether ``leaf`` is in the range of these bounds."""
    try:
        replaced_orders(leaf)
    except OutOfReach:
        return False
    return True


def replaced_orders(
    leaf: ReplacedAllocationGaussian,
) -> tuple[ReplacedDirection, ReplacedDirection]:
    """Return both orders of what dominates ``leaf``; raises ``OutOfReach``."""
    one, other = (
        ReplacedDirection(
            bins=leaf.bins, rate=1 / leaf.noise_multiplier, order=order, drawn=leaf.drawn
        )
        for order in _ORDERS[leaf.place]
    )
    return one, other


@lru_cache(maxsize=64)
def _rough_curve(direction: ReplacedDirection) -> tuple[Array, Array]:
    """Return values of ε (nats) and about log δ there, shape (n,) each; no bound rests on them."""
    epsilons, deltas = [0.0], [direction.rough_delta(0.0, 1.0)]
    stride = 0.1 * direction.rate
    while epsilons[-1] < direction.max_epsilon and deltas[-1] > _MIN_ROUGH_DELTA:
        epsilons.append(epsilons[-1] + stride)
        deltas.append(direction.rough_delta(epsilons[-1], deltas[-1]))
        fall = math.log(deltas[-2] / deltas[-1])
        stride *= min(2.0, max(0.3, _ROUGH_FALL / max(fall, 0.1)))
    # Strictly falling, for the inverse.
    logs = np.log(np.array(deltas)) - 1e-6 * np.arange(len(deltas))
    return np.array(epsilons), logs


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
