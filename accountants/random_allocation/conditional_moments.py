"""Upper bounds for a record in k of T steps, by the moments of its likelihood ratio given two sums.

The ratio L is the mean, over the sets of k steps, of the products of their X_t. Sums over the steps
of log(1 + w X), and of what is above the chance w X / (1 + w X) of a participation, nearly decide
it. Given these sums, the mean of (L - α)_+ is bounded by the first two moments of L, which are
those of one set of steps and of two sets that overlap. The law of X is first replaced by one on
nodes where log(1 + w X) is a whole number of cells, which raises the mean of a convex function.

>>> from affidavit.plan.events import AllocatedRecord
>>> record = AllocatedRecord(steps=100, participations=10, noise_multiplier=0.9359)
>>> round(RemovedRecordBound(record).epsilon(1e-5).upper, 2)
6.55

Guarantees
    * The bounds hold for the order of a removed record, with all errors of tails, transforms and
      windows added.

Reference: docs/theorems/random-allocation.md, Theorem 11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import logsumexp, ndtr, ndtri

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import BracketingCurve, CombinedCurve, orders_of
from affidavit.accountants.protocol import OutOfReach, PrivacyCurve, require_delta, require_epsilon
from affidavit.accountants.random_allocation.score_attack import Pair, Saddle
from affidavit.accountants.rounding import (
    UNIT_ROUNDOFF,
    Array,
    norm,
    transform_error,
    transform_rounding,
)
from affidavit.plan import events

Spectrum = NDArray[Any]
_NARROW_WIDTH = 5e-3
"""Relative width of a bracket from which on it is made narrower."""
ROUNDING = 1e-9
"""Relative allowance for sums of positive terms, far above what they lose."""
_ACCURACY = 5e-4
"""About what the nodes may add to ε, relative to it."""
_CELLS, _OTHER_CELLS = 1 << 13, 96
"""Cells of the sum of scores at most, and of the other sum."""
_SHARE = 1e-4
"""Share of δ of what lies beyond the nodes, and of what lies beyond the window."""
_LOG_OUTSIDE = (-14.0, -22.0, -14.0)
"""About the log of the tilted mass outside of the window, for each moment."""
_TOWARDS_LEAST = 0.4
"""Share of the way from the decisive sum to the least sum that counts, at which moments are tilted.
"""
_MAX_STEPS, _MAX_TAKEN = 1 << 14, 1 << 10
_TILTS = np.geomspace(0.1, 40.0, 32)
"""Tilts for Chernoff's bound, over the deviation of a sum."""
_MAX_ROUNDS, _LOG_DELTA = 12, 1e-4
"""Evaluations of δ in a search for ε at most, and about how far log δ remains from it."""
_LOG_WEIGHTS = (-6.0, 8.0)
"""Range of log w over the share of the record's steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowerCurve(CombinedCurve):
    """The curve of a run that is one phase with ``record``, narrower than its ``bracket``."""

    bracket: BracketingCurve
    record: events.AllocatedRecord

    def _answer(self, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        wide = ask(self.bracket)
        if wide.width <= _NARROW_WIDTH * wide.upper:
            return wide
        _, added = orders_of(self.bracket.above)
        try:
            upper = max(ask(RemovedRecordBound(self.record)).upper, ask(added).upper)
        except OutOfReach:
            return wide
        return wide.intersect(Bracket(lower=0.0, upper=upper))


@dataclass(frozen=True, slots=True)
class RemovedRecordBound:
    """Upper bounds of a phase with one ``record``, for the record against none."""

    record: events.AllocatedRecord

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` if it is not bounded here.

        Raises ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        self._require_reach()
        return Bracket(lower=0.0, upper=_least_epsilon(self.record, delta))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises as ``epsilon`` does."""
        require_epsilon(epsilon)
        self._require_reach()
        saddle = _saddle(self.record, lambda pair: pair.at_epsilon(epsilon))
        moments = Moments.near(saddle, epsilon, math.exp(min(0.0, saddle.true)) / 10)
        return Bracket(lower=0.0, upper=min(1.0, moments.delta(epsilon)))

    def _require_reach(self) -> None:
        if self.record.steps > _MAX_STEPS or self.record.participations > _MAX_TAKEN:
            raise OutOfReach("there are too many steps for cells.", "Use the wider bracket.")


