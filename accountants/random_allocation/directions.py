"""Bounds of δ(ε) in one direction of a random allocation.

A bound at ε is the lattice's part (``lattice``) plus what it leaves out (``tail_truncation``). The
cut, tilt, step and window chosen here decide how narrow the bracket is. It holds for any choice.

The step follows from the error law: mean-preserving chords widen a term's variance by at most h²/6
(for a law wide against h) and tangents narrow it by h²/12, so b terms at tilt θ move log δ by
b θ² h² / 8 in all.

``PartialDirection`` is a pass that ends before all of its bins are released. The record is in one
of the released bins with probability q, else in none: the pair is q P + (1-q) Q against Q, with P
against Q that of a whole pass over the released bins. Mixing with Q acts exactly on hockey-stick
curves (Theorem 5), so both bounds carry over, rounded outward.

Reference: ``docs/theorems/random-allocation.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import ndtr

from affidavit.accountants.protocol import OutOfReach
from affidavit.accountants.random_allocation.lattice import (
    ConvolutionPower,
    Side,
    Term,
    Window,
    chernoff_payoffs,
    lower_masses,
    upper_masses,
)
from affidavit.accountants.random_allocation.tail_truncation import (
    Kinds,
    LargeTerms,
    SmallTerms,
    choose_cut,
    min_small_term,
)
from affidavit.accountants.rounding import Array

MAX_POINTS = 1 << 23
"""Longest lattice or transform; 64 MiB an array of doubles."""
_WINDOW_TILTS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0, 12.0, 16.0)
"""Further tilts tried for the window, over the tilted deviation."""
_BARYCENTRE_MARGIN = 1e-9
"""Distance, in steps, of an outer node from the barycentre that it must not pass."""
_CHERNOFF_NODES = 4096
_THRESHOLD_FACTOR = 1.1
"""The lattice of the side ``add`` ends at this multiple of Θ."""
_MAX_Z = 10.0
"""Normal deviations of one term on the lattice unless something else ends it."""
_PARTIAL_ROUNDING = 2e-15
"""Relative error of what ``PartialDirection`` computes and of its share, several times over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saddle:
    """The tilt at which the lattice's payoff is made, with the moments of the sum there.

    ``inside`` approximates the lattice's part of δ, and ``delta`` all of it.
    """

    tilt: float
    variance: float
    log_moment: float
    inside: float
    delta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Upper and lower bounds of δ(ε), narrow near the ε for which they were computed.

    ``uppers`` and ``lowers`` take ε in nats and return δ, of shape (n,) both.
    """

    uppers: Callable[[Array], Array]
    lowers: Callable[[Array], Array]
    step: float

    def upper(self, epsilon: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats)."""
        return float(self.uppers(np.array([epsilon]))[0])

    def lower(self, epsilon: float) -> float:
        """Return a lower bound of δ at ``epsilon`` (nats)."""
        return float(self.lowers(np.array([epsilon]))[0])


