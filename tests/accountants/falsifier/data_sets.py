"""Adversarial data sets, and the exact laws of what one release shows of two that are neighbours.

A data set has other records of one or two kinds (alike, opposite to the user's, at right angles to
them, zero, or anything else) and the records of one user. A sampler says how many of the user's
records and how many of the others are in a lot; by symmetry they are then any of them. So the sum
of a lot has a law on finitely many centres, which are enumerated.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

from tests.accountants.falsifier.hockey_sticks import Array, Law, merged
from tests.accountants.falsifier.rows import Case, binomial

Vector = tuple[float, ...]
NEGLIGIBLE = 1e-30


@dataclass(frozen=True)
class DataSet:
    """A user's records, what they are in the neighbour (absent if None), and kinds of others.

    Vectors are in clip norms; each kind of ``others`` has a number and a vector.
    """

    user: tuple[Vector, ...]
    instead: tuple[Vector, ...] | None
    others: tuple[tuple[int, Vector], ...]


Lots = Array
"""P(k of the user's records and j of the others are in the lot), of shape (k + 1, j + 1)."""
Sampler = Callable[[int, int], Lots]
"""The lots of a number of the user's records and a number of others."""
Pair = tuple[Law, Law]
"""What is released of a data set and of its neighbour."""


def poisson_lots(q: float, largest: int | None = None) -> Sampler:
    """Each record independently at rate q; a larger lot is cut to ``largest``, uniformly."""

    def lots(records: int, others: int) -> Lots:
        drawn = np.outer(binomial(records, q), binomial(others, q))
        if largest is None:
            return drawn
        result = np.zeros_like(drawn)
        j = np.arange(others + 1)
        for k in range(records + 1):
            lot = np.minimum(largest, k + j)
            for kept in range(min(k, largest) + 1):
                fits = (lot >= kept) & (lot - kept <= j)
                rest = lot[fits] - kept
                chance = _ways(k, kept) + _ways(j[fits], rest) - _ways(k + j[fits], lot[fits])
                np.add.at(result[kept], rest, drawn[k, fits] * np.exp(chance))
        return result

    return lots


def fixed_lots(lot: int) -> Sampler:
    """A uniform sample of ``lot`` of all records."""

    def lots(records: int, others: int) -> Lots:
        result = np.zeros((records + 1, others + 1))
        for k in range(max(0, lot - others), min(records, lot) + 1):
            chance = _ways(records, k) + _ways(others, lot - k) - _ways(records + others, lot)
            result[k, lot - k] = math.exp(chance)
        return result

    return lots


def _ways(n: int | Array, k: int | Array) -> Array:
    """The log of the number of parts of k of n."""
    n, k = np.asarray(n), np.asarray(k)
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def laws(data: DataSet, sampler: Sampler) -> Pair:
    """What is released of the data set with the user's records, and with what is there instead."""
    number, records = sum(number for number, _ in data.others), len(data.user)
    present = _released(sampler(records, number), data.user, data.others)
    if data.instead is None:
        return present, _released(sampler(0, number), data.user, data.others)
    return present, _released(sampler(records, number), data.instead, data.others)


def _released(lots: Lots, user: Sequence[Vector], others: Sequence[tuple[int, Vector]]) -> Law:
    centres, weights = [], []
    own = [_part_sums(user, k) for k in range(len(lots))]
    for j in np.flatnonzero(lots.max(axis=0) > NEGLIGIBLE).tolist():
        rest = _rest_sums(others, j)
        for mine, chance in zip(own, lots[:, j], strict=True):
            both = rest.centres[:, None] + mine.centres
            centres.append(both.reshape(-1, both.shape[-1]))
            weights.append(np.outer(rest.weights, mine.weights).ravel() * chance)
    return merged(np.concatenate(centres), np.concatenate(weights))


def _part_sums(records: Sequence[Vector], k: int) -> Law:
    """The sum of a uniform part of k records."""
    parts = [*itertools.combinations(records, k)]
    sums = np.array(parts).reshape(len(parts), k, len(records[0])).sum(axis=1)
    return Law(sums, np.full(len(parts), 1 / len(parts)))


def _rest_sums(others: Sequence[tuple[int, Vector]], j: int) -> Law:
    """The sum of j of the others: a hypergeometric number of the first of at most two kinds."""
    if not others:
        return Law(np.zeros((1, 1)), np.ones(1))
    (first, x), (second, y) = (*others, (0, others[0][1]))[:2]
    taken = np.arange(max(0, j - second), min(first, j) + 1)
    log_chances = _ways(first, taken) + _ways(second, j - taken) - _ways(first + second, j)
    return Law(np.outer(taken, x) + np.outer(j - taken, y), np.exp(log_chances))


def random_vector(draw: random.Random, dimensions: int) -> Vector:
    """At most of one clip norm, often along an axis."""
    length = draw.choice((1.0, 1.0, 1.0, 1.0, 0.0, 0.5, draw.random()))
    if dimensions == 1:
        return (length * draw.choice((-1, 1)),)
    turn = draw.choice((0.0, 0.0, 0.5, 0.5, 1.0, -0.5, 101 / 180, draw.uniform(-1, 1)))
    return (length * math.cos(math.pi * turn), length * math.sin(math.pi * turn))


def random_data_set(
    draw: random.Random, records: int, others: int, neighbours: str, dimensions: int
) -> DataSet:
    """A user of ``records``, replaced, zeroed or removed, among others of one or two kinds."""
    unit = (1.0,) + (0.0,) * (dimensions - 1)
    zero, opposite = (0.0,) * dimensions, (-1.0,) + (0.0,) * (dimensions - 1)

    def own(usual: Vector) -> tuple[Vector, ...]:
        if draw.random() < 0.8:
            return (usual,) * records
        return tuple(random_vector(draw, dimensions) for _ in range(records))

    instead = {"add_remove": None, "zero_out": (zero,) * records}.get(neighbours, own(opposite))
    # Many others of two kinds have few sums only on a lattice of one dimension.
    mixed = draw.random() < 0.3 and (dimensions == 1 or others <= 60)
    first = draw.randint(0, others) if mixed else others
    apart = (math.cos(math.radians(101)), math.sin(math.radians(101)))
    shapes = [zero, unit, *([(0.0, 1.0), apart, opposite] if dimensions == 2 else [opposite] * 3)]
    several = others <= 8 and draw.random() < 0.5
    kinds = [random_vector(draw, dimensions) if several else draw.choice(shapes) for _ in range(2)]
    numbered = zip((first, others - first), kinds, strict=True)
    return DataSet(own(unit), instead, tuple((n, kind) for n, kind in numbered if n))


def random_moves(draw: random.Random, case: Case, replaced: bool) -> Pair:
    """A record that moves a release by up to k units in its k-th way, and its replacement."""

    def moved() -> Law:
        centres = [k * draw.choice((1.0, 1.0, 1.0, draw.uniform(-1, 1))) for k in range(kinds)]
        weights = np.array(case.weights)
        if case.conceded:
            # A conceded move leaves the least of the others.
            weights = np.diff(np.minimum(np.cumsum(weights[::-1]), 1 - case.conceded), prepend=0.0)
            weights, centres = np.append(weights[::-1], case.conceded), [*centres, 3.0 * kinds]
        return merged(np.array(centres)[:, None], weights)

    kinds = len(case.weights)
    there = moved()
    if not replaced:
        return there, Law(np.zeros((1, 1)), np.ones(1))
    other = moved()
    return there, Law(-other.centres, other.weights)


def random_lots(draw: random.Random, case: Case, place: str) -> Pair:
    """A record among others in the lots of an order, and its replacement, or zero, in its place."""
    others = [random_vector(draw, 1)[0] for _ in range(case.size - 1)]
    if draw.random() < 0.6:
        others = [draw.choice((-1.0, 1.0, 0.0))] * (case.size - 1)

    def released(record: float) -> Law:
        centres = np.array(
            [
                [sum(lot) for lot in _in_lots(order, case.lot, case.bins)]
                for order in itertools.permutations([record, *others])
            ]
        )
        return merged(centres, np.full(len(centres), 1 / len(centres)))

    return released(1.0), released(-1.0 if place == "replace_one" else 0.0)


def _in_lots(order: Sequence[float], lot: int, lots: int) -> list[Sequence[float]]:
    return [order[place * lot : (place + 1) * lot] for place in range(lots)]


def random_bins(draw: random.Random, case: Case, *, replaced: bool = False) -> Pair:
    """A record, or its replacement, and others that are alike, each in one of the bins."""
    number = case.released or case.bins

    def thrown(contributions: Sequence[float]) -> Array:
        centres = np.zeros((case.bins, number))
        centres[range(number), range(number)] = contributions
        return centres

    def own(usual: float) -> list[float]:
        return [random_vector(draw, 1)[0] if draw.random() < 0.3 else usual for _ in range(number)]

    others, kind, rest = draw.choice((0, 0, 1, 2)), random_vector(draw, 1)[0], np.zeros((1, number))
    for _ in range(others):
        rest = (rest[:, None] + thrown([kind] * number)).reshape(-1, number)

    def released(mine: Array) -> Law:
        centres = (rest[:, None] + mine).reshape(-1, number)
        return merged(centres, np.full(len(centres), 1 / len(centres)))

    instead = thrown(own(-1.0)) if replaced else np.zeros((1, number))
    return released(thrown(own(1.0))), released(instead)
