"""One direction of a random allocation: how δ(ε) is bracketed, and where the effort goes.

A bracket at ε is the lattice's part (``power``) plus what it leaves out (``jumps``). What
is chosen here (the cut, the tilt, the step, the window) makes it narrow, and never makes
it true.

The step follows from the error law: mean-preserving chords spread a term by at most
h²/6 (for a law wide against h) and tangents draw it together by h²/12, so that b terms at
tilt θ move log δ by b θ² h² / 8 in all.

Reference: ``docs/theorems/random-allocation.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from scipy.special import ndtr

from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.protocol import OutOfReach
from affidavit.accountants.random_allocation.power import (
    PayoffCeiling,
    PowerOfMeasure,
    Side,
    Term,
    Window,
)
from affidavit.accountants.random_allocation.tail_truncation import (
    Beyond,
    LargeTerms,
    LeastOfOthers,
    SmallTerms,
    choose_cut,
    lower_masses,
    upper_masses,
)

MAX_POINTS = 1 << 23
"""Longest lattice or transform; 64 MiB an array of doubles."""
_LADDER = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0, 12.0, 16.0)
"""Further tilts tried for the window, in units of one over the tilted deviation."""
_HAIR = 1e-9
"""How far, in steps, an outer node is kept from the barycentre that it must not pass."""
_CEILING_NODES = 4096
_BEYOND = 1.1
"""The lattice of the side ``add`` ends this far beyond Θ."""
_REACH = 10.0
"""Normal deviations of one term on the lattice where nothing else ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saddle:
    """The tilt at which the lattice's payoff is made, with the sum's first moments there.

    ``inside`` is about the lattice's part of δ, and ``delta`` about all of it.
    """

    tilt: float
    variance: float
    log_moment: float
    inside: float
    delta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Upper and lower bounds of δ(ε), narrow near the ε they were made for.

    ``uppers`` and ``lowers`` take ε in nats and return δ, of shape (n,) both.
    """

    uppers: Callable[[Array], Array]
    lowers: Callable[[Array], Array]
    step: float

    def upper(self, epsilon: float) -> float:
        """An upper bound of δ at ``epsilon`` (nats)."""
        return float(self.uppers(np.array([epsilon]))[0])

    def lower(self, epsilon: float) -> float:
        """A lower bound of δ at ``epsilon`` (nats)."""
        return float(self.lowers(np.array([epsilon]))[0])


@dataclass(frozen=True, kw_only=True)
class Direction:
    """One order of the pair of a 1-of-``bins`` allocation; ``rate`` is 1/σ."""

    bins: int
    rate: float
    side: Side

    def thresholds(self, epsilons: Array) -> Array:
        """Θ at ``epsilons`` (nats), of their shape."""
        sign = 1.0 if self.side == "remove" else -1.0
        return sign * self.bins * _ratios(sign * epsilons)

    def scales(self, epsilons: Array) -> Array:
        """δ over the mean of (ΣV - Θ)_+, at ``epsilons`` (nats), of their shape."""
        return (1.0 if self.side == "remove" else _ratios(epsilons)) / np.full(
            epsilons.size, float(self.bins)
        )

    def threshold(self, epsilon: float) -> float:
        """Θ at ``epsilon`` (nats)."""
        return float(self.thresholds(np.array([epsilon]))[0])

    def scale(self, epsilon: float) -> float:
        """δ over the mean of (ΣV - Θ)_+, at ``epsilon`` (nats)."""
        return float(self.scales(np.array([epsilon]))[0])

    @cached_property
    def _others(self) -> LeastOfOthers:
        return LeastOfOthers(bins=self.bins, rate=self.rate)

    @cached_property
    def _small(self) -> SmallTerms:
        return SmallTerms(bins=self.bins, rate=self.rate)

    def _parts(self, cut: float) -> tuple[Term, Beyond]:
        if self.side == "add":
            return Term(rate=self.rate, side="add", top=-self._small.least), self._small
        return Term(rate=self.rate, side="remove", top=cut), LargeTerms(
            others=self._others, cut=cut
        )

    # ---- where the answer is, without bounds --------------------------------------

    def cut(self, epsilon: float, allowed: float) -> float:
        """The X at which the lattice may end if ``allowed`` of δ may be given away."""
        if self.side == "add":
            return math.inf
        return choose_cut(self._others, _ratio(epsilon), allowed)

    def saddle(self, epsilon: float, cut: float) -> Saddle:
        """The saddle at ``epsilon`` (nats) with δ by the leading term of its expansion."""
        threshold = self.threshold(epsilon)
        term, beyond = self._parts(cut)
        values, weights = term.atoms
        tilt = tilt_of(self.bins, term.atoms, threshold, abs(threshold))
        log_moment, _, variance = moments(values, weights, tilt)
        spread = self.bins * variance + 2 / tilt**2
        exponent = self.bins * log_moment - tilt * threshold - 2 * math.log(tilt)
        exponent += math.log(self.scale(epsilon)) - math.log(2 * math.pi * spread) / 2
        inside = math.exp(min(0.0, exponent))
        return Saddle(
            tilt=tilt,
            variance=self.bins * variance,
            log_moment=self.bins * log_moment,
            inside=inside,
            delta=inside + float(beyond.lower(np.array([_ratio(epsilon)]))[0]),
        )

    def about(self, epsilon: float) -> float:
        """About the δ at ``epsilon`` (nats); not a bound."""
        coarse = self.saddle(epsilon, self.cut(epsilon, 1e-12)).delta
        if self.side == "add":
            return coarse
        return self.saddle(epsilon, self.cut(epsilon, 0.01 * min(coarse, 1.0))).delta

    @property
    def largest_epsilon(self) -> float:
        """No ε (nats) is searched beyond this; the Gaussian mechanism alone does not reach it."""
        return self.rate**2 / 2 + _REACH * self.rate

    def guess(self, delta: float) -> float:
        """About the ε (nats) at which δ(ε) is ``delta``; not a bound."""
        return where_it_falls_to(
            delta,
            lambda epsilon: self.saddle(epsilon, self.cut(epsilon, 0.1 * delta)).delta,
            self.largest_epsilon,
        )

    # ---- bounds -------------------------------------------------------------------

    def curves(
        self,
        epsilon: float,
        delta: float,
        tolerance: float,
        step: float | None = None,
        upto: float = 0.0,
    ) -> Curves:
        """Bounds of δ about ``tolerance`` apart in log δ near ``epsilon`` (nats).

        ``delta`` is about what δ is there. The lattice holds what the payoff is made of up to
        ``upto`` (nats), where that is larger. Raises ``OutOfReach`` where it would be too long.
        """
        allowed = 0.01 * tolerance * delta
        cut = self.cut(max(epsilon, upto), allowed)
        saddle = self.saddle(epsilon, cut)
        term, beyond = self._parts(cut)
        if saddle.inside <= 10 * allowed:
            ceiling = self._ceiling(term, epsilon)
            most = float(ceiling.upper(np.array([self.threshold(epsilon)]))[0])
            if self.scale(epsilon) * most <= 10 * allowed:
                return self._join(ceiling.upper, np.zeros_like, beyond, term.top)
        if step is None:
            step = math.sqrt(4 * tolerance / self.bins) / saddle.tilt
            step = min(step, 0.5 * math.sqrt(saddle.variance + 1e-300))
        window = self._window(term, saddle, epsilon, tolerance * delta, step)
        bottom = self._bottom(term, saddle, epsilon, tolerance)
        if max((term.top - bottom) / step, (window.high - window.low) / step) > MAX_POINTS:
            raise OutOfReach(
                f"the allocation would need a lattice of more than {MAX_POINTS} points.",
                "Add noise, or ask for fewer bins.",
            )
        above, below, open_left = self._nodes(term, bottom, step)
        # On the side "add" a term below Θ leaves nothing to pay.
        ends = self.side == "add" and above[0] <= _BEYOND * self.threshold(epsilon)
        upper = PowerOfMeasure(
            above, upper_masses(term, above, raise_below=not ends), self.bins, window
        )

        @cache
        def lower() -> PowerOfMeasure:
            masses = lower_masses(term, below, open_left=open_left)
            return PowerOfMeasure(below, masses, self.bins, window)

        least = float(above[0]) if ends else -math.inf
        return self._join(
            lambda thresholds: np.where(thresholds >= least, upper.upper(thresholds), np.inf),
            lambda thresholds: lower().lower(thresholds),
            beyond,
            step,
        )

    def _join(
        self,
        upper: Callable[[Array], Array],
        lower: Callable[[Array], Array],
        beyond: Beyond,
        step: float,
    ) -> Curves:
        """δ from bounds of the lattice's payoff and of what lies beyond it; 1 and 0 from NaN."""

        def upper_deltas(epsilons: Array) -> Array:
            inside = self.scales(epsilons) * upper(self.thresholds(epsilons))
            result = (inside + beyond.upper(_ratios(epsilons))) * (1 + 1e-13)
            return np.where(result < 1, result, 1.0)

        def lower_deltas(epsilons: Array) -> Array:
            inside = self.scales(epsilons) * lower(self.thresholds(epsilons))
            result = (inside + beyond.lower(_ratios(epsilons))) * (1 - 1e-13)
            return np.where(result > 0, result, 0.0)

        return Curves(uppers=upper_deltas, lowers=lower_deltas, step=step)

    def _ceiling(self, term: Term, epsilon: float) -> PayoffCeiling:
        bottom = term.place(-_REACH)
        nodes = _ending_at(term.top, bottom, (term.top - bottom) / _CEILING_NODES)
        masses, whole = upper_masses(term, nodes), abs(self.threshold(epsilon))
        return PayoffCeiling(nodes, masses, self.bins, np.geomspace(1.0, 1e5, 200) / whole)

    def _bottom(self, term: Term, saddle: Saddle, epsilon: float, tolerance: float) -> float:
        """Below this a V makes little difference (to ``tolerance`` in log δ) or none."""
        if self.side == "remove":
            return term.place(-_REACH)
        z = np.linspace(2.0, 12.0, 41)
        moved = self.bins * (ndtr(-z) + saddle.tilt * ndtr(self.rate - z))
        few = np.flatnonzero(moved <= 0.02 * tolerance)
        largest = term.place(float(z[few[0]]) if few.size else float(z[-1]))
        return max(_BEYOND * self.threshold(epsilon), -largest)

    def _window(
        self, term: Term, saddle: Saddle, epsilon: float, negligible: float, step: float
    ) -> Window:
        """Sums outside of which there is too little to matter, by Chernoff's bound."""
        share = max(negligible, 1e-290) / self.scale(epsilon)
        return window_of(self.bins, term.atoms, saddle, self.threshold(epsilon), share, step)

    def _nodes(self, term: Term, bottom: float, step: float) -> tuple[Array, Array, bool]:
        """Nodes of the upper and of the lower measure, and whether its first cell is open."""
        if self.side == "add":
            least = -term.top
            first = least if least > 2 * step else self._barycentre(step) + _HAIR * step
            below = -(first + step * _count_up(max(2, math.ceil((-bottom - first) / step))))
            return _ending_at(term.top, bottom, step), below[::-1], False
        coarse = bottom <= 2 * step
        first = self._barycentre(step) - _HAIR * step if coarse else bottom
        below = first + step * _count_up(max(2, math.floor((term.top - first) / step)))
        return _ending_at(term.top, 0.0 if coarse else bottom - step, step), below, coarse

    def _barycentre(self, step: float) -> float:
        """The mean of X in a first cell that ends half a step beyond it."""
        result = 0.0
        for _ in range(30):
            z = math.log(result + step / 2) / self.rate + self.rate / 2
            mass = float(ndtr(z))
            if mass == 0:
                break
            result = float(ndtr(z - self.rate)) / mass
        return result


