"""Upper bounds of a whole run with the noise of a tree, by the nodes of its steps.

With the noise of a tree the products X_t of the outputs with the columns of the steps are sums of
one normal variable for each node above a step, and the likelihood ratio of the run is at most
Π_t ℓ(X_t), that of independent noise (Theorem 23). Given what the nodes above add up to, the two
halves of a node are independent: the mean of a power of the product is a recursion over the levels,

    φ_l(x) = 2^-l log E e^{2^l φ_{l-1}(x + Z)} ,      φ_{-1} = α log ℓ ,

where beyond a limit z_l the mean is that of the chord before. The probability that a node and those
above it add up to more than its limit adds to δ. In the other order L is at least its geometric
mean, which is log-normal.

>>> run = events.OverlappingColumns(
...     own=8.0, others=494.0, largest_other=7.0, draws=1, sampling_probability=0.005, steps=200,
...     noise_multiplier=8.0, nodes=(1, 2, 4, 8, 16, 32, 64, 128),
... )
>>> round(ColumnsOfNodesCurve(run).epsilon(1e-6).upper, 2)
0.98

Reference: docs/theorems/correlated-noise.md, Theorem 29.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import bdtrc, erfcx, log_ndtr, logsumexp, ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.log_normal_ratio import LogNormalRatio
from affidavit.accountants.overlapping_columns import (
    Moves,
    both_orders,
    kinds_of_steps,
    likelihood_ratios,
)
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.rounding import Array
from affidavit.plan import events

_ORDERS = 1 + np.geomspace(0.5, 120.0, 30)
"""Orders α of the moments of the likelihood ratio."""
_CELLS = 4
"""Cells of a grid in one deviation of a node."""
_MAX_CELLS = 1500
"""Cells above zero beyond which no moment is computed."""
_LOWEST = 10.0
"""Deviations of the nodes that are left, below zero, where a grid begins."""
_TANGENTS = np.linspace(0.0, 14.0, 141)
"""Places, in deviations, of the tangents that bound the tail of a node."""
_CONCEDED = 0.1
"""The part of δ that is conceded for sums of nodes above their limits, at most."""
_ROUNDS = 3
"""Limits that are tried for one ε."""
_ROUNDING = 1e-11
"""Relative allowance for the rounding of a mean over one level, and of a sum."""
_MAX_EXPONENT = 600.0
_LEAST = 1e-300


@dataclass(frozen=True, slots=True)
class ColumnsOfNodesCurve:
    """Upper bounds of ``run``, which has ``nodes``, in both orders."""

    run: events.OverlappingColumns

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` if no moment is bounded."""
        require_delta(delta)
        left = delta - self.run.conceded
        if left <= 0:
            raise OutOfReach("delta is below what is conceded.", "Use another accountant.")
        conceded = _part(left)
        largest = max(one.epsilon(left - conceded) for one in _both(self.run, conceded))
        if not math.isfinite(largest):
            raise OutOfReach("no moment of the run is bounded.", "Use another accountant.")
        return Bracket(lower=0.0, upper=max(0.0, largest * (1 + _ROUNDING)))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        least, conceded = 1.0, _part(1e-5)
        for _ in range(_ROUNDS):
            bound = max(one.delta(epsilon) for one in _both(self.run, conceded))
            least = min(least, bound + conceded)
            conceded = _part(max(bound, 1e-25))
        return Bracket(lower=0.0, upper=min(1.0, least * (1 + 1e-9) + self.run.conceded))