def _saddle(record: events.AllocatedRecord, search: Callable[[Pair], Saddle]) -> Saddle:
    """Return the saddle of the weight at which log L grows as the sum of scores does."""
    odds = math.log(record.participations / record.steps)
    low, high = (odds + shift for shift in _LOG_WEIGHTS)
    while high - low > 0.02:
        middle = (low + high) / 2
        saddle = search(Pair(record, 1, "remove", math.exp(middle)))
        steep = saddle.tilts[1] - saddle.tilts[0] > 1
        low, high = (middle, high) if steep else (low, middle)
    return search(Pair(record, 1, "remove", math.exp((low + high) / 2)))


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The law of w X on nodes e^{cell i} - 1: a measure, by which means of convex functions rise.

    ``logs`` are those of its masses, and of these times X and X², shape (n,) each. X lies above the
    last node with the chance ``cut`` at most in one of the steps, with the record.
    """

    record: events.AllocatedRecord
    weight: float
    cell: float
    logs: tuple[Array, Array, Array]
    cut: float

    @classmethod
    def of(cls, pair: Pair, cell: float, chance: float) -> Nodes:
        """Return the nodes for a ``pair``, above which X lies with a chance of about ``chance``."""
        record, rate = pair.record, pair.rate
        reach = rate - float(ndtri(chance / record.steps))
        top = float(np.logaddexp(0.0, math.log(pair.weight) + rate * (reach - rate / 2)))
        x = np.expm1(cell * np.arange(math.ceil(top / cell) + 1)) / pair.weight
        edges = np.concatenate(([-np.inf], np.log(x[1:]) / rate + rate / 2))
        (without, error), (present, other) = _between(edges, 0.0, rate), _between(edges, rate, rate)
        # What of a cell's mass its upper node takes, so that the mean stays the same.
        above = np.clip((present - x[:-1] * without) / np.diff(x), 0.0, without)
        error = error + (other + x[:-1] * error) / np.diff(x)
        masses = np.append(without - above + error, 0.0) + np.append(0.0, above + error)
        with np.errstate(divide="ignore"):
            logs, ratio = np.log(masses), np.log(x)
        last, taken = float(edges[-1]), record.participations
        cut = taken * float(ndtr(rate - last)) + (record.steps - taken) * float(ndtr(-last))
        return cls(
            record=record,
            weight=pair.weight,
            cell=cell,
            logs=(logs, logs + ratio, logs + 2 * ratio),
            cut=cut * (1 + ROUNDING),
        )

    @property
    def size(self) -> int:
        """The number of nodes."""
        return self.logs[0].size

    @cached_property
    def scores(self) -> Array:
        """log(1 + w X) at the nodes, shape (n,)."""
        return self.cell * np.arange(self.size, dtype=np.float64)

    @cached_property
    def excesses(self) -> Array:
        """What the scores are above w X / (1 + w X), shape (n,)."""
        excesses: Array = self.scores + np.expm1(-self.scores)
        return excesses

    @cached_property
    def ceiling(self) -> float:
        """What log L is below the sum of scores, at least."""
        steps, taken = self.record.steps, self.record.participations
        return taken * math.log(self.weight) + math.log(math.comb(steps, taken))

    @cached_property
    def overlaps(self) -> tuple[NDArray[np.int64], Array]:
        """Common steps of two sets, shape (n,), and the logs of their probabilities."""
        steps, taken = self.record.steps, self.record.participations
        least = max(0, 2 * taken - steps)
        ways = math.comb(taken, least) * math.comb(steps - taken, taken - least)
        common = np.arange(least, taken + 1)
        before = common[:-1]
        growth = 2 * np.log(taken - before) - np.log(before + 1.0)
        growth -= np.log(steps - 2 * taken + before + 1.0)
        start = math.log(ways) - math.log(math.comb(steps, taken))
        return common, start + np.concatenate(([0.0], np.cumsum(growth)))

    def patterns(self, moment: int) -> tuple[NDArray[np.int64], Array]:
        """Return steps with no, one and two factors X, shape (n, 3), and the logs of weights."""
        steps, taken = self.record.steps, self.record.participations
        if moment == 2:
            common, weights = self.overlaps
            counts = steps - 2 * taken + common, 2 * (taken - common), common
            return np.stack(counts, axis=1), weights
        used = moment * taken
        return np.array([[steps - used, used, 0]]), np.zeros(1)

    def log_moment(self, moment: int, tilt: float, other: float = 0.0) -> float:
        """Return log E [L^moment e^{tilt · scores + other · excesses}] without the record."""
        exponents = tilt * self.scores + other * self.excesses
        one = np.array([float(logsumexp(logs + exponents)) for logs in self.logs])
        counts, weights = self.patterns(moment)
        return float(logsumexp(weights + counts @ one))

    def mean(self, moment: int, tilt: float) -> float:
        """Return about the mean of the sum of scores under the tilted law of a moment."""
        above, below = (self.log_moment(moment, tilt + side) for side in (1e-4, -1e-4))
        return (above - below) / 2e-4

    def tilt(self, moment: int, place: float) -> float:
        """Return about the tilt at which the mean of the sum of scores is ``place``."""
        low, high = -1.0, 1.0
        while self.mean(moment, low) > place and low > -1e3:
            low *= 2
        while self.mean(moment, high) < place and high < 1e3:
            high *= 2
        while high - low > 1e-3 * (1 + abs(low)):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean(moment, middle) < place else (low, middle)
        return (low + high) / 2

    def ends(self, moment: int, tilt: float, log_share: float) -> tuple[float, float, float]:
        """Return sums beyond which a share e^log_share of the tilted mass is, at most.

        The sums are one of scores at the lower and one at the upper end, and one of excesses.
        """
        whole = self.log_moment(moment, tilt)
        width = 1e-3
        sides = self.log_moment(moment, tilt + width) + self.log_moment(moment, tilt - width)
        further = _TILTS * width / math.sqrt(max(sides - 2 * whole, 1e-12))
        gained = [self.log_moment(moment, tilt + far) - whole for far in further]
        lost = [self.log_moment(moment, tilt - far) - whole for far in further]
        aside = [self.log_moment(moment, tilt, far) - whole for far in further]
        low = -float(np.min((np.array(lost) - log_share) / further))
        high = float(np.min((np.array(gained) - log_share) / further))
        return low, high, float(np.min((np.array(aside) - log_share) / further))


def _between(edges: Array, mean: float, rate: float) -> tuple[Array, Array]:
    """Return the normal probabilities between ``edges``, (n,) for n + 1, and bounds of errors."""
    z = edges - mean
    low, high = z[:-1], z[1:]
    lower, upper = ndtr(-np.abs(low)), ndtr(-np.abs(high))
    straddles = (low <= 0) & (high > 0)
    masses = np.where(straddles, 1 - lower - upper, np.abs(lower - upper))
    reach = np.minimum(np.maximum(np.abs(low), np.abs(high)), 40.0) + rate + 1
    relative = UNIT_ROUNDOFF * (64 + 8 * reach**2 + 8 * reach / rate)
    return masses, relative * (lower + upper + straddles)


def _power(values: Spectrum, exponent: int) -> Spectrum:
    """Return a power of ``values``, with at most ``exponent`` roundings of each."""
    result, square = np.ones_like(values), values
    while exponent:
        if exponent & 1:
            result = result * square
        exponent >>= 1
        if exponent:
            square = square * square
    return result


def _mixture(spectra: Sequence[Spectrum], counts: NDArray[np.int64], shares: Array) -> Spectrum:
    """Return the transform of the sums: a mixture of products of ``spectra`` with ``shares``."""
    exponents = int(counts[0][0]), int(counts[-1][1]), int(counts[0][2])
    result: Spectrum = np.ones_like(spectra[0])
    for spectrum, exponent in zip(spectra, exponents, strict=False):
        result = result * _power(spectrum, exponent)
    if len(counts) == 1:
        return result
    # Each further common step puts none and two factors X for one and one.
    apart, common = spectra[1] * spectra[1], spectra[0] * spectra[2]
    total, power = shares[0] * np.ones_like(apart), np.ones_like(apart)
    for share in shares[1:]:
        power = power * common
        total = total * apart + share * power
    product: Spectrum = total * result
    return product


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Sums of scores from ``first`` cells on, and of excesses from 0 on, ``shape`` of each."""

    first: int
    shape: tuple[int, int]
    other_cell: float


