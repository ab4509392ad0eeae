"""Lower bounds for records in k of T steps: an attack that adds up a score of each step.

With X = e^{y/σ - 1/(2σ²)} for a release y (in standard deviations of its noise), the score of a
step is log(1 + z X), cut into cells of one width. The likelihood ratio is the mean of the products
of k of the X; near its threshold it grows like the product of all 1 + z X for the right z. A step's
score is a whole number of cells, so that the sum has a law on a lattice, with the record and
without it, whatever the steps of the record: k scores of one kind and T - k of another. The test
whether the sum is large (or, for an added record, small) is one that an attacker can run.

>>> from affidavit.plan.events import AllocatedRecord
>>> record = AllocatedRecord(steps=391, participations=5, noise_multiplier=0.6)
>>> round(ScoreAttack(record, 1).epsilon(1.25e-5).lower, 1)
5.3

Guarantees
    * The bounds are those of a test with the printed cells and threshold: probabilities of the sums
      are rounded outwards.

Reference: docs/theorems/random-allocation.md, Theorem 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import log_ndtr, logsumexp, ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import require_delta, require_epsilon
from affidavit.accountants.random_allocation.lattice import Side
from affidavit.accountants.rounding import (
    UNIT_ROUNDOFF,
    Array,
    folded,
    norm,
    transform_error,
    transform_rounding,
)
from affidavit.plan import events

SIDES: tuple[Side, ...] = ("remove", "add")
ROUNDING = 1e-9
"""Relative allowance for sums of positive terms, far above what they lose."""
CELLS_PER_DEVIATION = 8
"""Cells of a score per standard deviation of it; half as many lose about 1e-3 of ε."""
MAX_CELLS, MAX_POINTS = 1 << 16, 1 << 21
_LOG_OUTSIDE = -40.0
"""Log mass of the tilted sums outside the window."""
_REACH = 9.0
"""Deviations from a (tilted) mean beyond which scores are cut."""
_SPREAD = 4.0
"""Deviations of the sum in which the threshold is searched."""
_WEIGHTS = np.linspace(-3.0, 6.0, 7)
"""Log z over the share of the record's steps, from which the best is refined."""
_WEIGHT_ACCURACY = 0.1
_MAX_TILT = 1e3
_RARE = 1e-4
"""Chance, over the largest, below which it is not counted in how many longer steps a record is."""
_MAX_SHIFTS = 12.0
"""Clip norms of a release up to which scores are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTest:
    """The test: whether the cells of all steps' scores add up to ``threshold`` or more.

    A step whose release is at least ``edges``[kind][i], in standard deviations of its noise, has a
    score of i + 1 cells or more. The kind is 0 for longer steps, if there are any, and -1 for
    others. For the side ``add``, scores are counted from the largest downwards.
    """

    side: Side
    weight: float
    edges: tuple[Array, ...]
    threshold: int


@dataclass(frozen=True, slots=True)
class ScoreAttack:
    """Lower bounds of ``times`` phases with one ``record`` each, by a sum of scores."""

    record: events.AllocatedRecord
    times: int

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[lower, ∞]`` of ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        return Bracket(lower=_least_epsilon(self, delta), upper=math.inf)

    def test(self, delta: float) -> ScoreTest:
        """Return the test that attains the lower end at ``delta``."""
        return max(self.tests(delta), key=itemgetter(0))[1]

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[lower, 1]`` of δ at ``epsilon`` (nats); raises ``ValueError`` if ε < 0."""
        require_epsilon(epsilon)
        best = 0.0
        for side in self._sides:
            saddle = self._saddle(side, lambda pair: pair.at_epsilon(epsilon), _delta_at(epsilon))
            rates = Lattice.of(saddle).rates()
            gains = self._distinct * rates.true - np.exp(np.minimum(0.0, rates.log_false + epsilon))
            best = max(best, float(gains.max(initial=0.0)))
        return Bracket(lower=best * (1 - ROUNDING), upper=1.0)

    def tests(self, delta: float) -> Iterator[tuple[float, ScoreTest]]:
        """Yield ε (nats) at ``delta`` and the test for each side."""
        for side in self._sides:
            saddle = self._saddle(side, lambda pair: pair.at_delta(delta), _epsilon_at(delta))
            lattice = Lattice.of(saddle)
            rates = lattice.rates()
            true = self._distinct * rates.true
            gains = np.full(true.size, -math.inf)
            shown = true > delta
            gains[shown] = np.log(true[shown] - delta) - rates.log_false[shown]
            best = int(gains.argmax())
            yield float(gains[best]), lattice.test(int(rates.thresholds[best]))

    @property
    def _sides(self) -> tuple[Side, ...]:
        """The orders in which the law of the sum is known, or bounded, with the record."""
        return SIDES if self.record.distinct == 1 and not self.record.longer else ("remove",)

    @property
    def _distinct(self) -> float:
        """The probability that the record's steps are distinct in all phases, rounded down."""
        return self.record.distinct**self.times * (1 - ROUNDING * (self.record.distinct < 1))

    def _saddle(
        self, side: Side, search: Callable[[Pair], Saddle], gain: Callable[[Saddle], float]
    ) -> Saddle:
        """Return the saddle of the weight with about the largest ``gain``."""

        def at(log_weight: float) -> Saddle:
            return search(Pair(self.record, self.times, side, math.exp(log_weight)))

        odds = math.log(self.record.participations / self.record.steps)
        saddles = {odds + shift: at(odds + shift) for shift in _WEIGHTS}
        stride = float(_WEIGHTS[1] - _WEIGHTS[0]) / 2
        while stride > _WEIGHT_ACCURACY:
            best = max(saddles, key=lambda one: gain(saddles[one]))
            saddles |= {moved: at(moved) for moved in (best - stride, best + stride)}
            stride /= 2
        return max(saddles.values(), key=gain)