def tilt_of(bins: int, atoms: tuple[Array, Array], threshold: float, size: float) -> float:
    """The tilt at which the mean of (ΣV - Θ)_+ is made, for Θ = ``threshold``.

    It is looked for around one over ``size``. ``atoms`` are V and its log weights, of shape (n,).
    """
    low, high = -20.0, 25.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        tilt = math.exp(middle) / size
        mean = bins * _tilted(*atoms, tilt)[1]
        low, high = (middle, high) if mean - 2 / tilt < threshold else (low, middle)
    return math.exp((low + high) / 2) / size


def window_of(
    bins: int,
    atoms: tuple[Array, Array],
    saddle: Saddle,
    threshold: float,
    negligible: float,
    step: float,
) -> Window:
    """Sums outside of which there is too little of (ΣV - Θ)_+ to matter, by Chernoff's bound.

    ``negligible`` is about how much is too little; ``atoms`` are as in ``tilt_of``, of shape (n,).
    """
    spread = math.sqrt(saddle.variance + 1e-300)
    scale = saddle.log_moment - saddle.tilt * threshold
    # max g = 1/(e θ)
    tail = min(math.log(1e-3 * negligible) - scale + math.log(saddle.tilt) + 1, -1.0)
    lows, highs = [], []
    for share in _LADDER:
        tilt = share / spread
        under = bins * moments(*atoms, saddle.tilt - tilt)[0]
        over = bins * moments(*atoms, saddle.tilt + tilt)[0]
        lows.append(((tail - under + saddle.log_moment) / tilt, tilt))
        highs.append(((over - saddle.log_moment - tail) / tilt, tilt))
    (low, below), (high, above) = max(lows), min(highs)
    return Window(
        low=min(low, threshold - 0.01 * spread) - step,
        high=max(high, threshold + 0.01 * spread) + step,
        tilt=saddle.tilt,
        below=below,
        above=above,
    )