@dataclass(frozen=True, kw_only=True)
class Table:
    """The tilted law of both sums for one moment of L, and bounds of its errors.

    ``values`` has shape (sums of scores, sums of excesses). ``scale`` undoes the tilt, shape
    (n, 1). ``error`` bounds the 2-norm of the errors of ``values``, ``relative`` what is lost of
    each beside, and ``outside`` the mass that wraps around.
    """

    values: Array
    scale: Array
    error: float
    relative: float
    outside: float

    @classmethod
    def of(cls, nodes: Nodes, moment: int, tilt: float, window: Window) -> Table:
        """Return the law tilted by ``tilt`` in a ``window``, beyond which ``_LOG_OUTSIDE`` is."""
        shape, points = window.shape, math.prod(window.shape)
        places = np.arange(nodes.size) % shape[0]
        others = np.floor(nodes.excesses / window.other_cell).astype(np.int64) % shape[1]
        logs = [one + tilt * nodes.scores for one in nodes.logs[: moment + 1]]
        totals = np.array([float(logsumexp(one)) for one in logs])
        counts, weights = nodes.patterns(moment)
        weights = weights + counts[:, : moment + 1] @ totals
        base = float(logsumexp(weights))
        shares = np.exp(weights - base)
        likely = shares > 1e-30
        spectra, error = [], 0.0
        for one, total in zip(logs, totals, strict=True):
            law = np.zeros(shape)
            np.add.at(law, (places, others), np.exp(one - total))
            spectra.append(fft.rfft2(law))
            error = max(error, transform_error(law.ravel(), points * -(-nodes.size // shape[0])))
        first, last = np.flatnonzero(likely)[[0, -1]]
        chosen = slice(int(first), int(last) + 1)
        left = float(shares[:first].sum() + shares[last + 1 :].sum())
        spectrum = _mixture(spectra, counts[chosen], shares[chosen])
        sizes = [np.abs(one) for one in spectra]
        largest = norm(_mixture(sizes, counts[chosen], shares[chosen]).ravel())
        largest *= math.sqrt(2 / points)
        values = np.roll(fft.irfft2(spectrum, shape), -(window.first % shape[0]), axis=0)
        steps = nodes.record.steps
        growth = steps * error * math.sqrt(points)
        transform = steps * error * math.exp(min(700.0, growth)) + left
        power = UNIT_ROUNDOFF * (64 + 8 * (steps + 2 * len(shares))) + transform_rounding(points)
        exponents = abs(tilt) * nodes.cell * (nodes.size + window.first + shape[0])
        logarithms = abs(base) + float(np.abs(weights).max()) + exponents
        rows = window.first + np.arange(shape[0])
        with np.errstate(over="ignore"):
            scale = np.exp(base - tilt * nodes.cell * rows)[:, np.newaxis]
        return cls(
            values=values,
            scale=scale,
            error=transform + 2 * power * (largest + transform),
            relative=UNIT_ROUNDOFF * (64 * steps + 16 * logarithms),
            outside=3 * math.exp(_LOG_OUTSIDE[moment]) * (1 + ROUNDING),
        )

    def bound(self, factors: Array) -> float:
        """Return at least the sum of the moments times ``factors``, shape of the last rows."""
        rows = slice(len(self.values) - len(factors), None)
        scaled, values = factors * self.scale[rows], self.values[rows]
        terms = scaled * values
        total = float(terms.sum()) + (self.relative + ROUNDING) * float(np.abs(terms).sum())
        least = min(0.0, float(scaled.min(initial=0.0)))
        return total + self.error * norm(scaled.ravel()) - least * self.outside


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Moments of L given both sums, in a window, and a bound of what lies ``beyond``."""

    nodes: Nodes
    window: Window
    tables: tuple[Table, Table, Table]
    beyond: float

    @classmethod
    def near(cls, saddle: Saddle, epsilon: float, delta: float) -> Moments:
        """Return the moments where the losses are about ``epsilon`` (nats)."""
        pair = saddle.pair
        wide = 12 * _ACCURACY * max(epsilon, 0.1) / (1 + saddle.tilts[0])
        cell = math.sqrt(wide / pair.record.steps)
        room = math.log(_SHARE * delta)
        while True:
            nodes = Nodes.of(pair, cell, _SHARE * delta)
            place = nodes.mean(1, saddle.tilts[0])
            # Nearer to the least sum that counts, where small differences of moments decide.
            place -= _TOWARDS_LEAST * max(0.0, place - nodes.ceiling - epsilon)
            tilts = [nodes.tilt(moment, place) for moment in range(3)]
            ends = [nodes.ends(j, tilts[j], _LOG_OUTSIDE[j]) for j in range(3)]
            low = max(0.0, min(end[0] for end in ends))
            low = min(low, max(0.0, nodes.ceiling + 0.8 * epsilon))
            _, *true = nodes.ends(1, 0.0, room)
            high = max(true[0], *(end[1] for end in ends))
            if high - low <= cell * (_CELLS - 2):
                break
            cell = max(1.05 * cell, (high - low) / (_CELLS - 4))
        other = max(true[1], *(end[2] for end in ends))
        first = math.floor(low / cell)
        rows = fft.next_fast_len(math.ceil(high / cell) - first + 1)
        window = Window(
            first=first, shape=(rows, _OTHER_CELLS), other_cell=other / (_OTHER_CELLS - 1)
        )
        none, one, two = (Table.of(nodes, j, tilts[j], window) for j in range(3))
        return cls(
            nodes=nodes,
            window=window,
            tables=(none, one, two),
            beyond=2 * math.exp(room + nodes.log_moment(1, 0.0)) + nodes.cut,
        )

    def delta(self, epsilon: float) -> float:
        """Return at least δ at ``epsilon`` (nats); 1 if that is outside the window."""
        start = math.floor((self.nodes.ceiling + epsilon) / self.nodes.cell) - self.window.first
        if not 0 <= start < self.window.shape[0]:
            return 1.0
        parts = zip(self.tables, self._factors(epsilon, start), strict=True)
        inside = sum(table.bound(factors) for table, factors in parts)
        result = (inside + self.beyond) * (1 + ROUNDING)
        return result if result < 1 else 1.0  # also if a scale overflowed

    def _factors(self, epsilon: float, start: int) -> tuple[Array, Array, Array]:
        """Return factors for the moments from row ``start`` on, of about the least bound."""
        alpha, size = math.exp(epsilon), math.sqrt(math.prod(self.window.shape))
        none, one, two = (
            np.maximum(table.values[start:], 0.0) * table.scale[start:] for table in self.tables
        )
        errors = [table.error / size * table.scale[start:] for table in self.tables]
        wrapped = self.tables[1].outside * self.tables[1].scale[start:]
        with np.errstate(divide="ignore", invalid="ignore"):
            square = two / none - 2 * alpha * one / none + alpha * alpha
        spread = np.sqrt(np.maximum(square, (1e-6 * alpha) ** 2))
        spread = np.where(np.isfinite(spread), spread, alpha)
        factors = np.array(
            (
                (spread - alpha) ** 2 / (4 * spread),
                (spread - alpha) / (2 * spread),
                1 / (4 * spread),
            )
        )
        costs = np.array(
            (
                sum(
                    factor * moment + abs(factor) * error
                    for factor, moment, error in zip(factors, (none, one, two), errors, strict=True)
                )
                + np.maximum(-factors[1], 0.0) * wrapped,
                one + errors[1],
                (two + errors[2]) / (4 * alpha),
            )
        )
        best = costs.argmin(axis=0)
        whole, square_alone = best == 1, best == 2
        return (
            np.where(best == 0, factors[0], 0.0),
            np.where(whole, 1.0, np.where(square_alone, 0.0, factors[1])),
            np.where(whole, 0.0, np.where(square_alone, 1 / (4 * alpha), factors[2])),
        )


@lru_cache(maxsize=64)
def _least_epsilon(record: events.AllocatedRecord, delta: float) -> float:
    saddle = _saddle(record, lambda pair: pair.at_delta(delta))
    shown = math.exp(min(0.0, saddle.true)) - delta
    guess = max(1e-3, math.log(shown) - saddle.false) if shown > 0 else 1.0
    moments = Moments.near(saddle, guess, delta)
    best, epsilon, slope = math.inf, guess, 1 + saddle.tilts[0]
    last: tuple[float, float] | None = None
    for _ in range(_MAX_ROUNDS):
        excess = math.log(moments.delta(epsilon) / delta)
        if excess <= 0:
            best = min(best, epsilon)
            if excess > -2 * _LOG_DELTA:
                break
        if last is not None and last[1] != excess:
            slope = max(0.1 * slope, (last[1] - excess) / (epsilon - last[0]))
        last = epsilon, excess
        epsilon = max(0.0, epsilon + (excess + _LOG_DELTA) / slope)
    if math.isinf(best):
        raise OutOfReach("the moments do not bound the run.", "Use the wider bracket.")
    return best
