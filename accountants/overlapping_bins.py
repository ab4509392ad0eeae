"""Upper bounds of bins with correlated noise, in which one bin makes most of a large loss.

Let X_j be the likelihood ratio of a record in bin j, and X_j' that of what replaces it, or 1. A
large difference of their means, with weights 1 and e^ε, nearly always comes from one large X_j.
Given the largest, the others are below it, and the sum V of all other differences has exponential
moments. So, with x the share of the largest one,

    E (x + V)_+  <=  e^{θ x} E e^{θ V} / (e θ) ,    E e^{θ V}  <=  Π_j (E e^{θ p_j V_j})^{1 / p_j} ,

the second by a Gaussian Hölder inequality, in whose powers p_j the strategy's overlaps are. A
record that is added costs at most E e^{θ (1 - e^ε S)} / (e θ), S the mean of the X_j.

>>> run = events.OverlappingBins(products=(1.0, 0.5, *(0.0,) * 997, 0.5), noise_multiplier=1.0)
>>> round(OverlappingBinsCurve(run).epsilon(1e-6).upper, 2)
0.29

Reference: docs/theorems/balls-in-bins-correlated.md, Theorem 4; Chen, Dafnis and Paouris, "Improved
Hölder and reverse Hölder inequalities for Gaussian random vectors", arXiv:1306.2410.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.rounding import Array
from affidavit.plan import events

_ROUNDING = 1e-9
"""Relative allowance for floating point, far above what sums of positive terms lose."""
_MAX_SQUARE = 40.0
"""Largest ‖m_i‖² over σ²: beyond it a bin is nearly as good as known."""
_MAX_Z, _Z_STEP, _U_STEP = 9.5, 0.016, 0.08
"""Deviations at which the largest bin ends, and the steps of it, where it decides, and of others.
Elsewhere its steps are a few times as long."""
_TILTS = 36
_LOG_ROUNDING = 1e-11
"""Allowance for the rounding of the logarithm of a mean."""
_MAX_EXPONENT = 600.0
_MAX_CORRELATION = 0.999
"""Bins that have more in common count as farther from the origin."""
_ACCURACY = 1e-3
"""Relative accuracy of ε."""


@dataclass(frozen=True, slots=True)
class OverlappingBinsCurve:
    """Upper bounds of ``run`` in both orders."""

    run: events.OverlappingBins

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` with too little noise."""
        require_delta(delta)
        known = self._known.epsilon(delta).upper
        sums = _sums(self.run)
        _, upper = crossing(sums.delta, delta, known / 4, known / 8, _ACCURACY * known / 2)
        return Bracket(lower=0.0, upper=min(known, upper))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        upper = min(self._known.delta(epsilon).upper, _sums(self.run).delta(epsilon))
        return Bracket(lower=0.0, upper=upper)

    @property
    def _known(self) -> GaussianCurve:
        """The curve of a known bin. No mixture over bins costs more (joint convexity)."""
        distance = 2.0 if self.run.pair == "replace_one" else 1.0
        moved = distance * math.sqrt(self.run.products[0]) / self.run.noise_multiplier
        return GaussianCurve(mu=moved * (1 + _ROUNDING))


@dataclass(frozen=True, slots=True)
class _Kind:
    """``count`` bins whose means have this ``square`` over the noise's variance."""

    count: int
    square: float


@dataclass(frozen=True, slots=True)
class _Group:
    """``count`` bins whose products with another bin are from ``low`` to ``high``."""

    count: int
    high: float
    low: float


@dataclass(frozen=True, slots=True)
class _Shape:
    """A valid Gram matrix, with no smaller products: bins by kind, and others by product.

    ``widest`` is at least its largest eigenvalue.
    """

    kinds: tuple[_Kind, ...]
    groups: tuple[_Group, ...]
    widest: float

    @classmethod
    def of(cls, run: events.OverlappingBins) -> _Shape:
        by_lag = np.array(run.products) / run.noise_multiplier**2 * (1 + _ROUNDING)
        by_lag = np.maximum(by_lag, np.append(by_lag[:1], by_lag[:0:-1]))
        # A larger diagonal makes any circular matrix a Gram matrix.
        slack = _ROUNDING * float(by_lag.sum())
        least = float(by_lag[0] - np.fft.fft(by_lag).real.min()) + slack
        least = max(least, float(by_lag[1:].max()) / _MAX_CORRELATION)
        square, bins = max(float(by_lag[0]), least), by_lag.size
        kinds: tuple[_Kind, ...] = (_Kind(bins, square),)
        if run.longer is not None:
            less = max(run.less / run.noise_multiplier**2 * (1 + _ROUNDING), least)
            if less < square:
                kinds = _Kind(run.longer, square), _Kind(bins - run.longer, less)
        widest = square + float(by_lag[1:].sum())
        return cls(kinds=kinds, groups=_groups(by_lag[1:]), widest=widest * (1 + _ROUNDING))