Terms = tuple[tuple[Term, int], ...]
"""The V of each kind of bin, and how many there are."""
Laws = Sequence[tuple[tuple[Array, Array], int]]
"""Values of V and their log weights, shape (n,) each, and how many independent copies there are."""
Outside = LargeTerms | SmallTerms
"""The part of δ outside of the lattice."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """One order of the pair of a 1-of-``bins`` allocation; ``rate`` is 1/σ.

    ``slower`` are how many of the bins have a smaller rate, and that rate.
    """

    bins: int
    rate: float
    side: Side
    slower: tuple[int, float] | None = None

    @property
    def kinds(self) -> Kinds:
        """The bins of each rate, and the rate."""
        if self.slower is None:
            return ((self.bins, self.rate),)
        return (self.bins - self.slower[0], self.rate), self.slower

    def thresholds(self, epsilons: Array) -> Array:
        """Return Θ at ``epsilons`` (nats), of their shape."""
        sign = 1.0 if self.side == "remove" else -1.0
        return sign * self.bins * _ratios(sign * epsilons)

    def scales(self, epsilons: Array) -> Array:
        """Return δ over the mean of (ΣV - Θ)_+ at ``epsilons`` (nats), of their shape."""
        return (1.0 if self.side == "remove" else _ratios(epsilons)) / np.full(
            epsilons.size, float(self.bins)
        )

    def threshold(self, epsilon: float) -> float:
        """Return Θ at ``epsilon`` (nats)."""
        return float(self.thresholds(np.array([epsilon]))[0])

    def scale(self, epsilon: float) -> float:
        """Return δ over the mean of (ΣV - Θ)_+ at ``epsilon`` (nats)."""
        return float(self.scales(np.array([epsilon]))[0])

    def _split(self, cut: float) -> tuple[Terms, Outside]:
        """Return the terms on a lattice that ends at ``cut``, and the part of δ outside of it."""
        outside: Outside
        if self.side == "add":
            top, outside = -min_small_term(self.rate), SmallTerms(bins=self.bins)
        else:
            top, outside = cut, LargeTerms(kinds=self.kinds, cut=cut)
        terms = tuple((Term(rate=rate, side=self.side, top=top), bins) for bins, rate in self.kinds)
        return terms, outside

    # ---- approximations, on which no bound rests ------------------------------------

    def cut(self, epsilon: float, allowed: float) -> float:
        """Return the X at which the lattice may end if ``allowed`` of δ may be lost."""
        if self.side == "add":
            return math.inf
        return choose_cut(self.kinds, _ratio(epsilon), allowed)

    def saddle(self, epsilon: float, cut: float) -> Saddle:
        """Return the saddle at ``epsilon`` (nats), with the leading term of δ there."""
        threshold = self.threshold(epsilon)
        terms, outside = self._split(cut)
        laws = [(term.atoms, bins) for term, bins in terms]
        tilt = find_tilt(laws, threshold, abs(threshold))
        log_moment, variance = moments(laws, tilt)
        spread = variance + 2 / tilt**2
        exponent = log_moment - tilt * threshold - 2 * math.log(tilt)
        exponent += math.log(self.scale(epsilon)) - math.log(2 * math.pi * spread) / 2
        inside = math.exp(min(0.0, exponent))
        return Saddle(
            tilt=tilt,
            variance=variance,
            log_moment=log_moment,
            inside=inside,
            delta=inside + float(outside.lower(np.array([_ratio(epsilon)]))[0]),
        )

    def approximate_delta(self, epsilon: float) -> float:
        """Return about the δ at ``epsilon`` (nats); **not a bound**."""
        coarse = self.saddle(epsilon, self.cut(epsilon, 1e-12)).delta
        if self.side == "add":
            return coarse
        return self.saddle(epsilon, self.cut(epsilon, 0.01 * min(coarse, 1.0))).delta

    @property
    def max_epsilon(self) -> float:
        """The largest ε (nats) searched; a single Gaussian mechanism does not reach it."""
        return self.rate**2 / 2 + _MAX_Z * self.rate

    def approximate_epsilon(self, delta: float) -> float:
        """Return about the ε (nats) at which δ(ε) is ``delta``; **not a bound**."""
        return approximate_crossing(
            delta,
            lambda epsilon: self.saddle(epsilon, self.cut(epsilon, 0.1 * delta)).delta,
            self.max_epsilon,
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
        """Return bounds of δ about ``tolerance`` apart in log δ near ``epsilon`` (nats).

        ``delta`` approximates δ there. The lattice also covers the payoff up to ``upto`` (nats).
        Raises ``OutOfReach`` if the lattice would be too long.
        """
        allowed = 0.01 * tolerance * delta
        cut = self.cut(max(epsilon, upto), allowed)
        saddle = self.saddle(epsilon, cut)
        terms, outside = self._split(cut)
        first, _ = terms[0]
        if saddle.inside <= 10 * allowed:
            payoffs = self._chernoff_payoffs(terms, epsilon)
            payoff = float(payoffs(np.array([self.threshold(epsilon)]))[0])
            if self.scale(epsilon) * payoff <= 10 * allowed:
                return self._join(payoffs, np.zeros_like, outside, first.top)
        if step is None:
            step = math.sqrt(4 * tolerance / self.bins) / saddle.tilt
            step = min(step, 0.5 * math.sqrt(saddle.variance + 1e-300))
        window = self._window(terms, saddle, epsilon, tolerance * delta, step)
        bottom = self._bottom(first, saddle, epsilon, tolerance)
        if max((first.top - bottom) / step, (window.high - window.low) / step) > MAX_POINTS:
            raise OutOfReach(
                f"the allocation would need a lattice of more than {MAX_POINTS} points.",
                "Add noise, or ask for fewer bins.",
            )
        nodes = [self._nodes(term, bottom, step) for term, _ in terms]
        least = float(nodes[0][0][0])
        # On the side "add" a term below Θ has no payoff.
        ends = self.side == "add" and least <= _THRESHOLD_FACTOR * self.threshold(epsilon)
        upper = ConvolutionPower(
            [
                (above, upper_masses(term, above, raise_below=not ends), bins)
                for (term, bins), (above, _, _) in zip(terms, nodes, strict=True)
            ],
            window,
        )

        @cache
        def lower() -> ConvolutionPower:
            measures = [
                (below, lower_masses(term, below, open_left=open_left), bins)
                for (term, bins), (_, below, open_left) in zip(terms, nodes, strict=True)
            ]
            return ConvolutionPower(measures, window)

        least = least if ends else -math.inf
        return self._join(
            lambda thresholds: np.where(thresholds >= least, upper.upper(thresholds), np.inf),
            lambda thresholds: lower().lower(thresholds),
            outside,
            step,
        )

    def _join(
        self,
        upper: Callable[[Array], Array],
        lower: Callable[[Array], Array],
        outside: Outside,
        step: float,
    ) -> Curves:
        """Return δ from bounds of the lattice's payoff and of the rest; NaN becomes 1 or 0."""

        def upper_deltas(epsilons: Array) -> Array:
            inside = self.scales(epsilons) * upper(self.thresholds(epsilons))
            result = (inside + outside.upper(_ratios(epsilons))) * (1 + 1e-13)
            return np.where(result < 1, result, 1.0)

        def lower_deltas(epsilons: Array) -> Array:
            inside = self.scales(epsilons) * lower(self.thresholds(epsilons))
            result = (inside + outside.lower(_ratios(epsilons))) * (1 - 1e-13)
            return np.where(result > 0, result, 0.0)

        return Curves(uppers=upper_deltas, lowers=lower_deltas, step=step)

    def _chernoff_payoffs(self, terms: Terms, epsilon: float) -> Callable[[Array], Array]:
        term, _ = terms[0]
        bottom = term.value_at(-_MAX_Z)
        nodes = _ending_at(term.top, bottom, (term.top - bottom) / _CHERNOFF_NODES)
        measures = [(nodes, upper_masses(term, nodes), bins) for term, bins in terms]
        whole = abs(self.threshold(epsilon))
        return chernoff_payoffs(measures, np.geomspace(1.0, 1e5, 200) / whole)

    def _bottom(self, term: Term, saddle: Saddle, epsilon: float, tolerance: float) -> float:
        """Return the V below which terms change log δ by less than ``tolerance``."""
        if self.side == "remove":
            return term.value_at(-_MAX_Z)
        z = np.linspace(2.0, 12.0, 41)
        moved = self.bins * (ndtr(-z) + saddle.tilt * ndtr(self.rate - z))
        few = np.flatnonzero(moved <= 0.02 * tolerance)
        largest = term.value_at(float(z[few[0]]) if few.size else float(z[-1]))
        return max(_THRESHOLD_FACTOR * self.threshold(epsilon), -largest)

    def _window(
        self, terms: Terms, saddle: Saddle, epsilon: float, negligible: float, step: float
    ) -> Window:
        """Return the sums that matter, by Chernoff's bound."""
        share = max(negligible, 1e-290) / self.scale(epsilon)
        laws = [(term.atoms, bins) for term, bins in terms]
        return compute_window(laws, saddle, self.threshold(epsilon), share, step)

    def _nodes(self, term: Term, bottom: float, step: float) -> tuple[Array, Array, bool]:
        """Return the nodes of the upper and lower measures, and whether the first cell is open."""
        if self.side == "add":
            least = -term.top
            barycentre = _barycentre(term.rate, step) + _BARYCENTRE_MARGIN * step
            first = least if least > 2 * step else barycentre
            below = -(first + step * _count_up(max(2, math.ceil((-bottom - first) / step))))
            return _ending_at(term.top, bottom, step), below[::-1], False
        coarse = bottom <= 2 * step
        first = _barycentre(term.rate, step) - _BARYCENTRE_MARGIN * step if coarse else bottom
        below = first + step * _count_up(max(2, math.floor((term.top - first) / step)))
        return _ending_at(term.top, 0.0 if coarse else bottom - step, step), below, coarse