def _part(delta: float) -> float:
    """Return what is conceded of ``delta``, of which many have the same."""
    return 2.0 ** math.floor(math.log2(_CONCEDED * delta))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moments:
    """One order of the hypotheses: of the record, against what replaces it.

    ``logs`` are bounds of log E L^α without what is conceded, at ``_ORDERS``. The geometric mean of
    the other likelihood ratio is log-normal; the logarithm of its mean is at least -``spread``, and
    its ``variance`` is a bound. There are no ``logs`` where the record does not move the run.
    """

    logs: Array | None
    spread: float
    variance: float

    def epsilon(self, delta: float) -> float:
        """Return a bound of ε at ``delta``."""
        if self.logs is None:
            return self._ratio.epsilon(delta)
        sizes, logs = self._powers()
        return float(((logs - math.log(delta)) / sizes).min())

    def delta(self, epsilon: float) -> float:
        """Return a bound of δ at ``epsilon``."""
        if self.logs is None:
            return self._ratio.delta(epsilon)
        sizes, logs = self._powers()
        return float(np.exp(np.minimum((logs - sizes * epsilon).min(), 0.0)))

    @property
    def _ratio(self) -> LogNormalRatio:
        return LogNormalRatio(spread=self.spread, variance=self.variance)

    def _powers(self) -> tuple[Array, Array]:
        """Return s and bounds of log κ(s) E L^{s+1} L'^{-s}."""
        assert self.logs is not None
        orders = _ORDERS
        if self.variance == self.spread == 0:
            sizes, logs = orders - 1, self.logs
        else:
            # By Hölder's inequality, with the order of L a part of the moment's.
            parts = np.linspace(0.05, 0.95, 37)[:, None]
            sizes = parts * orders - 1
            powers = np.maximum(sizes, 1e-3) / (1 - parts)
            others = powers * (self.spread + self.variance / 2) + powers**2 * self.variance / 2
            logs = np.where(sizes > 1e-3, parts * self.logs + (1 - parts) * others, math.inf)
            sizes = np.maximum(sizes, 1e-3)
        constants = sizes * np.log(sizes) - (sizes + 1) * np.log(sizes + 1)
        return sizes, constants + logs


@lru_cache(maxsize=32)
def _both(run: events.OverlappingColumns, conceded: float) -> tuple[_Moments, ...]:
    """Return both orders, with this probability of sums above limits and of more crowded steps."""
    part = conceded / (len(run.nodes) + 1)
    crowded = int(np.argmax(bdtrc(np.arange(run.steps + 1), run.steps, run.crowded) <= part))
    mean, scale = run.draws * run.sampling_probability, run.noise_multiplier**-2 * (1 + 8e-16)
    result = []
    for moves in both_orders(run):
        near, far = moves[0][2], moves[-1][2]
        # Squares of moves, added up over the steps.
        squares = near**2 * (run.steps - crowded) + far**2 * crowded
        spread = mean * (1 - run.sampling_probability) * squares * run.own * scale / 2
        variance = mean**2 * squares * sum(run.nodes) * scale
        logs = log_moments(run, moves, part) if any(moved for _, moved, _ in moves) else None
        rounding = 1 + 1e-9
        result.append(_Moments(logs=logs, spread=spread * rounding, variance=variance * rounding))
    return tuple(result)


def log_moments(run: events.OverlappingColumns, moves: Moves, conceded: float) -> Array:
    """Return bounds of log E L^α [no sum is above its limit] at ``_ORDERS``, shape (orders,).

    The sums of each level pass their limit with at most the probability ``conceded``.
    """
    g, levels = run.noise_multiplier**-2 * (1 + 8e-16), len(run.nodes)
    deviation = math.sqrt(g)
    limits = [_limit(run, moves, level, g, conceded) for level in range(levels)]
    if not _CELLS * max(limits) <= _MAX_CELLS * deviation:
        return np.full(len(_ORDERS), math.inf)
    grids = [_grid(limit, levels - level, deviation) for level, limit in enumerate(limits)]
    places = grids[0]
    orders = _ORDERS[:, None]
    logs = np.full((len(orders), len(places)), -math.inf)
    for chance, law, moved, _ in kinds_of_steps(run, moves):
        ratios, _ = likelihood_ratios(moved * places, law, moved**2 * levels * g)
        logs = np.logaddexp(logs, math.log(chance) + orders * ratios)
    logs += orders * 1e-13
    for size, following in zip(run.nodes, [*grids[1:], np.zeros(1)], strict=True):
        with np.errstate(divide="ignore"):
            weights = np.log(_weights(following, places, deviation))
        logs = np.array([_log_means(size * row, weights) / size for row in logs])
        logs += _ROUNDING / size + np.abs(logs) * 2.0**-48
        places = following
    return np.asarray(run.steps * logs[:, -1])


