"""How far a randomly drawn record moves a run with the noise of a tree.

A record with n_v participations in node v moves the run by s, s² = Σ n_v² over the nodes that are
released: left children. With

    M_v(n) = E e^{θ Σ n_u²} [n_v = n]     over the released nodes u below v,

that of a node is the convolution of e^{θn²} M(n) of its left half and of M(n) of its right one. The
law of s follows by Markov's inequality; of few participations it is computed as it is. Where
records wait for b - 1 steps (``b_min_sep``), small nodes are told apart by how long a record waits
before and after them, and large ones are made of blocks at whose start it waits no longer.

>>> mixture = tree_mixture(Tree.of(steps=512), turn=1, probability=0.01)
>>> round(mixture.weights[0], 4)
0.0058

Reference: docs/theorems/correlated-noise.md, Theorem 31.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from scipy.special import bdtrc

from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.participation_mixture import (
    CONCEDED_PROBABILITY,
    PROBABILITY_ERROR,
    ParticipationMixture,
    round_to_nodes,
)
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.mechanisms.strategies.tree import Tree

_ORDERS = 64
"""Number of orders θ, besides zero."""
_RANGE = 0.05, 30.0
"""The least order, over about E s², and the largest one, over the number of levels."""
_CONCEDED = CONCEDED_PROBABILITY / 8
"""The probability of more participations of nodes than are counted."""
_MAX_NUMBERS = 512
"""Numbers of participations that are told apart; of more, even ones stand for odd ones."""
_EXACT = (2, 12), (64, 6)
"""The most groups, or largest nodes of all groups, and how many participations have their law."""
_MAX_WORK = 4_000_000_000
"""Multiplications up to which waits are told apart in a whole run, and those of one mixture."""
_DOUBLINGS = 3
"""Levels above the nodes of about b steps for which they are in any run."""


@lru_cache(maxsize=16)
def tree_mixture(
    tree: Tree, *, turn: int, probability: float, records: int = 1, separation: int = 1
) -> ParticipationMixture:
    """Return the distribution of s, in clip norms.

    Each of a unit's ``records`` is drawn with ``probability`` in each of the steps g, g + b, ...,
    b = ``turn``, for some g, independently; with a ``separation`` above 1, in each step, but not in
    the ``separation`` - 1 steps after it was. Raises ``TooLarge`` for runs that take too much work.
    """
    draws = -(-tree.steps // turn) * records
    mean, levels = draws * probability, tree.period.bit_length()
    typical = mean * (levels + 2 * mean)
    orders = np.geomspace(_RANGE[0] / typical, max(_RANGE[1] / levels, 2 / typical), _ORDERS)
    orders = np.append(0.0, orders)
    exact: list[Array] = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if separation == 1:
            groups = _in_groups(tree, turn, probability, records, orders)
            # Of each number, the worst group.
            moments = groups.values.max(axis=1)
            exact = _tails_of_few(tree, turn, probability, records) if groups.unit == 1 else []
        else:
            moments = _apart(tree, separation, probability, records, orders)
        logs = np.log(moments) + tree.steps * 2.0**-44
    # An order whose moments do not fit into doubles says nothing.
    logs = np.where(np.isnan(logs), math.inf, logs)

    def tails(distances: Array) -> Array:
        result = np.full(len(distances), _CONCEDED)
        tilts = np.multiply.outer(np.square(distances) * (1 - PROBABILITY_ERROR), orders)
        for number, of_number in enumerate(logs.T):
            if number < len(exact):
                places = np.minimum(tilts[:, -1] / orders[-1], len(exact[number]) - 1)
                result += exact[number][places.astype(np.int64)]
            else:
                result += np.exp((of_number - tilts).min(axis=1).clip(None, 0.0))
        return np.minimum.accumulate(np.minimum(result * (1 + PROBABILITY_ERROR), 1.0))

    drawn = min(1.0, -math.expm1(draws * math.log1p(-probability)) * (1 + PROBABILITY_ERROR))
    together = np.logaddexp.reduce(logs[1:], axis=1)
    farthest = math.sqrt(float(((together - math.log(_CONCEDED)) / orders[1:]).min()))
    return round_to_nodes(tails, farthest, drawn, 1 + 2.0**-50)


@dataclass(frozen=True, slots=True)
class _Moments:
    """E e^{θ Σ n_u²} [n = k ``unit``] in steps one after the other.

    ``values`` have shape (orders, turn, numbers). Numbers are rounded up.
    """

    values: Array
    unit: int = 1

    def as_node(self, orders: Array) -> _Moments:
        """Return the moments with the node over all of these steps."""
        squares = np.square(self.unit * np.arange(self.values.shape[2], dtype=float))
        factors = np.exp(np.multiply.outer(orders, squares))
        return _Moments(self.values * factors[:, None, :], self.unit)

    def followed_by(self, other: _Moments, steps: int, most: int) -> _Moments:
        """Return the moments of these ``steps`` and the ``other`` ones, ``most`` in all."""
        unit = max(self.unit, other.unit)
        left, right = self._in_units(unit).values, other._in_units(unit).values
        # Step φ of a group is that many steps nearer to the start of the other ones.
        right = np.roll(right, steps, axis=1)
        size = left.shape[2] + right.shape[2] - 1
        if unit == 1:
            size = min(size, most + 1)
        result = np.zeros((*left.shape[:2], size))
        for number in range(min(left.shape[2], size)):
            shown = min(right.shape[2], size - number)
            result[:, :, number : number + shown] += left[:, :, number, None] * right[:, :, :shown]
        return _Moments(result, unit)._in_units(unit if size <= _MAX_NUMBERS else 2 * unit)

    def _in_units(self, unit: int) -> _Moments:
        if unit == self.unit:
            return self
        even, odd = self.values[:, :, ::2], self.values[:, :, 1::2]
        result = np.zeros((*self.values.shape[:2], 1 + odd.shape[2]))
        result[:, :, : even.shape[2]] = even
        result[:, :, 1:] += odd
        return _Moments(result, 2 * self.unit)._in_units(unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """The largest numbers of ``draws`` that a node of the run may have, but for ``_CONCEDED``."""

    steps: int
    turn: int
    probability: float
    records: int

    def at(self, steps: int) -> int:
        """Return a number that no range of so many ``steps`` has more of."""
        draws = self.records * -(-steps // self.turn)
        low, high = -1, draws
        while high - low > 1:
            middle = (low + high) // 2
            tail = float(bdtrc(middle, draws, self.probability)) * 4 * self.steps
            low, high = (low, middle) if tail <= _CONCEDED / 64 else (middle, high)
        return high


def _in_groups(tree: Tree, turn: int, probability: float, records: int, orders: Array) -> _Moments:
    """Return E e^{θs²} [n] of independent draws in each group."""
    limits = _Limits(steps=tree.steps, turn=turn, probability=probability, records=records)
    # Of the steps from a place on the group has step φ, and others b steps apart.
    values = np.zeros((len(orders), turn, records + 1))
    values[:, 1:, 0] = 1.0
    number = np.arange(records + 1)
    ways = np.array([math.comb(records, n) for n in number], dtype=float)
    values[:, 0] = ways * probability**number * (1 - probability) ** (records - number)
    size = min(_MAX_NUMBERS, limits.at(tree.steps) + 1)
    if len(orders) * turn * size**2 > _MAX_WORK:
        raise TooLarge(f"{size} participations in {turn} groups")
    whole, rest = divmod(tree.steps, tree.period)
    nodes = [_Moments(values)]
    for level in range(1, tree.period.bit_length()):
        size, half = 1 << level, nodes[-1]
        left = half.as_node(orders)
        nodes.append(left.followed_by(half, size // 2, limits.at(size)))
    result, done = None, 0
    power, length = _tree_of(tree.period, nodes, limits, orders), tree.period
    while whole:
        if whole & 1:
            most = limits.at(done + length)
            result = power if result is None else result.followed_by(power, done, most)
            done += length
        whole >>= 1
        if whole:
            power = power.followed_by(power, length, limits.at(2 * length))
            length *= 2
    assert result is not None
    if rest:
        last = _tree_of(rest, nodes, limits, orders)
        result = result.followed_by(last, done, limits.at(tree.steps))
    return result


def _tails_of_few(tree: Tree, turn: int, probability: float, records: int) -> list[Array]:
    """Return P(s² > k and n participations), of any group, for few n; each of shape (squares,).

    Nothing if there are too many groups or trees.
    """
    starts = [
        (first + (length >> level + 1 << level + 1), level)
        for first in range(0, tree.steps, tree.period)
        for length in (min(tree.period, tree.steps - first),)
        for level in reversed(range(length.bit_length()))
        if length >> level & 1
    ]
    most = next((few for size, few in _EXACT if max(turn, turn * len(starts) / 32) <= size), 0)
    if not most:
        return []
    ways = range(min(records, most) + 1)
    drawn = [
        np.array([math.comb(records, n) * probability**n * (1 - probability) ** (records - n)])
        for n in ways
    ]
    by_phase = [drawn, *[[np.ones(1)]] * (turn - 1)]
    nodes: list[list[list[Array]]] = []
    for level in range(tree.period.bit_length()):
        if level:
            half = 1 << (level - 1)
            by_phase = [
                _joined(left, by_phase[(phase - half) % turn], most)
                for phase, left in enumerate(nodes[-1])
            ]
        squares = [
            [np.append(np.zeros(n * n), law) for n, law in enumerate(one)] for one in by_phase
        ]
        nodes.append(squares)
    result = [np.zeros(1)] * (most + 1)
    for group in range(turn):
        run = [np.ones(1)]
        for start, level in starts:
            run = _joined(run, nodes[level][(group - start) % turn], most)
        for number, law in enumerate(run):
            tails = np.append(np.cumsum(law[::-1])[::-1][1:], 0.0)
            size = max(len(tails), len(result[number]))
            result[number] = np.maximum(
                *(np.append(one, np.zeros(size - len(one))) for one in (tails, result[number]))
            )
    return result


def _joined(first: list[Array], second: list[Array], most: int) -> list[Array]:
    """Return the laws of both parts, of each number of participations up to ``most``."""
    result: list[Array] = [np.zeros(1)] * min(most + 1, len(first) + len(second) - 1)
    for number, one in enumerate(first):
        for other in range(min(len(second), len(result) - number)):
            law = np.convolve(one, second[other])
            shorter, longer = sorted((law, result[number + other]), key=len)
            longer = longer.copy()
            longer[: len(shorter)] += shorter
            result[number + other] = longer
    return result


def _tree_of(steps: int, nodes: list[_Moments], limits: _Limits, orders: Array) -> _Moments:
    """Return the moments of a tree, whose largest complete nodes are left children."""
    result, done = None, 0
    for level in reversed(range(steps.bit_length())):
        if steps >> level & 1:
            part = nodes[level].as_node(orders)
            result = part if result is None else result.followed_by(part, done, limits.at(steps))
            done += 1 << level
    assert result is not None
    return result


def _apart(tree: Tree, separation: int, probability: float, records: int, orders: Array) -> Array:
    """Return bounds of E e^{θs²} [n] of records that wait, shape (orders, numbers)."""
    limits = _Limits(steps=tree.steps, turn=1, probability=probability, records=records)
    whole, rest = divmod(tree.steps, tree.period)
    # Of several records, the square of a sum is at most m times the sum of the squares.
    small = _by_waits(tree.period, separation, probability, records * orders)
    if records == 1 and whole == 1 and not rest and len(small) == tree.period.bit_length():
        return _told_apart(tree.period, small, orders)
    result = np.zeros(len(orders))
    for steps, times in ((tree.period, whole), (rest, 1)):
        if steps and times:
            top = min(len(small), steps.bit_length())
            levels = range(max(0, top - _DOUBLINGS - 1), top)
            bounds = [_in_blocks(steps, level, small, limits, orders) for level in levels]
            result += times * reduce(np.fmin, bounds)
    return np.exp(result)[:, None]


def _by_waits(steps: int, separation: int, probability: float, orders: Array) -> list[Array]:
    """Return the moments of the small nodes of a tree, shape (orders, numbers, waits, waits).

    A record waits for so many steps before a node and after it.
    """
    waits = np.arange(separation)
    tables: list[Array] = []
    for level in range(steps.bit_length()):
        size = 1 << level
        if size <= separation:
            table = np.zeros((len(orders), 2, separation, separation))
            free = np.maximum(size - waits, 0)
            table[:, 0, waits, np.maximum(waits - size, 0)] = (1 - probability) ** free
            for place in range(size):
                # The left children below the node that hold this step.
                inside = level - place.bit_count()
                first = waits[: place + 1]
                chances = probability * (1 - probability) ** (place - first)
                weights = np.exp(orders * inside)[:, None] * chances
                table[:, 1, first, separation - size + place] = weights
        else:
            half = tables[-1]
            work = len(orders) * half.shape[1] ** 2 * separation**3
            if level >= separation.bit_length() + _DOUBLINGS and 4 * work > _MAX_WORK:
                break
            table = _one_after_the_other(_with_squares(half, orders), half)
        tables.append(table)
    return tables


def _with_squares(table: Array, orders: Array) -> Array:
    """Return the moments with those of the node itself, shape (orders, numbers, waits, waits)."""
    squares = np.square(np.arange(table.shape[1], dtype=float))
    return np.asarray(table * np.exp(np.multiply.outer(orders, squares))[:, :, None, None])


def _one_after_the_other(first: Array, second: Array) -> Array:
    """Return the moments of both parts, shape (orders, numbers, waits, waits)."""
    size = first.shape[1] + second.shape[1] - 1
    result = np.zeros((len(first), size, first.shape[2], second.shape[3]))
    for number in range(first.shape[1]):
        result[:, number : number + second.shape[1]] += first[:, number, None] @ second
    # Of participations that are b steps apart there may be fewer.
    return result[:, : 1 + int(np.flatnonzero(result.any(axis=(0, 2, 3))).max())]


def _told_apart(steps: int, nodes: list[Array], orders: Array) -> Array:
    """Return the moments of a tree by the waits in all of it, shape (orders, numbers)."""
    # From the last steps on.
    result = np.ones((len(orders), 1, nodes[0].shape[2], 1))
    for level in range(steps.bit_length()):
        if steps >> level & 1:
            result = _one_after_the_other(_with_squares(nodes[level], orders), result)
    return np.asarray(result.max(axis=(2, 3)))


def _in_blocks(steps: int, level: int, small: list[Array], limits: _Limits, orders: Array) -> Array:
    """Return a bound of log E e^{θs²} in one tree, of which nodes of ``level`` are blocks."""
    # Weighted by e^{θ Σ n_u²}, n and more participations of a block, after any wait.
    tails = np.cumsum(small[level].sum(axis=3)[:, ::-1], axis=1)[:, ::-1].max(axis=2)
    less = np.append(tails[:, 1:], np.zeros((len(orders), 1)), axis=1)
    of_one = _Moments((np.maximum(tails - less, 0.0) + tails * 2.0**-50)[:, None, :])
    block, records = of_one, limits.records
    for _ in range(records - 1):
        block = block.followed_by(of_one, 0, limits.records << level)
    result = np.zeros(len(orders))
    for above in range(level, steps.bit_length()):
        if above > level:
            half = 1 << (above - 1)
            block = block.as_node(orders).followed_by(block, half, limits.at(2 * half))
        if steps >> above & 1:
            result += np.log(block.as_node(orders).values.sum(axis=2))[:, 0]
    rest = _told_apart(steps % (1 << level), small, records * orders).sum(axis=1)
    return np.asarray(result + records * np.log(rest))