@dataclass(frozen=True, kw_only=True)
class PartialDirection:
    """``inner`` if the record is in one of its bins with probability ``share`` only."""

    inner: Direction
    share: float

    @property
    def bins(self) -> int:
        """The number of released bins."""
        return self.inner.bins

    @property
    def rate(self) -> float:
        """1/σ."""
        return self.inner.rate

    def approximate_epsilon(self, delta: float) -> float:
        """Return about the ε (nats) at which δ(ε) is ``delta``; **not a bound**."""
        return approximate_crossing(delta, self.approximate_delta, self.max_epsilon)

    def approximate_delta(self, epsilon: float) -> float:
        """Return about the δ at ``epsilon`` (nats); **not a bound**."""
        scale, inside = self._inside(epsilon, self.share, 0.0)
        if inside > self.inner.max_epsilon:
            return 0.0
        return scale * self.inner.approximate_delta(inside)

    @property
    def max_epsilon(self) -> float:
        """The largest ε (nats) searched."""
        most = self.inner.max_epsilon
        if self.inner.side == "remove":
            return math.log1p(self.share * math.expm1(most))
        return -math.log1p(self.share * math.expm1(-most))

    def curves(
        self,
        epsilon: float,
        delta: float,
        width: float,
        step: float | None = None,
        upto: float = 0.0,
    ) -> Curves:
        """Return bounds for ``epsilon`` (nats) and ``delta``, as ``Direction.curves`` does."""
        scale, inside = self._inside(epsilon, self.share, 0.0)
        _, end = self._inside(upto, self.share, 0.0)
        most = self.inner.max_epsilon
        likely = min(0.5, delta / (scale or 1.0))
        inner = self.inner.curves(min(inside, most), likely, width, step, min(end, most))
        return Curves(
            uppers=self._outside(inner.uppers, _PARTIAL_ROUNDING),
            lowers=self._outside(inner.lowers, -_PARTIAL_ROUNDING),
            step=inner.step,
        )

    def _outside(
        self, bound: Callable[[Array], Array], outwards: float
    ) -> Callable[[Array], Array]:
        share = min(1.0, self.share * (1 + outwards))

        def deltas(epsilons: Array) -> Array:
            pairs = [self._inside(epsilon, share, outwards) for epsilon in epsilons.tolist()]
            scales, inside = np.array(pairs).reshape(-1, 2).T
            none = scales <= 0
            return np.where(none, 0.0, scales * bound(np.where(none, 0.0, inside)) * (1 + outwards))

        return deltas

    def _inside(self, epsilon: float, share: float, outwards: float) -> tuple[float, float]:
        """Return the factor on the inner δ, and the inner ε (nats); δ is rounded ``outwards``."""
        if self.inner.side == "remove":
            inside = math.log1p(math.expm1(min(epsilon, 650.0)) / share)
            return share, inside * (1 - outwards)
        scale = share - (1 - share) * math.expm1(min(epsilon, 650.0)) + share * outwards
        if scale <= 0:
            return 0.0, math.inf
        inside = epsilon + math.log(share / scale)
        return scale, max(0.0, inside - outwards * (1 + abs(inside)))