def _grid(limit: float, nodes: int, deviation: float) -> Array:
    """Return places of the sum of so many ``nodes`` up to its ``limit``."""
    lowest = -_LOWEST * math.sqrt(nodes) * deviation
    return np.linspace(lowest, limit, math.ceil(_CELLS * (limit - lowest) / deviation) + 1)


def _limit(
    run: events.OverlappingColumns, moves: Moves, level: int, g: float, conceded: float
) -> float:
    """Return a limit for the sums of a node of ``level`` and all nodes above it.

    With at most the probability ``conceded`` one of the sums passes it. With the record a node has
    the mean g times the moves of the draws of its steps.
    """
    path = run.nodes[level:]
    deviation = math.sqrt(g * len(path))
    # The logarithm of a normal tail is concave, and below its tangents.
    slopes = math.sqrt(2 / math.pi) / erfcx(_TANGENTS / math.sqrt(2)) / deviation
    logs = log_ndtr(-_TANGENTS) + slopes * deviation * _TANGENTS
    # So many steps are below this many nodes of the path.
    for steps, below in zip(np.diff(path, prepend=0), range(len(path), 0, -1), strict=True):
        of_step = np.full(len(slopes), -math.inf)
        for chance, moved, _ in moves:
            drawn = np.log1p(run.sampling_probability * _expm1(below * moved * slopes * g))
            of_step = np.logaddexp(of_step, math.log(chance) + run.draws * drawn)
        logs = logs + steps * of_step
    # A restarted tree may leave nodes short.
    number = 2 * -(-run.steps // path[0]) + 1
    return float(((logs - math.log(conceded / number)) / slopes).min() * (1 + 1e-12))


def _expm1(exponents: Array) -> Array:
    """Return e^x - 1 of ``exponents``, infinite where it is very large; shape (n,)."""
    result = np.expm1(np.minimum(exponents, _MAX_EXPONENT))
    return np.where(exponents < _MAX_EXPONENT, result, math.inf)


def _weights(starts: Array, places: Array, deviation: float) -> Array:
    """Return weights of chords between ``places`` for x + Z, where values rise and are convex.

    Below the first place a value counts as the one there. Beyond the last one, the limit, the last
    chord goes on, so that values stay convex: the last weight is that of its rise in a cell. The
    shape is (starts, places + 1).
    """
    ends = (places - starts[:, None]) / deviation
    below, above = ndtr(ends), ndtr(-ends)
    mass = np.where(ends[:, :-1] > 0, above[:, :-1] - above[:, 1:], below[:, 1:] - below[:, :-1])
    density = np.exp(-np.square(ends) / 2) / math.sqrt(2 * math.pi)
    right = (density[:, :-1] - density[:, 1:] - ends[:, :-1] * mass) / np.diff(ends, axis=1)
    rounding = _ROUNDING * mass + 1e-14 * density[:, :-1] + _LEAST
    right = right.clip(0, mass) + rounding
    left = mass - right.clip(None, mass) + 2 * rounding
    result = np.zeros((len(starts), len(places) + 1))
    result[:, :-2] += left
    result[:, 1:-1] += right
    result[:, 0] += below[:, 0]
    result[:, -2] += above[:, -1]
    excess = density[:, -1] - ends[:, -1] * above[:, -1]
    result[:, -1] = (excess.clip(0, None) + 1e-14 * density[:, -1]) / (ends[:, -1] - ends[:, -2])
    return result


def _log_means(logs: Array, weights: Array) -> Array:
    """Return log of the means of values with ``logs``, shape (places,); the shape is (starts,)."""
    rise = logs[-1] + math.log(_ROUNDING - math.expm1(min(0.0, logs[-2] - logs[-1])))
    return np.asarray(logsumexp(np.append(logs, rise) + weights, axis=1))
