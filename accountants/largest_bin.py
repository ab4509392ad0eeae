"""Proved bounds of balls in bins with correlated noise, by the bin with the largest ratio.

The likelihood ratio S is a mean of b correlated lognormals v_i, and a large S nearly always comes
from one large v_i and its neighbours. So δ(ε) = E (S - e^ε)_+ is a sum over the index of the
largest v_i: an integral over v_i, in which near bins move with one common normal, and far bins,
independent of it, enter by their moments. In the other direction S is at least the geometric mean
of its terms, whose curve is a closed form. A record that is told a few bins which share little is
allocated to these.

>>> from affidavit.plan.events import BallsInBinsGaussian, Gram
>>> gram = Gram(((1.0, 0.5), (0.5, 1.0)))
>>> event = BallsInBinsGaussian(gram=gram, noise_multiplier=0.5)
>>> bracket = LargestBinAccountant().curve(event).epsilon(1e-5)
>>> 9.0 < bracket.lower < bracket.upper < 10.5
True

Guarantees
    * Both bounds hold with certainty. ``upper`` is near the truth at large ε and for bins with few
      neighbours, and loose for many neighbours and small ε.

Reference: docs/theorems/balls-in-bins-correlated.md, Theorems 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import close_bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.gaussian import EMPTY_CURVE, GaussianCurve
from affidavit.accountants.monte_carlo.dominating_pair import Bins, Pair, build_pair
from affidavit.accountants.monte_carlo.importance_sampling import Tilt, tilts
from affidavit.accountants.protocol import (
    AccountantError,
    PrivacyCurve,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.accountants.random_allocation.renyi import power_of_series
from affidavit.accountants.registry import AFFIDAVIT_VERSION, accountant
from affidavit.accountants.rounding import Array
from affidavit.plan import events

ROUNDING = 1e-9
"""Relative allowance for floating point, far above what sums of positive terms lose."""
MAX_SQUARE = 300.0
"""Largest ‖m_i‖² of the integral; beyond it doubles overflow at e^700."""
MAX_Z, MAX_NEIGHBOUR_Z = 9.5, 7.0
"""Deviations at which the integrals over v_i and over its neighbours end."""
FAR_SHARE = 0.26
"""Products of far bins are at most this share of the largest."""
DISCLOSED_SHARE = 0.1
"""The most that log(1 + χ²) of few bins may be, over the largest product, to be computed."""
TABLE_SIZE = 121
"""Number of ε at which the integral is computed; between them δ lies below its chord in e^ε."""
DISTANCES = 500
"""Distances to which the moves along one direction are rounded down."""
ORDERS = np.arange(1, 49)
"""Moments of the far bins."""
LOWER_BOUND_WIDTH = 1e-2
"""Relative width of the bracket that gives the lower bound."""
THRESHOLD_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
"""Shares of e^ε for the far bins; the best is used for each v_i."""


@dataclass(frozen=True, kw_only=True)
class LargestBinAccountant:
    """Proved brackets of balls in bins with correlated noise, and Gaussian releases beside it.

    Without ``lower_ends`` these are 0.
    """

    lower_ends: bool = True
    name: str = "largest_bin"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        return _curve(event, self.lower_ends)

    def curves_below(self, event: events.Event) -> tuple[PrivacyCurve, ...]:
        """Return quick curves of what ``event`` shows; none where it has no bins."""
        with suppress(AccountantError):
            return _curves_below(build_pair(leaves(event)))
        return ()


@lru_cache(maxsize=4)  # links of a chain are of one event, whose tables take most of the time
def _curve(event: events.Event, lower_ends: bool) -> PrivacyCurve:
    releases = leaves(event)
    if not releases:
        return EMPTY_CURVE
    return LargestBinCurve(pair=build_pair(releases), lower_ends=lower_ends)


@dataclass(frozen=True, kw_only=True)
class LargestBinCurve:
    """Privacy curve of one run with bins."""

    pair: Pair
    lower_ends: bool = True

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises ``ValueError`` unless 0 < δ < 1."""
        require_delta(delta)
        known = self._known_bin.epsilon(delta).upper
        remove = min(known, *(tilt.epsilon(delta) for tilt in self._tilts))
        for integral in self._integrals:
            remove = min(remove, _crossing(integral.delta, delta, remove))
        add = min(known, _crossing(self._add, delta, known))
        upper = max(remove, add)
        upper = self._least_of_disclosed(upper, lambda curve: curve.epsilon(delta))
        return close_bracket(upper, self._below, lambda curve: curve.epsilon(delta))

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats); raises ``ValueError`` if ε < 0."""
        require_epsilon(epsilon)
        known = self._known_bin.delta(epsilon).upper
        log_remove = min(tilt.log_range(epsilon) for tilt in self._tilts)
        remove = min(known, math.exp(min(0.0, log_remove)))
        for integral in self._integrals:
            remove = min(remove, integral.delta(epsilon))
        upper = min(1.0, max(remove, min(known, self._add(epsilon))) + math.ulp(0.0))
        upper = self._least_of_disclosed(upper, lambda curve: curve.delta(epsilon))
        return close_bracket(upper, self._below, lambda curve: curve.delta(epsilon))

    def _least_of_disclosed(self, upper: float, ask: Callable[[PrivacyCurve], Bracket]) -> float:
        """Return ``upper`` or, if that is less, the upper end of the curve of disclosed bins."""
        curve = self._disclosed
        # An accountant may find only when it is asked that a value is out of its reach.
        with suppress(AccountantError):
            return upper if curve is None else min(upper, ask(curve).upper)
        return upper

    @cached_property
    def _known_bin(self) -> GaussianCurve:
        """The curve of a known bin. No mixture over bins costs more (joint convexity)."""
        return GaussianCurve(mu=math.sqrt(self.pair.max_square) * (1 + ROUNDING))

    @cached_property
    def _tilts(self) -> tuple[Tilt, ...]:
        return tilts(self.pair, "remove")

    @cached_property
    def _integrals(self) -> tuple[Integral, ...]:
        bins = self.pair.bins[0]
        if len(self.pair.bins) > 1 or bins.copies > 1 or self.pair.max_square > MAX_SQUARE:
            return ()
        return build_integrals(bins)

    @cached_property
    def _disclosed(self) -> PrivacyCurve | None:
        """The curve of a record that is told a few bins far apart, if these have little in common.

        Source: docs/theorems/balls-in-bins-correlated.md, Theorem 3.
        """
        bins = self.pair.bins[0]
        is_one = len(self.pair.bins) == 1 and bins.copies == 1
        few = disclosed_bins(bins) if is_one else None
        with suppress(AccountantError):
            return None if few is None else AllocationAccountant().curve(few)
        return None

    @cached_property
    def _below(self) -> tuple[PrivacyCurve, ...]:
        return _curves_below(self.pair) if self.lower_ends else ()

    def _add(self, epsilon: float) -> float:
        """Return a bound on δ of the direction add, E (1 - e^ε G)_+ with G the geometric mean."""
        variance = self.pair.square_of_mean * (1 + ROUNDING)
        drift = math.fsum(float(item.squares.mean()) * item.copies for item in self.pair.bins) / 2
        deviation = math.sqrt(variance)
        # log G is normal with mean -drift and this variance.
        place = (drift * (1 + ROUNDING) - epsilon) / deviation
        log_second = epsilon - drift + variance / 2 + float(log_ndtr(place - deviation))
        second = math.exp(min(0.0, log_second)) * (1 - ROUNDING)
        return min(1.0, max(0.0, float(ndtr(place)) * (1 + ROUNDING) - second))


def _curves_below(pair: Pair) -> tuple[PrivacyCurve, ...]:
    """Return the curves of what the first bins show, of which lower ends are used."""
    curves = []
    with suppress(AccountantError):
        curves.append(accountant("fourier").curve(along_mean(pair.bins[0])))
        if (alike := equal(pair.bins[0])) is not None:
            curves.append(AllocationAccountant(relative_width=LOWER_BOUND_WIDTH).curve(alike))
    return tuple(curves)


def along_mean(bins: Bins) -> events.GaussianMixture:
    """Return what the outputs along the mean of the m_i show, the moves rounded down."""
    products = np.maximum(bins.products - bins.excess, 0.0)
    moves = products.mean(axis=1) / math.sqrt(bins.square_of_mean) * (1 - ROUNDING)
    spacing = float(moves.max()) / DISTANCES
    places = np.minimum((moves / spacing).astype(int), DISTANCES)
    weights = np.bincount(places, minlength=DISTANCES + 1) / bins.count * (1 - ROUNDING)
    weights = np.maximum(weights, 1e-300)
    weights[0] = 1 - math.fsum(weights[1:])
    return events.GaussianMixture(
        weights=tuple(map(float, weights)), noise_multiplier=1 / spacing * (1 + ROUNDING)
    )


def equal(bins: Bins) -> events.Event | None:
    """Return bins of one square and one product of two, the least of ``bins``; None for zeros."""
    products = np.maximum(bins.products - bins.excess, 0.0) * (1 - ROUNDING)
    common, own = float(products.min()), float(products.diagonal().min())
    own -= common * (1 + ROUNDING)
    if own <= 0:
        return events.Gaussian(noise_multiplier=1 / math.sqrt(common)) if common else None
    allocation = events.RandomAllocationGaussian(
        bins=bins.count, noise_multiplier=1 / math.sqrt(own)
    )
    if not common:
        return allocation
    shared = events.Gaussian(noise_multiplier=1 / math.sqrt(common))
    return events.Composed(events=(shared, allocation))


def _products_by_lag(bins: Bins) -> Array:
    """Return the largest products of bins 0, ..., b - 1 apart, counted around, shape (b,)."""
    places = np.arange(bins.count)
    turned = bins.products[places[:, None], (places[:, None] + places) % bins.count]
    return np.asarray(turned.max(axis=0))


def disclosed_bins(bins: Bins) -> events.RandomAllocationGaussian | None:
    """Return about the cheapest allocation to a few bins, as far apart, that bounds ``bins``.

    None if a known bin costs about as little.
    """
    by_lag, squares, count = _products_by_lag(bins), bins.products.diagonal(), bins.count
    best, least, width, others = 0, DISCLOSED_SHARE * float(by_lag[0]), 0, 0.0
    for apart in range(1, count // 2 + 1):
        number = count // apart
        # A bin has as many of the others before it as are left of those behind it.
        sums = np.append(0.0, np.cumsum(by_lag[apart * np.arange(1, number)]))
        shared = float((sums + sums[::-1]).max())
        square = min(float(by_lag[0]) + shared, 700.0)
        if (cost := math.log1p(math.expm1(square) / number)) < least:
            best, least, width, others = number, cost, apart, shared
    if not best:
        return None
    shortest = float(squares.min())
    is_longer = squares > shortest * (1 + ROUNDING)
    places = (np.arange(count)[:, None] + width * np.arange(best)) % count
    longer = int(is_longer[places].sum(axis=1).max())
    most, less = (math.sqrt((square + others) * (1 + ROUNDING)) for square in (by_lag[0], shortest))
    has_two = 0 < longer < best
    return events.RandomAllocationGaussian(
        bins=best,
        noise_multiplier=1 / most,
        attained_at=1 / less if has_two else None,
        longer=longer if has_two else None,
    )


def build_integrals(bins: Bins) -> tuple[Integral, ...]:
    """Return the integrals of ``bins`` for two neighbourhoods beyond which products are small."""
    by_lag = _products_by_lag(bins)
    result: list[Integral] = []
    width = 1
    while 2 * width <= bins.count and len(result) < 2:
        level = float(by_lag[width : bins.count - width + 1].max())
        if level <= FAR_SHARE * by_lag[0]:
            result.append(_integral(by_lag, width, level))
        width = 2 * width if level > ROUNDING * by_lag[0] else bins.count
    return tuple(result)


def _integral(by_lag: Array, width: int, level: float) -> Integral:
    """Return the integral of a circular Gram matrix that is nowhere smaller than ``by_lag``."""
    rest = np.maximum(by_lag - level, 0.0)
    rest[width : rest.size - width + 1] = 0.0
    # A larger diagonal makes any circular matrix a Gram matrix.
    least = float(np.fft.fft(rest).real.min())
    rest[0] += max(0.0, -least) + ROUNDING * float(rest.sum())
    return Integral(products=rest, width=width, level=level)


@dataclass(frozen=True, kw_only=True)
class Integral:
    """The bound of the direction remove for ``products`` by lag, (b,), zero from ``width`` on.

    All pairs of bins share the product ``level``. Units are squared noise deviations.
    """

    products: Array
    width: int
    level: float

    def delta(self, epsilon: float) -> float:
        """Return a bound on δ at ``epsilon`` (nats), composed with a Gaussian of μ² = ``level``."""
        if self.level <= 0:
            return float(np.interp(math.exp(epsilon), *self._table))
        edges = np.linspace(-MAX_Z, MAX_Z, 401)
        loss = self.level / 2 + math.sqrt(self.level) * edges[1:]
        values = np.interp(np.exp(epsilon - loss), *self._table)
        total = float(np.diff(ndtr(edges)) @ values) + 2 * float(ndtr(-MAX_Z))
        return total * (1 + ROUNDING)

    @cached_property
    def _table(self) -> tuple[Array, Array]:
        """e^ε and the bound of δ at each without ``level``. δ is convex in e^ε, and 1 at 0."""
        epsilons = np.linspace(0.0, self._square / 2 + 8.5 * math.sqrt(self._square), TABLE_SIZE)
        values = np.minimum(1.0, [self._delta_without_level(float(item)) for item in epsilons])
        return np.append(0.0, np.exp(epsilons)), np.append(1.0, values)

    @property
    def _square(self) -> float:
        return float(self.products[0])

    @cached_property
    def _edges(self) -> Array:
        """Normal deviations of the largest term. Below the first one S is at most 1."""
        deviation = math.sqrt(self._square)
        step = min(0.03, max(0.006, 0.03 / deviation))
        return np.append(np.arange(-deviation / 2 - step, MAX_Z, step), MAX_Z)

    @cached_property
    def _largest(self) -> Array:
        """v_i / b at the edges."""
        square = self._square
        return np.exp(square / 2 + math.sqrt(square) * self._edges) / self.products.size

    @cached_property
    def _cells(self) -> Array:
        """Probabilities of the cells between the edges, under the hypothesis of bin i."""
        return np.diff(ndtr(self._edges)) * (1 + ROUNDING)

    @cached_property
    def _near(self) -> tuple[Array, Array]:
        """Upper bounds of the near bins by cell and common normal, and its probabilities."""
        square, top = self._square, self._largest[1:]
        deviation = square + math.sqrt(square) * self._edges[1:]
        common = np.linspace(-4.0, MAX_NEIGHBOUR_Z, 89)
        near = [*self.products[1 : self.width], *self.products[-self.width + 1 :]]
        total = np.zeros((top.size, common.size + 1))
        for product in near if self.width > 1 else ():
            share = product / square
            rest = math.sqrt(square * (1 - share) * (1 + share))
            log_term = share * deviation[:, None] - square / 2 + rest * common
            term = np.exp(np.minimum(log_term, 700.0)) / self.products.size
            total[:, :-1] += np.minimum(term, top[:, None])
            total[:, -1] += top
        probabilities = np.diff(ndtr(common), prepend=0.0, append=1.0)
        probabilities[-1] = ndtr(-MAX_NEIGHBOUR_Z)
        return total, probabilities

    @cached_property
    def _far(self) -> Array:
        """log E F^k by cell and order, with F the far terms, none of which exceeds the largest."""
        bins = self.products.size
        count = bins - 2 * self.width + 1
        independent = max(1, count // self.width)
        square, places = self._square, np.append(0, ORDERS)
        # A few truncations serve all cells; each is no lower than that of its cell.
        first, last = np.log(self._largest[[0, -1]])
        log_ceilings = np.linspace(first, last, 40)
        rows = []
        for log_ceiling in log_ceilings:
            reach = (log_ceiling + math.log(bins) + square / 2) / math.sqrt(square)
            logs = places * (places - 1) * square / 2 - gammaln(places + 1)
            logs[1:] += log_ndtr(reach - places[1:] * math.sqrt(square))
            moments = power_of_series(logs, independent) + gammaln(places + 1)
            rows.append((moments + places * math.log(count / bins / independent))[1:])
        chosen = np.searchsorted(log_ceilings, np.log(self._largest[1:]) - ROUNDING)
        return np.asarray(rows)[np.minimum(chosen, 39)]

    def _delta_without_level(self, epsilon: float) -> float:
        """Return the bound of δ at ``epsilon`` (nats) without the product that all bins share."""
        threshold, bins = math.exp(epsilon), self.products.size
        # If no term is above e^ε, their mean is not.
        cells = slice(int(np.searchsorted(self._largest[1:] * bins, threshold)), None)
        near, probabilities = self._near
        ahead, k = self._largest[1:][cells, None] + near[cells], ORDERS
        # (y - c)_+ is at most y^k (k - 1)^(k - 1) / (k^k c^(k - 1)).
        peak = (k - 1) * np.log(np.maximum(k - 1, 1)) - k * np.log(k)
        best = np.full(len(ahead), np.inf)
        for far in threshold * THRESHOLD_SHARES:
            above = np.maximum(ahead - (threshold - far), 0.0) @ probabilities
            beyond = self._far[cells] + peak - (k - 1) * math.log(far)
            best = np.minimum(best, above + np.exp(np.minimum(beyond.min(axis=1), 600.0)))
        inside = float(self._cells[cells] @ (best / self._largest[:-1][cells]))
        return (inside + bins * float(ndtr(-MAX_Z))) * (1 + ROUNDING)


def _crossing(bound: Callable[[float], float], delta: float, top: float) -> float:
    """Return about the least ε (nats) at which ``bound`` is at most ``delta``, or infinity."""
    if bound(0.0) <= delta:
        return 0.0
    if bound(top) > delta:
        return math.inf
    low, high = 0.0, top
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if bound(middle) <= delta else (middle, high)
    return high