def _barycentre(rate: float, step: float) -> float:
    """Return the mean of X in a first cell that ends half a ``step`` beyond it."""
    result = 0.0
    for _ in range(30):
        z = math.log(result + step / 2) / rate + rate / 2
        mass = float(ndtr(z))
        if mass == 0:
            break
        result = float(ndtr(z - rate)) / mass
    return result


def find_tilt(laws: Laws, threshold: float, size: float) -> float:
    """Return the tilt at which the mean of (ΣV - Θ)_+ is made, for Θ = ``threshold``.

    The search is around one over ``size``.
    """
    low, high = -20.0, 25.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        tilt = math.exp(middle) / size
        mean = sum(copies * _tilted(*atoms, tilt)[1] for atoms, copies in laws)
        low, high = (middle, high) if mean - 2 / tilt < threshold else (low, middle)
    return math.exp((low + high) / 2) / size


def compute_window(
    laws: Laws,
    saddle: Saddle,
    threshold: float,
    negligible: float,
    step: float,
) -> Window:
    """Return the window of sums outside of which (ΣV - Θ)_+ is about ``negligible``.

    The window follows from Chernoff's bound.
    """
    spread = math.sqrt(saddle.variance + 1e-300)
    scale = saddle.log_moment - saddle.tilt * threshold
    # max g = 1/(e θ)
    tail = min(math.log(1e-3 * negligible) - scale + math.log(saddle.tilt) + 1, -1.0)
    lows, highs = [], []
    for share in _WINDOW_TILTS:
        tilt = share / spread
        under, over = (moments(laws, at)[0] for at in (saddle.tilt - tilt, saddle.tilt + tilt))
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


