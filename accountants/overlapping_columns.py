"""Upper bounds of a whole run that may draw a record in every step, by products of its steps.

Let X_t be the product of the outputs with the column of step t, over the variance of the noise, and
Λ(X) = Π_t ℓ(X_t) the likelihood ratio that independent noise would give. The likelihood ratio L of
the run is at most Λ, and at least Λ e^{-Σ h r(X_t)²/2}, r the mean number of draws given X_t. With
g the variance of X_t, h what its covariances with all others add up to, and p = 1 + h/g,

    E Π_t f(X_t)  <=  Π_t (E f(X_t)^p)^{1/p}

for every f >= 0 (a Gaussian Hölder inequality). It is used for powers of Λ where no X_t is above a
limit, and the probability that some X_t is above it is conceded: without it few large losses,
which are much rarer than δ, decide the moments.

>>> run = events.OverlappingColumns(
...     own=1.0, others=2.0, largest_other=0.5, draws=1, sampling_probability=0.001, steps=1000,
...     noise_multiplier=1.0,
... )
>>> round(OverlappingColumnsCurve(run).epsilon(1e-6).upper, 2)
0.65

Reference: docs/theorems/correlated-noise.md, Theorem 23; Chen, Dafnis and Paouris, "Improved Hölder
and reverse Hölder inequalities for Gaussian random vectors", arXiv:1306.2410.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, erfcx, gammaln, log_ndtr, ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.log_normal_ratio import LogNormalRatio
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.rounding import Array
from affidavit.plan import events

_CELLS, _FARTHEST = 1 << 12, 16.0
"""Cells of half of the normal law, and its largest place in deviations."""
_LIMITS = np.linspace(1.0, 14.0, 66)
"""Limits of X_t, in deviations, beyond its mean with as many draws as are counted."""
_FARTHER_BELOW = 0.5
"""How much farther below zero the limit of a replaced record is."""
_ORDERS = np.geomspace(0.05, 3000.0, 90)
"""Orders of moments: λ - 1 for the record's presence, s for its absence."""
_LEAST_SHOWN, _MOST_SHOWN, _SHOWN_CELL = -3.0, 7.0, 0.4
"""Places, in deviations, between which what a release shows is told apart, and their distance."""
_CONCEDED = 1e-7, 1e-10, 1e-15, 1e-30
"""Probabilities of more crowded steps that are conceded."""
_SHARES = 0.5, 0.8, 0.95
"""Shares of δ for runs without crowded steps."""
_MAX_LOG_ODDS = 30.0
"""Logarithm of the odds, given what is shown of a draw, beyond which it counts as certain."""
_ROUNDING = 1e-11
"""Relative allowance for the rounding of the mean of a cell, of a sum and of a tail."""
_LOG_ROUNDING = 1e-13
"""Allowance for the rounding of log ℓ."""
_MAX_EXPONENT = 600.0
_LEAST_MOMENT = 1e-300
"""What a mean that is too small for a double counts as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moments:
    """Bounds log M, shape (orders, limits), and the probability that each limit concedes.

    log δ is at most ``constants`` + log M - ``orders`` ε, plus what is conceded.
    """

    orders: Array
    constants: Array
    logs: Array
    conceded: Array

    def epsilon(self, delta: float) -> float:
        """Return a bound of ε at ``delta``, or infinity."""
        left = delta - self.conceded
        logs = np.log(np.where(left > 0, left, 1.0))
        bounds = (self.constants + self.logs - logs) / self.orders
        return float(np.where(left > 0, bounds, math.inf).min())

    def delta(self, epsilon: float) -> float:
        """Return a bound of δ at ``epsilon``."""
        logs = self.constants + self.logs - self.orders * epsilon
        return float((np.exp(np.minimum(logs, 0.0)) + self.conceded).min())


@dataclass(frozen=True, slots=True)
class _Order:
    """One order of the hypotheses, bounded by ``all_runs``, or by the sum of ``parts``.

    The parts are runs without crowded steps, and those with some. Where the first hypothesis is a
    run without the record, so do ``ratios``, each but for a probability that is conceded.
    """

    all_runs: _Moments
    parts: tuple[_Moments, ...] = ()
    ratios: tuple[tuple[LogNormalRatio, float], ...] = ()

    def epsilon(self, delta: float) -> float:
        """Return a bound of ε at ``delta``, or infinity."""
        bounds = [self.all_runs.epsilon(delta)]
        if self.parts:
            without, crowded = self.parts
            bounds += [
                max(without.epsilon(share * delta), crowded.epsilon((1 - share) * delta))
                for share in _SHARES
            ]
        bounds += [
            ratio.epsilon(delta - conceded) for ratio, conceded in self.ratios if conceded < delta
        ]
        return min(bounds)

    def delta(self, epsilon: float) -> float:
        """Return a bound of δ at ``epsilon``."""
        whole = self.all_runs.delta(epsilon)
        bounds = [whole, sum(part.delta(epsilon) for part in self.parts) or whole]
        bounds += [ratio.delta(epsilon) + conceded for ratio, conceded in self.ratios]
        return min(bounds)


@dataclass(frozen=True, slots=True)
class OverlappingColumnsCurve:
    """Upper bounds of ``run`` in both orders."""

    run: events.OverlappingColumns

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` if no moment is bounded."""
        require_delta(delta)
        left = delta - self.run.conceded
        largest = max(order.epsilon(left) for order in self._both())
        if not math.isfinite(largest):
            raise OutOfReach("no moment of the run is bounded.", "Use another accountant.")
        return Bracket(lower=0.0, upper=max(0.0, largest * (1 + _ROUNDING)))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        largest = max(order.delta(epsilon) for order in self._both()) * (1 + _ROUNDING)
        return Bracket(lower=0.0, upper=min(1.0, largest + self.run.conceded))

    def _both(self) -> tuple[_Order, ...]:
        return tuple(_moments(self.run, moves) for moves in both_orders(self.run))