def _groups(products: Array) -> tuple[_Group, ...]:
    """Return groups of about equal ``products``, shape (n,), the largest first."""
    ordered, result, first = np.sort(products)[::-1], [], 0
    while first < ordered.size:
        high, relative = float(ordered[first]), float(ordered[first] / max(ordered[0], 1e-300))
        least = high * (0.8 if relative > 0.1 else 0.3 if relative > 0.01 else 0.0)
        count = int(np.count_nonzero(ordered[first:] >= least))
        low = float(ordered[first + count - 1])
        result.append(_Group(count, high, low))
        first += count
    return tuple(result)


@lru_cache(maxsize=4)  # each holds some tens of megabytes
def _sums(run: events.OverlappingBins) -> _Sums:
    shape = _Shape.of(run)
    if shape.kinds[0].square > _MAX_SQUARE:
        raise OutOfReach("a bin is nearly as good as known.", "Use another accountant.")
    replaced = run.pair == "replace_one"
    largest = tuple(_Largest.of(shape, kind, replaced=replaced) for kind in shape.kinds)
    return _Sums(shape=shape, largest=largest, replaced=replaced)


@dataclass(frozen=True, slots=True)
class _Others:
    """Bins of one group and kind, given the largest bin.

    ``law`` has the chances of places of u for each cell of the largest, (n, m), and ``ends`` the
    last of them, (n,): what is between two places is put on both, with its mean. Of u above it
    ``further`` has the chances, (n, m), each at the place above. The moments of ``power`` times a
    term are raised by e^``widened``, and to the power 1 / ``power``.
    """

    law: Array
    further: Array
    ends: NDArray[np.intp]
    power: float
    widened: float


@dataclass(frozen=True, slots=True)
class _Largest:
    """Cells of the largest bin if it is one of ``kind``; u is log X plus half the square.

    ``edges``, (n + 1,), are those of its u, and ``chances``, (n,), those with the record in it. The
    ``places`` of other bins, (m,), rise. ``others`` are by group and kind.
    """

    kind: _Kind
    edges: Array
    chances: Array
    places: Array
    others: tuple[tuple[_Others, ...], ...]

    @classmethod
    def of(cls, shape: _Shape, kind: _Kind, *, replaced: bool) -> _Largest:
        square, deviation = kind.square, math.sqrt(kind.square)
        most = shape.kinds[0].square
        # Below it the largest bin makes no loss.
        first = (square - most) / 2 if replaced else square / 2
        # Bins that are shorter are hardly ever the largest.
        step = _Z_STEP if square == most else 4 * _Z_STEP
        z = _steps((first - square) / deviation, 1.5, 6.5, _MAX_Z, step=step)
        edges = square + deviation * z
        end = float(edges[-1]) + most + math.sqrt(most)
        places = np.arange(-6.0, end / math.sqrt(most), _U_STEP) * math.sqrt(most)
        # Terms above the largest count as the next place.
        places = np.union1d(np.append(places, end), edges)
        others = tuple(
            tuple(
                _others(shape, group, square, other.square, edges[1:], places)
                for other in shape.kinds
            )
            for group in shape.groups
        )
        return cls(kind, edges, np.diff(ndtr(z)), places, others)


def _steps(first: float, start: float, stop: float, last: float, *, step: float) -> Array:
    """Return places from ``first`` to ``last``, with steps of ``step`` from ``start`` to ``stop``.

    The others are three times as long.
    """
    inner = np.arange(max(first, start), stop, step)
    before = np.arange(first, start, 3 * step)
    return np.concatenate((before, inner, np.arange(stop, last, 3 * step), [last]))