@lru_cache(maxsize=64)
def _least_epsilon(attack: ScoreAttack, delta: float) -> float:
    epsilon = max(epsilon for epsilon, _ in attack.tests(delta))
    return max(0.0, epsilon * (1 - ROUNDING))


@dataclass(frozen=True, slots=True)
class Saddle:
    """Tilts of the sums of both hypotheses to one mean; no bound rests on them.

    ``true`` and ``false`` are the logarithms of about the probability of a larger sum.
    """

    pair: Pair
    tilts: tuple[float, float]
    true: float
    false: float


def _epsilon_at(delta: float) -> Callable[[Saddle], float]:
    def gain(saddle: Saddle) -> float:
        excess = math.exp(min(0.0, saddle.true)) - delta
        return math.log(excess) - saddle.false if excess > 0 else -math.inf

    return gain


def _delta_at(epsilon: float) -> Callable[[Saddle], float]:
    def gain(saddle: Saddle) -> float:
        return math.exp(min(0.0, saddle.true)) - math.exp(min(0.0, saddle.false + epsilon))

    return gain


@dataclass(frozen=True)
class Pair:
    """Both hypotheses of a sum of scores log(1 + ``weight`` X), for one ``side``."""

    record: events.AllocatedRecord
    times: int
    side: Side
    weight: float

    @property
    def rate(self) -> float:
        """1/σ."""
        return 1 / self.record.noise_multiplier

    @cached_property
    def kinds(self) -> tuple[tuple[int, float], ...]:
        """How many steps there are of each kind, and their 1/σ."""
        record, steps = self.record, self.record.steps * self.times
        if not record.longer:
            return ((steps, self.rate),)
        longer = 1 / record.noise_of_longer
        return (record.longer, longer), (steps - record.longer, self.rate)

    @cached_property
    def splits(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """The steps of each kind in which the record is, with their chances, rounded down."""
        taken, (first, *others) = self.record.participations * self.times, self.kinds
        if not others:
            return ((1.0, (taken,)),)
        steps = first[0] + others[0][0]
        chances = [
            math.comb(first[0], longer) * math.comb(others[0][0], taken - longer)
            / math.comb(steps, taken)
            for longer in range(taken + 1)
        ]  # fmt: skip
        return tuple(
            (chance * (1 - ROUNDING), (longer, taken - longer))
            for longer, chance in enumerate(chances)
            if chance > _RARE * max(chances)
        )

    def counts(self, taken: tuple[float, ...], hypothesis: int) -> tuple[tuple[float, float], ...]:
        """Return steps without and with the record by kind, if it is in so many of each."""
        if hypothesis == (self.side == "remove"):
            return tuple((steps, 0) for steps, _ in self.kinds)
        return tuple(
            (steps - some, some) for (steps, _), some in zip(self.kinds, taken, strict=True)
        )

    @cached_property
    def atoms(self) -> tuple[tuple[Array, tuple[Array, Array]], ...]:
        """Scores by kind, of shape (n,), and their log weights without and with the record."""
        result = []
        for _, rate in self.kinds:
            y = np.arange(-_REACH, rate * _MAX_SHIFTS + _REACH, min(0.05, 0.2 / rate))
            score = np.logaddexp(0.0, math.log(self.weight) + rate * (y - rate / 2))
            normal = math.log(y[1] - y[0]) - math.log(2 * math.pi) / 2
            weights = normal - y**2 / 2, normal - (y - rate) ** 2 / 2
            result.append((score if self.side == "remove" else -score, weights))
        return tuple(result)

    def cumulants(self, hypothesis: int, tilt: float) -> tuple[float, float, float]:
        """Return log E e^{tilt · sum}, and the mean and the variance of the tilted sum."""
        total, mean, variance = 0.0, 0.0, 0.0
        taken = self.record.participations * self.times
        steps = sum(number for number, _ in self.kinds)
        usual = tuple(taken * number / steps for number, _ in self.kinds)
        for (scores, weights), counts in zip(
            self.atoms, self.counts(usual, hypothesis), strict=True
        ):
            for count, log_weights in zip(counts, weights, strict=True):
                if not count:
                    continue
                logs = log_weights + tilt * scores
                peak = float(logs.max())
                tilted = np.exp(logs - peak)
                mass = float(tilted.sum())
                first = float(tilted @ scores) / mass
                total += count * (peak + math.log(mass))
                mean += count * first
                variance += count * float(tilted @ (scores - first) ** 2) / mass
        return total, mean, variance

    def saddle(self, tilt: float) -> Saddle:
        """Return the saddle of the first hypothesis at ``tilt``, at least 0."""
        first = self.cumulants(0, tilt)
        other = _falling_root(lambda moved: first[1] - self.cumulants(1, moved)[1], 1 + tilt)
        return Saddle(
            pair=self,
            tilts=(tilt, other),
            true=_log_tail(tilt, first),
            false=_log_tail(other, self.cumulants(1, other)),
        )

    def at_delta(self, delta: float) -> Saddle:
        """Return about the best saddle for ``delta``, where Pr(true) is δ (1 + tilt)."""

        def excess(tilt: float) -> float:
            return _log_tail(tilt, self.cumulants(0, tilt)) - math.log(delta) - math.log1p(tilt)

        return self.saddle(_falling_root(excess))

    def at_epsilon(self, epsilon: float) -> Saddle:
        """Return about the best saddle for ``epsilon`` (nats), the log ratio of the densities."""

        def excess(tilt: float) -> float:
            saddle = self.saddle(tilt)
            hazard = math.log(max(saddle.tilts[0], 1e-9) / max(saddle.tilts[1], 1e-9))
            return epsilon - (saddle.true - saddle.false + hazard)

        return self.saddle(_falling_root(excess))


def _falling_root(excess: Callable[[float], float], guess: float = 1.0) -> float:
    """Return about the tilt at which ``excess`` falls below 0, or 0 if it never is above."""
    low, high = 0.0, guess
    if excess(0.0) <= 0:
        return 0.0
    while excess(high) > 0 and high < _MAX_TILT:
        low, high = high, 2 * high
    if high >= _MAX_TILT:
        return _MAX_TILT
    # Imported here because it takes long, and plans of other samplings need none of it.
    from scipy.optimize import brentq

    return brentq(excess, low, high, xtol=1e-6, rtol=1e-4)


def _log_tail(tilt: float, cumulants: tuple[float, float, float]) -> float:
    """Return about the log probability that a sum exceeds its mean under ``tilt``."""
    log_moment, mean, variance = cumulants
    tilted = tilt * tilt * variance
    return log_moment - tilt * mean + tilted / 2 + float(log_ndtr(-math.sqrt(tilted)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Bounds at sums of ``thresholds`` or more, shape (n,) each.

    ``true`` is at most the probability under the first hypothesis, and ``log_false`` at least the
    logarithm of that under the second.
    """

    thresholds: NDArray[np.int64]
    true: Array
    log_false: Array


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """The scores of ``saddle``, cut at ``edges`` of the release by kind, shape (n,) each."""

    saddle: Saddle
    edges: tuple[Array, ...]
    step: float

    @classmethod
    def of(cls, saddle: Saddle) -> Lattice:
        """Return the lattice near ``saddle``."""
        pair = saddle.pair
        steps, rate = sum(number for number, _ in pair.kinds), pair.kinds[0][1]
        tilt = saddle.tilts[1]
        variance = pair.cumulants(1, tilt)[2]
        step = math.sqrt(variance / steps) / CELLS_PER_DEVIATION
        shifted = 1 + tilt if pair.side == "remove" else 1.0
        largest = float(
            np.logaddexp(
                0.0,
                math.log(pair.weight)
                + rate * (min(shifted, _MAX_SHIFTS) * rate + _REACH - rate / 2),
            )
        )
        step = max(step, largest / MAX_CELLS)
        least = float(np.logaddexp(0.0, math.log(pair.weight) - rate * (_REACH + rate / 2)))
        scores = step * np.arange(math.floor(least / step) + 1, math.ceil(largest / step) + 1)
        # log(e^s - 1), of which the exponential may overflow.
        x = scores + np.log(-np.expm1(-scores)) - math.log(pair.weight)
        edges = tuple(x / rate + rate / 2 for _, rate in pair.kinds)
        return cls(saddle=saddle, edges=edges, step=step)

    def test(self, threshold: int) -> ScoreTest:
        """Return the test of sums of ``threshold`` or more."""
        pair = self.saddle.pair
        return ScoreTest(side=pair.side, weight=pair.weight, edges=self.edges, threshold=threshold)

    def rates(self) -> Rates:
        """Return the bounds near the saddle."""
        splits = self.saddle.pair.splits
        true = [self._sums(taken, upper=False) for _, taken in splits]
        false = self._sums(splits[0][1], upper=True)
        usual = max(zip(splits, true, strict=True), key=lambda one: one[0][0])[1]
        middle, spread = usual.mean, _SPREAD * math.sqrt(usual.variance) + 1
        first = math.floor(max(middle - spread, 0, false.low, *(one.low for one in true)))
        last = math.ceil(min(middle + spread, false.high, *(one.high for one in true)))
        thresholds = np.arange(first, max(last, first + 1))
        return Rates(
            thresholds=thresholds,
            true=np.sum(
                [
                    chance * np.exp(sums.log_tails(thresholds, upper=False))
                    for (chance, _), sums in zip(splits, true, strict=True)
                ],
                axis=0,
            ),
            log_false=np.minimum(false.log_tails(thresholds, upper=True), 0.0),
        )

    def _sums(self, taken: tuple[int, ...], *, upper: bool) -> Sums:
        """Return the law of the sum of one hypothesis, the second for an ``upper`` bound."""
        pair = self.saddle.pair
        return Sums(
            laws=tuple(
                (self._masses(kind, bool(present), upper=upper), int(count))
                for kind, counts in enumerate(pair.counts(taken, int(upper)))
                for present, count in enumerate(counts)
                if count
            ),
            tilt=self.saddle.tilts[upper] * self.step,
        )

    def _masses(self, kind: int, present: bool, *, upper: bool) -> Array:
        """Return the law of a step's cells, whose tails are rounded up or down, shape (n + 1,)."""
        rate = self.saddle.pair.kinds[kind][1]
        z = self.edges[kind] - (rate if present else 0.0)
        # For the side "add" the largest score has no cells.
        tails = ndtr(-z) if self.saddle.pair.side == "remove" else ndtr(z)[::-1]
        reach = np.minimum(np.abs(z), 40.0) + rate + 1
        if self.saddle.pair.side == "add":
            reach = reach[::-1]
        relative = UNIT_ROUNDOFF * (64 + 8 * reach**2)
        tails = tails * (1 + relative if upper else 1 - relative)
        if upper:
            tails = np.minimum(np.maximum.accumulate(tails[::-1])[::-1], 1.0)
        else:
            tails = np.minimum.accumulate(tails)
        return -np.diff(np.concatenate(([1.0], tails, [0.0])))


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The law of a sum of independent cells: ``laws`` of one with their counts.

    ``tilt`` is that of the transform, per cell. Any is sound; that of the saddle is accurate.
    """

    laws: tuple[tuple[Array, int], ...]
    tilt: float

    def _log_moment(self, tilt: float) -> float:
        """Return log E e^{tilt · sum}, rounded up."""
        total = 0.0
        for masses, count in self.laws:
            with np.errstate(divide="ignore"):
                logs = np.log(masses) + tilt * np.arange(masses.size)
            total += count * (float(logsumexp(logs)) + self._relative(masses, tilt))
        return total

    @staticmethod
    def _relative(masses: Array, tilt: float) -> float:
        return UNIT_ROUNDOFF * (64.0 + 8.0 * abs(tilt) * masses.size)

    @cached_property
    def _tilted(self) -> tuple[tuple[Array, int, float], ...]:
        """The tilted laws, their counts, and the logarithms of what they are divided by."""
        result = []
        for masses, count in self.laws:
            exponents = self.tilt * np.arange(masses.size)
            with np.errstate(divide="ignore"):
                log_total = float(logsumexp(np.log(masses) + exponents))
                law = np.exp(np.log(masses) + exponents - log_total)
            result.append((law, count, log_total))
        return tuple(result)

    def _moment(self, power: int) -> float:
        places = [np.arange(law.size) for law, _, _ in self._tilted]
        means = [float(law @ at) for (law, _, _), at in zip(self._tilted, places, strict=True)]
        if power == 1:
            return sum(
                count * mean for (_, count, _), mean in zip(self._tilted, means, strict=True)
            )
        return sum(
            count * float(law @ (at - mean) ** 2)
            for (law, count, _), at, mean in zip(self._tilted, places, means, strict=True)
        )

    @cached_property
    def mean(self) -> float:
        """The mean of the tilted sum, in cells."""
        return self._moment(1)

    @cached_property
    def variance(self) -> float:
        """The variance of the tilted sum, in squared cells."""
        return self._moment(2)

    @cached_property
    def _window(self) -> tuple[int, int, float]:
        """The ends of a window of the tilted sum, and a bound of the mass outside."""
        at, spread = self._log_moment(self.tilt), math.sqrt(self.variance) + 1e-3
        further = [2.0 ** (place / 2) / spread for place in range(-4, 12)]
        lows = [(self._log_moment(self.tilt - a) - at - _LOG_OUTSIDE) / -a for a in further]
        highs = [(self._log_moment(self.tilt + a) - at - _LOG_OUTSIDE) / a for a in further]
        # The logarithm of a moment is subtracted from another.
        most = self.tilt + further[-1]
        error = 2 * sum(count * self._relative(masses, most) for masses, count in self.laws)
        outside = 2 * math.exp(_LOG_OUTSIDE + error)
        return math.floor(max(lows)), math.ceil(min(highs)), outside

    @property
    def low(self) -> int:
        """The least sum of the window."""
        return self._window[0]

    @property
    def high(self) -> int:
        """The largest sum of the window."""
        return self._window[1]

    def log_tails(self, thresholds: NDArray[np.int64], *, upper: bool) -> Array:
        """Return bounds of log Pr(sum >= threshold) for thresholds in the window, shape (n,)."""
        low, high, outside = self._window
        size = int(fft.next_fast_len(high - low + 1, real=True))
        if size > MAX_POINTS:
            return np.full(thresholds.size, 0.0 if upper else -math.inf)
        logs: NDArray[np.complex128] = np.zeros(size // 2 + 1, dtype=np.complex128)
        transform, growth, releases, relative = 0.0, 0.0, 0, 0.0
        for (law, count, log_total), (masses, _) in zip(self._tilted, self.laws, strict=True):
            wrapped = folded(law, size)
            with np.errstate(divide="ignore", invalid="ignore"):
                logs += count * np.log(fft.rfft(wrapped))
            one = transform_error(wrapped, law.size)
            transform += count * one
            growth += count * one * math.sqrt(size)
            releases += count
            relative += count * (self._relative(masses, self.tilt) + UNIT_ROUNDOFF * abs(log_total))
        spectrum = np.where(np.isfinite(logs), np.exp(logs), 0.0)
        sums = np.roll(fft.irfft(spectrum, size), -(low % size))
        transform *= math.exp(min(700.0, growth))
        power = UNIT_ROUNDOFF * (64 + 16 * releases) + transform_rounding(size)
        error = transform + 2 * power * (norm(sums) + transform)
        decay = math.exp(-self.tilt)
        from scipy.signal import lfilter  # takes long too

        weighted = lfilter([1.0], [1.0, -decay], np.maximum(sums, 0.0)[::-1])[::-1]
        reach = min(math.sqrt(size), 1 / math.sqrt(-math.expm1(-2 * self.tilt) + 1e-300))
        error = error * reach * (1 + ROUNDING) + outside
        values = weighted[thresholds - low] * (1 + (ROUNDING if upper else -ROUNDING))
        values = np.maximum(values + (error if upper else -error), 1e-300 if upper else 0.0)
        base = sum(count * log_total for _, count, log_total in self._tilted)
        slack = relative + UNIT_ROUNDOFF * 8 * (abs(base) + self.tilt * np.abs(thresholds))
        with np.errstate(divide="ignore"):
            logs_of = np.log(values)
        return np.asarray(
            logs_of + base - self.tilt * thresholds + (slack if upper else -slack) + 0.0
        )