def approximate_crossing(delta: float, curve: Callable[[float], float], most: float) -> float:
    """Return about the ε (nats) <= ``most`` at which the decreasing ``curve`` is ``delta``."""
    low, high = 0.0, most
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > delta else (low, middle)
    return high


def _count_up(size: int) -> Array:
    return np.arange(size, dtype=np.float64)


def _ending_at(top: float, bottom: float, step: float) -> Array:
    """Return nodes a ``step`` apart, the last at ``top`` and the first at or below ``bottom``."""
    size = max(3, math.ceil((top - bottom) / step) + 1)
    nodes = top - step * np.arange(size - 1, -1, -1, dtype=np.float64)
    nodes[-1] = top
    return nodes


def _ratios(epsilons: Array) -> Array:
    """Return e^ε, limited so that it times the number of bins does not overflow."""
    return np.exp(np.minimum(epsilons, 650.0))


def _ratio(epsilon: float) -> float:
    return float(_ratios(np.array([epsilon]))[0])


def moments(laws: Laws, tilt: float) -> tuple[float, float]:
    """Return log E exp(tilt ΣV) and the variance of ΣV under the tilted laws."""
    logs = variance = 0.0
    for (values, log_weights), copies in laws:
        tilted, mean, peak, total = _tilted(values, log_weights, tilt)
        centred = values - mean
        logs += copies * (peak + math.log(total))
        variance += copies * float(tilted @ (centred * centred)) / total
    return logs, variance


def _tilted(values: Array, log_weights: Array, tilt: float) -> tuple[Array, float, float, float]:
    """Return the tilted weights, shape (n,), their mean, the log of their scale and their sum."""
    exponents = tilt * values + log_weights
    peak = float(exponents.max())
    tilted = np.exp(exponents - peak)
    total = float(tilted.sum())
    return tilted, float(tilted @ values) / total, peak, total
