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
from scipy.special import erfcx, gammaln, log_ndtr, logsumexp, ndtr

from affidavit.accountants.bracket import Bracket
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


@dataclass(frozen=True, slots=True)
class OverlappingColumnsCurve:
    """Upper bounds of ``run`` in both orders."""

    run: events.OverlappingColumns

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` if no moment is bounded."""
        require_delta(delta)
        largest = 0.0
        for moments in self._both():
            left = delta - self.run.conceded - moments.conceded
            logs = np.log(np.where(left > 0, left, 1.0))
            bounds = (moments.constants + moments.logs - logs) / moments.orders
            largest = max(largest, float(np.where(left > 0, bounds, math.inf).min()))
        if not math.isfinite(largest):
            raise OutOfReach("no moment of the run is bounded.", "Use another accountant.")
        return Bracket(lower=0.0, upper=largest * (1 + _ROUNDING))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        largest = 0.0
        for moments in self._both():
            logs = moments.constants + moments.logs - moments.orders * epsilon
            bounds = np.exp(np.minimum(logs, 0.0)) + moments.conceded
            largest = max(largest, float(bounds.min()) * (1 + _ROUNDING))
        return Bracket(lower=0.0, upper=min(1.0, largest + self.run.conceded))

    def _both(self) -> tuple[_Moments, ...]:
        return tuple(_moments(self.run, moves) for moves in both_orders(self.run))


Moves = tuple[tuple[float, float, float], ...]
"""Probabilities of steps, and how far a draw of the record and of what replaces it moves there."""


def both_orders(run: events.OverlappingColumns) -> tuple[Moves, ...]:
    """Return the moves of both orders of the hypotheses, or of one if they are alike."""
    swapped = tuple((chance, other, moved) for chance, moved, other in run.moves)
    return (run.moves,) if swapped == run.moves else (run.moves, swapped)


@lru_cache(maxsize=32)
def _moments(run: events.OverlappingColumns, moves: Moves) -> _Moments:
    """Return the moments of a record against what replaces it, which move as ``moves`` says."""
    chances = [chance for chance, *_ in moves]
    farthest, opposite = max(moved for _, moved, _ in moves), max(other for *_, other in moves)
    grids = [_Grid.of(run, moved, other) for _, moved, other in moves]
    grid, orders = grids[0], _ORDERS
    edges = grid.edges
    shifts = {times * moved * grid.deviation for _, moved, _ in moves for times in range(3)}
    limits = np.unique(np.searchsorted(edges, np.add.outer(_LIMITS, sorted(shifts)).ravel()))
    limits = limits[limits < len(edges)]
    # Without a limit above, the grid's end is one.
    highest = limits if farthest else np.full(len(limits), len(edges) - 1)
    conceded = _passed(run, grid, moves, edges[highest])
    lowest = np.zeros(len(limits), dtype=np.int64)
    if opposite:
        farther = _FARTHER_BELOW if farthest else 0.0
        lowest = np.searchsorted(edges, -edges[limits] - farther)
        conceded = conceded + np.where(lowest > 0, ndtr(edges[lowest]), 0.0)
    logs = np.zeros((len(orders), len(limits)))
    middle = len(edges) // 2
    for row, size in enumerate(orders):
        sums = np.zeros((len(grids), len(limits)))
        for place, each in enumerate(grids):
            means = each.means(float(size))
            above, below = np.cumsum(means[middle:]), np.cumsum(means[:middle][::-1])
            sums[place] = below[middle - 1 - lowest] + above[highest - 1 - middle]
        rounding = 2 * _ROUNDING / grid.p + (size + 1) * _LOG_ROUNDING
        powers = np.log(np.maximum(sums, _LEAST_MOMENT)) / grid.p
        logs[row] = run.steps * (logsumexp(powers.T, axis=1, b=chances) + rounding)
    constants = orders * np.log(orders) - (orders + 1) * np.log(orders + 1)
    return _Moments(
        orders=orders[:, None],
        constants=constants[:, None],
        logs=logs,
        conceded=run.steps * conceded * (1 + 1e-9),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """Cells between ``edges``, in deviations of X_t, the first of which has no lower end.

    At the edges, ``ratios`` are log ℓ of the record, which rises, and ``others`` and ``drawn`` are
    log ℓ and r of the other one, which fall; ``h`` is its own. ``left`` and ``right`` are the
    masses of the cells as split between their two ends, so that the mean stays.
    """

    g: float
    h: float
    p: float
    law: Array
    edges: Array
    ratios: Array
    others: Array
    drawn: Array
    left: Array
    right: Array

    @property
    def deviation(self) -> float:
        """The standard deviation of X_t."""
        return math.sqrt(self.g)

    @classmethod
    def of(cls, run: events.OverlappingColumns, moved: float, other: float) -> _Grid:
        scale = 1 / run.noise_multiplier**2 * (1 + 4e-16)
        g, h, law = run.own * scale, run.others * scale, draws_of_a_step(run)
        deviation = math.sqrt(g)
        farthest = _FARTHEST + 2 * deviation
        edges = np.linspace(-farthest, farthest, 2 * _CELLS + 1)
        ratios, _ = likelihood_ratios(moved * edges * deviation, law, moved**2 * g)
        others, drawn = likelihood_ratios(-other * edges * deviation, law, other**2 * g)
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
            g=g,
            h=h * other**2,
            p=1 + h / g,
            law=law,
            edges=edges,
            ratios=ratios,
            others=others,
            drawn=drawn,
            left=left,
            right=right,
        )

    def means(self, size: float) -> Array:
        """Return upper bounds of the mean of f(X)^p in each cell, shape (cells,)."""
        # Both factors of the other one are largest at an end of the cell, each at one of its own.
        shared = size * (self.h * self.drawn[:-1] ** 2 / 2 - self.others[1:])
        shared[0] += size * self.h * ((len(self.law) - 1) ** 2 - self.drawn[0] ** 2) / 2
        # A power of ℓ is convex, and at most its chord.
        ends = (self.ratios[:-1], self.left), (self.ratios[1:], self.right)
        return np.asarray(
            sum(_exp(self.p * (shared + (size + 1) * ratio)) * mass for ratio, mass in ends)
        )


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


def _passed(run: events.OverlappingColumns, grid: _Grid, moves: Moves, limits: Array) -> Array:
    """Return a bound of P(X_t > x) with the record, for each of ``limits``, in deviations."""
    number = np.arange(len(grid.law))[:, None]
    scale = run.noise_multiplier**-2 * (1 + 8e-16)
    result = np.zeros(len(limits))
    for chance, moved, _ in moves:
        places = limits - moved * number * grid.deviation
        # The logarithm of a normal tail is concave: at most its tangent.
        tilts = math.sqrt(2 / math.pi) / erfcx(places / math.sqrt(2)) / grid.deviation
        logs = log_ndtr(-places)
        if run.others > 0:
            mean, tilts = run.draws * run.sampling_probability, tilts * run.largest_other * scale
            others = np.full_like(tilts, -math.inf)
            for share, far, _ in moves:
                exponents = mean * np.expm1(np.minimum(tilts * far, _MAX_EXPONENT))
                others = np.logaddexp(others, math.log(share) + exponents)
            logs = logs + others * (run.others / run.largest_other) * (1 + 1e-12) + 1e-12
        result += chance * (grid.law @ np.exp(np.minimum(logs, 0.0)))
    return result