def _others(
    shape: _Shape, group: _Group, square: float, other: float, u: Array, places: Array
) -> _Others:
    """Return the bins of ``group`` with the square ``other``, given the largest at ``u``, (n,)."""
    variance, least = other - group.low**2 / square, other - group.high**2 / square
    # A product that is larger moves a term up, because u < 0 moves none down.
    at = (places - group.high / square * np.maximum(u, 0.0)[:, None]) / math.sqrt(variance)
    below, above, density = ndtr(at), ndtr(-at), np.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    # Each from the side on which it keeps its digits.
    masses = np.where(at[:, :-1] > 0, above[:, :-1] - above[:, 1:], np.diff(below, axis=1))
    right = (density[:, :-1] - density[:, 1:] - at[:, :-1] * masses) / (
        np.diff(at, axis=1) + 1e-300
    )
    right = np.clip(right, 0.0, masses)
    ends = np.searchsorted(places, u + (other - square) / 2)
    law, further = np.zeros((2, *at.shape))
    law[:, 0] = below[:, 0]
    # The cell before the end counts as the end.
    cells = np.arange(1, places.size)
    law[:, :-1] += np.where(cells < ends[:, None], masses - right, 0.0)
    law[:, 1:] += np.where(cells < ends[:, None], right, masses * (cells == ends[:, None]))
    further[:, 1:] = np.where(cells > ends[:, None], masses, 0.0)
    further[:, -1] += above[:, -1]
    return _Others(law, further, ends, shape.widest / least, math.log(variance / least) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """The bounds of δ, by the kind of the largest bin."""

    shape: _Shape
    largest: tuple[_Largest, ...]
    replaced: bool

    @property
    def _bins(self) -> int:
        return sum(kind.count for kind in self.shape.kinds)

    def delta(self, epsilon: float) -> float:
        """Return a bound on δ at ``epsilon`` (nats) over both orders."""
        ratio = math.exp(min(epsilon, _MAX_EXPONENT))
        if ratio <= 1:
            return 1.0
        inside = sum(self._inside(largest, ratio) for largest in self.largest)
        result = (inside + self._bins * float(ndtr(-_MAX_Z))) * (1 + _ROUNDING)
        return min(1.0, result if self.replaced else max(result, self._added(ratio)))

    def _inside(self, largest: _Largest, ratio: float) -> float:
        """Return the part of δ of runs whose largest bin is of this kind; ``ratio`` is e^ε."""
        bins, most = self._bins, self.shape.kinds[0].square
        tilts = np.geomspace(0.2 / max(ratio - 1, 0.5), 60 / (ratio - 1), _TILTS)
        x = np.exp(largest.edges - largest.kind.square / 2)
        gaps = np.diff(largest.places)
        widths = np.maximum(np.append(gaps, 0.0), np.append(0.0, gaps))
        ahead = x[1:] / bins - (0.0 if self.replaced else ratio)
        logs = ahead[:, None] * tilts - np.log(tilts) - 1
        for group, kinds in zip(self.shape.groups, largest.others, strict=True):
            shares = []
            for kind, others in zip(self.shape.kinds, kinds, strict=True):
                terms = np.exp(largest.places - kind.square / 2)
                opposite = ratio * np.exp(-largest.places - kind.square / 2) * self.replaced
                powers = others.power / bins * tilts
                exponents = np.multiply.outer(terms - opposite, powers)
                values = np.exp(np.minimum(exponents, _MAX_EXPONENT))
                # A chord may be so far below, since e^(t V) t V'' is its only negative curvature.
                curved = np.append(opposite[:1], opposite[:-1]) * widths**2 / 8
                values += np.multiply.outer(curved, powers) * np.append(
                    values[1:], values[-1:], axis=0
                )
                # Above the largest a term is no larger, but what replaces it falls, to nothing.
                capped = np.multiply.outer(terms[others.ends], powers)
                falling = np.exp(-np.multiply.outer(np.append(opposite[:-1], 0.0), powers))
                means = others.further @ falling * np.exp(np.minimum(capped, _MAX_EXPONENT))
                means += others.law @ values
                share = (np.log(means + 1e-30) + others.widened + _LOG_ROUNDING) / others.power
                shares.append(np.where(capped > _MAX_EXPONENT, np.inf, share))
            # Not all bins of a large group are of the first kind.
            first = min(group.count, self.shape.kinds[0].count)
            logs += first * np.maximum(shares[0], shares[-1])
            if group.count > first:
                logs += (group.count - first) * shares[-1]
        excess = np.minimum(np.exp(np.minimum(logs.min(axis=1), _MAX_EXPONENT)), x[1:])
        # S is at most the largest X, and S' at least e^(-square) over it.
        least = math.exp(-most / 2) * math.sqrt(ratio) if self.replaced else ratio
        shown = np.where(x[1:] > least, excess / x[:-1], 0.0)
        return largest.kind.count * float(largest.chances @ shown)

    def _added(self, ratio: float) -> float:
        """Return a bound of E (1 - e^ε S)_+, that of a record that is added."""
        tilts = np.geomspace(1.0, 1e5, 4 * _TILTS)
        logs = tilts - np.log(tilts) - 1
        z = np.arange(-_MAX_Z, _MAX_Z, _Z_STEP)
        chances = np.diff(ndtr(z), prepend=0.0, append=1.0)
        for kind in self.shape.kinds:
            power, deviation = self.shape.widest / kind.square, math.sqrt(kind.square)
            least = np.append(0.0, np.exp(deviation * z - kind.square / 2))
            exponents = np.multiply.outer(tilts, power * ratio / self._bins * least)
            means = np.exp(-exponents) @ chances
            logs += kind.count / power * (np.log(means) + _LOG_ROUNDING)
        return math.exp(min(0.0, float(logs.min()))) * (1 + _ROUNDING)