def where_it_falls_to(delta: float, curve: Callable[[float], float], most: float) -> float:
    """About the ε (nats) up to ``most`` at which the falling ``curve`` is ``delta``; no bound."""
    low, high = 0.0, most
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > delta else (low, middle)
    return high


def _count_up(size: int) -> Array:
    return np.arange(size, dtype=np.float64)


def _ending_at(top: float, bottom: float, step: float) -> Array:
    """Nodes a ``step`` apart, the last at ``top`` and the first at or below ``bottom``."""
    size = max(3, math.ceil((top - bottom) / step) + 1)
    nodes = top - step * np.arange(size - 1, -1, -1, dtype=np.float64)
    nodes[-1] = top
    return nodes


def _ratios(epsilons: Array) -> Array:
    """e^ε, kept within a double's range with room for the bins."""
    return np.exp(np.minimum(epsilons, 650.0))


def _ratio(epsilon: float) -> float:
    return float(_ratios(np.array([epsilon]))[0])


def moments(values: Array, log_weights: Array, tilt: float) -> tuple[float, float, float]:
    """log E exp(tilt V), and mean and variance of the tilted law; ``values`` have shape (n,)."""
    tilted, mean, peak, total = _tilted(values, log_weights, tilt)
    centred = values - mean
    return peak + math.log(total), mean, float(tilted @ (centred * centred)) / total


def _tilted(values: Array, log_weights: Array, tilt: float) -> tuple[Array, float, float, float]:
    """The tilted law's weights, of the shape of ``values``; its mean; what they are scaled by."""
    exponents = tilt * values + log_weights
    peak = float(exponents.max())
    tilted = np.exp(exponents - peak)
    total = float(tilted.sum())
    return tilted, float(tilted @ values) / total, peak, total