Edges = NDArray[np.integer]
"""Numbers of edges."""
Moves = tuple[tuple[float, float, float], ...]
"""Probabilities of steps, and how far a draw of the record and of what replaces it moves there."""


def both_orders(run: events.OverlappingColumns) -> tuple[Moves, ...]:
    """Return the moves of both orders of the hypotheses, or of one if they are alike."""
    swapped = tuple((chance, other, moved) for chance, moved, other in run.moves)
    return (run.moves,) if swapped == run.moves else (run.moves, swapped)


@lru_cache(maxsize=32)
def _moments(run: events.OverlappingColumns, moves: Moves) -> _Order:
    """Return the moments of a record against what replaces it, which move as ``moves`` says."""
    farthest, opposite = max(moved for _, moved, _ in moves), max(other for *_, other in moves)
    grid, steps = _Grid.of(run, moves), run.steps
    edges = grid.edges
    shifts = {times * moved * grid.deviation for _, moved, _ in moves for times in range(3)}
    limits = np.unique(np.searchsorted(edges, np.add.outer(_LIMITS, sorted(shifts)).ravel()))
    limits = limits[limits < len(edges)]
    # Without a limit above, the grid's end is one.
    highest = limits if farthest else np.full(len(limits), len(edges) - 1)
    lowest = np.zeros(len(limits), dtype=np.int64)
    passed = steps * _passed(run, grid.deviation, moves, edges[highest]) * (1 + 1e-9)
    if opposite:
        farther = _FARTHER_BELOW if farthest else 0.0
        lowest = np.searchsorted(edges, -edges[limits] - farther)
        chances = np.array([chance for chance, *_ in moves])
        passed += steps * np.where(lowest > 0, ndtr(edges[lowest]), 0.0) * chances[:, None]
    near, crowded = passed[0], passed[-1]
    ratios = () if farthest or run.shown else ratios_of_joining(run, moves)

    def moments(logs: Array, conceded: Array) -> _Moments:
        constants = _ORDERS * np.log(_ORDERS) - (_ORDERS + 1) * np.log(_ORDERS + 1)
        return _Moments(
            orders=_ORDERS[:, None], constants=constants[:, None], logs=logs, conceded=conceded
        )

    sums = grid.sums(grid.kinds, lowest, highest)
    if len(moves) == 1:
        return _Order(moments(steps * grid.log_of_step(sums), near), ratios=ratios)
    # Crowded steps are few, so that a lower limit of theirs concedes no more.
    lower = np.argmax(crowded <= near[:, None], axis=1)
    lower = np.where(crowded <= near, lower, np.arange(len(limits)))
    half = len(grid.kinds) // 2
    of_near = grid.sums(grid.kinds[:half], lowest, highest)
    of_crowded = grid.sums(grid.kinds[half:], lowest, highest)[:, lower]
    with np.errstate(invalid="ignore"):
        sums = sums[:, lower] + of_near - of_near[:, lower]
    of_step = grid.log_of_step(np.where(np.isnan(sums), math.inf, sums))
    conceded = near + crowded[lower]
    some = math.log(steps) + grid.log_of_step(of_crowded) + (steps - 1) * of_step
    return _Order(
        moments(steps * of_step, conceded),
        (moments(steps * grid.log_of_step(of_near), near), moments(some, conceded)),
        ratios,
    )


def ratios_of_joining(
    run: events.OverlappingColumns, moves: Moves
) -> tuple[tuple[LogNormalRatio, float], ...]:
    """Return what the likelihood ratio of what joins an empty run is above, by Jensen's inequality.

    More steps than are counted are crowded with the probability beside it.
    """
    mean, scale = run.draws * run.sampling_probability, run.noise_multiplier**-2 * (1 + 8e-16)
    near, far = moves[0][2], moves[-1][2]
    numbers = np.arange(run.steps + 1)
    more = bdtrc(numbers, run.steps, run.crowded) * (1 + 1e-9)
    result = []
    for conceded in _CONCEDED if 0 < run.crowded < 1 else (0.0,):
        crowded = int(np.argmax(more <= conceded))
        # Squares of moves, added up over the steps.
        squares = (near**2 * (run.steps - crowded) + far**2 * crowded) * (1 + 1e-9)
        spread = mean * (1 - run.sampling_probability) * squares * run.own * scale / 2
        variance = mean**2 * squares * (run.own + run.others) * scale
        result.append((LogNormalRatio(spread=spread, variance=variance), conceded))
    return tuple(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """A kind of step, with its ``chance``: what a draw moves in it, and how likely it is, is known.

    At the edges of a grid, ``ratios`` are log ℓ of the record, which rises, and ``others`` and
    ``drawn`` are log ℓ and r of what replaces it, which fall; ``h`` is its own.
    """

    chance: float
    h: float
    most: int
    ratios: Array
    others: Array
    drawn: Array

    def values(self, size: float) -> tuple[Array, Array]:
        """Return f at the left and right end of each cell, times the chance, shape (cells,)."""
        # Both factors of the other one are largest at an end of the cell, each at one of its own.
        shared = size * (self.h * self.drawn[:-1] ** 2 / 2 - self.others[1:])
        shared[0] += size * self.h * (self.most**2 - self.drawn[0] ** 2) / 2
        left, right = (
            self.chance * _exp(shared + (size + 1) * ratios)
            for ratios in (self.ratios[:-1], self.ratios[1:])
        )
        return left, right


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """Cells between ``edges``, in deviations of X_t, the first of which has no lower end.

    ``left`` and ``right`` are the masses of the cells as split between their two ends, so that the
    mean stays.
    """

    deviation: float
    p: float
    kinds: tuple[_Kind, ...]
    edges: Array
    left: Array
    right: Array

    @classmethod
    def of(cls, run: events.OverlappingColumns, moves: Moves) -> _Grid:
        scale = 1 / run.noise_multiplier**2 * (1 + 4e-16)
        g, h = run.own * scale, run.others * scale
        deviation = math.sqrt(g)
        farthest = _FARTHEST + 2 * deviation
        edges = np.linspace(-farthest, farthest, 2 * _CELLS + 1)
        kinds = []
        for chance, law, moved, other in kinds_of_steps(run, moves):
            ratios, _ = likelihood_ratios(moved * edges * deviation, law, moved**2 * g)
            others, drawn = likelihood_ratios(-other * edges * deviation, law, other**2 * g)
            kinds.append(
                _Kind(
                    chance=chance,
                    h=h * other**2,
                    most=len(law) - 1,
                    ratios=ratios,
                    others=others,
                    drawn=drawn,
                )
            )
        # Of a normal law both halves are alike.
        upper = edges[_CELLS:]
        mass = ndtr(-upper[:-1]) - ndtr(-upper[1:])
        density = np.exp(-np.square(upper) / 2) / math.sqrt(2 * math.pi)
        mean, width = density[:-1] - density[1:], np.diff(upper)
        near = ((upper[1:] * mass - mean) / width).clip(0, None) + 1e-9 * mass
        far = ((mean - upper[:-1] * mass) / width).clip(0, None) + 1e-9 * mass
        left, right = np.append(far[::-1], near), np.append(near[::-1], far)
        left[0] = right[0] = ndtr(edges[1])
        # No mass is zero, whose product with an infinite power would not be a number.
        left, right = np.maximum(left, 1e-300), np.maximum(right, 1e-300)
        return cls(
            deviation=deviation,
            p=1 + h / g,
            kinds=tuple(kinds),
            edges=edges,
            left=left,
            right=right,
        )

    def sums(self, kinds: tuple[_Kind, ...], lowest: Edges, highest: Edges) -> Array:
        """Return upper bounds of the mean of f(X)^p over ``kinds``, from ``lowest`` to ``highest``.

        Both are edges; the shape is (orders, limits).
        """
        middle = len(self.edges) // 2
        result = np.zeros((len(_ORDERS), len(highest)))
        for row, size in enumerate(_ORDERS):
            left, right = map(sum, zip(*(kind.values(float(size)) for kind in kinds), strict=True))
            # A power of ℓ is convex, so are sums and powers of these, which are below their chords.
            with np.errstate(divide="ignore"):
                left, right = self.p * np.log(left), self.p * np.log(right)
            means = _exp(left) * self.left + _exp(right) * self.right
            above, below = np.cumsum(means[middle:]), np.cumsum(means[:middle][::-1])
            result[row] = below[middle - 1 - lowest] + above[highest - 1 - middle]
        return result

    def log_of_step(self, sums: Array) -> Array:
        """Return the logarithms of the p-th roots of ``sums``, rounded up; of the same shape."""
        rounding = 2 * _ROUNDING / self.p + (_ORDERS + 1) * _LOG_ROUNDING
        return np.asarray(np.log(np.maximum(sums, _LEAST_MOMENT)) / self.p + rounding[:, None])


def kinds_of_steps(
    run: events.OverlappingColumns, moves: Moves
) -> list[tuple[float, Array, float, float]]:
    """Return chances of kinds of steps, laws of the draws, shape (draws + 1,), and both moves."""
    laws = [(1.0, draws_of_a_step(run))]
    if run.shown:
        laws = [(chance, np.array([1 - rate, rate])) for chance, rate in _shown_rates(run)]
    return [
        (chance * share, law, moved, other) for chance, moved, other in moves for share, law in laws
    ]


def _shown_rates(run: events.OverlappingColumns) -> list[tuple[float, float]]:
    """Return chances of the probabilities of a draw, given what a normal release shows of it.

    The law is spread to fewer probabilities with the same mean, which shows no less.
    """
    q, distance = run.sampling_probability, math.sqrt(run.shown)
    places = np.arange(_LEAST_SHOWN, distance + _MOST_SHOWN, _SHOWN_CELL)
    exponents = math.log(q / (1 - q)) + distance * places - run.shown / 2
    uncertain = np.abs(exponents) < _MAX_LOG_ODDS
    places, odds = places[uncertain], np.exp(exponents[uncertain])
    rates = np.concatenate([[0.0], odds / (1 + odds), [1.0]])
    ends = np.concatenate([[-math.inf], places, [math.inf]])
    absent, drawn = (1 - q) * _masses(ends), q * _masses(ends - distance)
    chances = np.zeros(len(rates))
    share = ((drawn * (1 - rates[:-1]) - absent * rates[:-1]) / np.diff(rates)).clip(0, None)
    chances[1:] += share
    chances[:-1] += (absent + drawn - share).clip(0, None)
    return [
        (float(chance) * (1 + 1e-12) + 1e-18, float(rate))
        for chance, rate in zip(chances, rates, strict=True)
    ]


def _masses(ends: Array) -> Array:
    """Return the probabilities of a standard normal variable between ``ends``, shape (n - 1,)."""
    lower, upper = np.diff(ndtr(ends)), -np.diff(ndtr(-ends))
    # Tails keep their digits.
    return np.where(ends[:-1] > 0, upper, lower)


def _exp(exponents: Array) -> Array:
    """Return the exponential, infinite where it is very large."""
    result = np.exp(np.minimum(exponents, _MAX_EXPONENT))
    return np.where(exponents < _MAX_EXPONENT, result, math.inf)


def draws_of_a_step(run: events.OverlappingColumns) -> Array:
    """Return P(K = k) of the draws of one step, shape (draws + 1,)."""
    number, q = np.arange(run.draws + 1), run.sampling_probability
    ways = gammaln(run.draws + 1.0) - gammaln(number + 1.0) - gammaln(run.draws - number + 1.0)
    return np.asarray(np.exp(ways + number * math.log(q) + (run.draws - number) * math.log1p(-q)))


def likelihood_ratios(places: Array, law: Array, g: float) -> tuple[Array, Array]:
    """Return log ℓ(x) and r(x) at each of ``places``, shape (n,)."""
    number = np.arange(1, len(law))[:, None]
    exponents = number * places - number**2 * g / 2
    # Beyond the range of a double all weights are divided by the largest.
    scales = np.maximum(exponents.max(axis=0) - _MAX_EXPONENT, 0.0)
    weights = law[1:, None] * np.exp(exponents - scales)
    never = law[0] * np.exp(-scales)
    excess = (law[1:, None] * np.expm1(np.minimum(exponents, _MAX_EXPONENT))).sum(axis=0)
    ratios = np.where(scales > 0, scales + np.log(never + weights.sum(axis=0)), np.log1p(excess))
    return ratios, (number * weights).sum(axis=0) / (never + weights.sum(axis=0))


def _passed(run: events.OverlappingColumns, deviation: float, moves: Moves, limits: Array) -> Array:
    """Return bounds of P(X_t > x) in a step of each of ``moves``, with the record.

    The shape is (moves, limits), with ``limits`` in deviations.
    """
    law = draws_of_a_step(run)
    number = np.arange(len(law))[:, None]
    scale = run.noise_multiplier**-2 * (1 + 8e-16)
    result = np.zeros((len(moves), len(limits)))
    for row, (chance, moved, _) in enumerate(moves):
        places = limits - moved * number * deviation
        # The logarithm of a normal tail is concave: at most its tangent.
        tilts = math.sqrt(2 / math.pi) / erfcx(places / math.sqrt(2)) / deviation
        logs = log_ndtr(-places)
        if run.others > 0:
            mean, tilts = run.draws * run.sampling_probability, tilts * run.largest_other * scale
            others = np.full_like(tilts, -math.inf)
            for share, far, _ in moves:
                exponents = mean * np.expm1(np.minimum(tilts * far, _MAX_EXPONENT))
                others = np.logaddexp(others, math.log(share) + exponents)
            logs = logs + others * (run.others / run.largest_other) * (1 + 1e-12) + 1e-12
        result[row] = chance * (law @ np.exp(np.minimum(logs, 0.0)))
    return result
