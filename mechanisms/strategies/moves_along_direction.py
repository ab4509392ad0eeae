"""How far a unit surely moves a run along one direction of its outputs, by how its lots are drawn.

A record that is drawn in step t moves the outputs by ``projections[t]`` along a direction, with a
sign of its own (``white_noise.project_columns``). The law of the sum W of these moves is rounded
down, in each place and in each probability: a W that is stochastically smaller shows less.

>>> law = kept_bins_mixture(np.ones(6), turn=3, records=2, farthest=math.inf)
>>> round((len(law.weights) - 1) * law.spacing, 6)  # two records, each in its bin in two epochs
4.0

Reference: docs/theorems/correlated-noise.md, Theorems 13 and 21.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc

from affidavit.mechanisms.strategies.numerics import UNIT, Array, gamma, padded
from affidavit.mechanisms.strategies.participation_mixture import (
    PROBABILITY_ERROR,
    ParticipationMixture,
    participation_tail,
)

MAX_LEVELS = 500
"""Distances, to which others are rounded down."""
MAX_EPOCH_GROUPS = 8
"""Groups of neighbouring epochs; those of a group count as the least of them."""
MAX_PLACES = 2048
"""Places of a law to which moves are added."""
MAX_FOLLOWED_STEPS = 20_000
"""Steps up to which each is followed, of a record that waits."""
_FEW_MOVES = 16
"""Moves of a law whose places are not rounded again."""
_DROPPED = 1e-22
"""Probability of the smallest moves that is not followed."""
_NEGLIGIBLE = 1e-30
"""Probability of a move below which it counts as a smaller one."""
_PLACE_ERROR = 1e-12
"""Allowance for the rounding of a place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A law of moves: ``lowest`` + k ``spacing`` with probability ``weights``[k], shape (n,).

    With the probability ``lost`` a move is smaller than all of these, and at least ``certain``.
    """

    lowest: float
    spacing: float
    weights: Array
    certain: float
    lost: float = 0.0

    @classmethod
    def of(cls, values: Array, weights: Array, unit: float | None = None) -> Law:
        """Return the law of ``values``, shape (n,), which rise, rounded down.

        They are multiples of the ``unit``, if it is given.
        """
        values, weights = values[weights > 0], weights[weights > 0] / weights.sum()
        lowest = float(values[0])
        spread = values - lowest
        spacing = unit or max(float(spread[-1]) / (MAX_PLACES // 2), 1e-300)
        places = np.floor(spread / spacing + (_PLACE_ERROR if unit else -_PLACE_ERROR))
        law = np.bincount(places.clip(0).astype(np.int64), weights).astype(float)
        return cls(lowest=lowest, spacing=spacing, weights=law, certain=lowest)

    def times(self, number: int) -> Law:
        """Return the law of the sum of so many independent moves."""
        result, square = None, self
        while True:
            if number & 1:
                result = square if result is None else result + square
            number >>= 1
            if not number:
                assert result is not None
                return result
            square += square

    def __add__(self, other: Law) -> Law:
        """Return the law of the sum of two independent moves."""
        spacing = max(self.spacing, other.spacing)
        left, right = (one._at(spacing) for one in (self, other))
        weights = np.convolve(left.weights, right.weights)
        lost = left.lost + right.lost
        below = np.cumsum(weights)
        first = int(np.searchsorted(below, _DROPPED))
        if first:
            lost += float(below[first - 1])
        above = np.cumsum(weights[::-1])[::-1]
        last = max(first, int(np.count_nonzero(above > _NEGLIGIBLE)) - 1)
        shown = weights[first : last + 1].copy()
        shown[-1] = above[last]
        result = Law(
            lowest=left.lowest + right.lowest + first * spacing,
            spacing=spacing,
            weights=shown,
            certain=left.certain + right.certain,
            lost=lost,
        )
        return result if len(shown) <= MAX_PLACES else result._at(2 * spacing)

    def _at(self, spacing: float) -> Law:
        """Return this law with places that are ``spacing`` apart, rounded down to them."""
        if spacing == self.spacing:
            return self
        places = np.floor(np.arange(len(self.weights)) * (self.spacing / spacing) + _PLACE_ERROR)
        law = np.bincount(places.astype(np.int64), self.weights).astype(float)
        return replace(self, spacing=spacing, weights=law)


def independent_draws_mixture(
    projections: Array,
    *,
    probability: float,
    records: int,
    farthest: float,
    levels: int = MAX_LEVELS,
) -> ParticipationMixture | None:
    """Return a lower bound of the move W along one direction; None if W is almost never > 0.

    P(W > k ``spacing``) is at least that of the mixture of about so many ``levels``. W adds up
    ``projections``, shape (n,), in clip norms, each as often as one of ``records`` is drawn, and is
    capped at ``farthest``.
    """
    q = probability * (1 - 1e-12)
    mean, square = (q * records * float((projections**power).sum()) for power in (1, 2))
    largest = float(projections.max())
    top = min(farthest, mean + 8 * math.sqrt(square) + 3 * largest)
    if not top > 0:
        return None
    spacings = [top / (levels - 1)]
    if (places := math.floor(largest / spacings[0])) > 0:
        # Most steps of a Toeplitz strategy show about the largest move, which is then on a place.
        spacings.append(largest / places * (1 - 1e-6))
    rounded, spacing = max((float(_levels(projections, one).sum()) * one, one) for one in spacings)
    level, number = _best_level(projections)
    if level * number > 1.05 * rounded:
        return _counted_mixture(level, number * records, q, farthest)
    return _law_of_draws(projections, spacing, records, q, most=1 + math.floor(top / spacing))


def displaced_draws_mixture(
    projections: Array, *, probability: float
) -> ParticipationMixture | None:
    """Return the law of W along one direction, of one record; None if W is almost never > 0.

    The record, and all others, show of each step its projection, shape (n,) and in clip norms,
    rounded down to a place of the law, so that this is the law of W itself, up to rounding. The
    last weight bounds the probability of that place and all farther ones.
    """
    q = probability * (1 - 1e-12)
    mean, square = (q * float((projections**power).sum()) for power in (1, 2))
    largest = float(projections.max())
    top = mean + 14 * math.sqrt(square) + 12 * largest
    if not top > 0:
        return None
    # Most steps of a Toeplitz strategy show about the largest one, which is on a place.
    places = math.floor(largest / top * (MAX_LEVELS - 1))
    spacing = largest / max(places, 1) * (1 - 1e-6)
    law = _law_of_draws(projections, spacing, 1, q)
    if law is None:
        return None
    shown = law.weights[: MAX_LEVELS - 1]
    beyond = _most_beyond(_levels(projections, spacing), len(shown), q)
    return replace(law, weights=(*shown, beyond))


def _levels(projections: Array, spacing: float) -> Array:
    """Return ``projections``, shape (n,), in places of a law, rounded down."""
    return np.asarray((projections / spacing * (1 - 4 * UNIT)).astype(np.int64))


def _most_beyond(levels: Array, place: int, q: float) -> float:
    """Bound the probability that ``levels``, each drawn with q, add up to ``place`` or more.

    Chernoff's bound, at some of its orders.
    """
    counts = np.bincount(levels)
    if counts @ np.arange(len(counts)) < place:
        return 1e-300
    orders = np.arange(0.05, 40.0, 0.05) / len(counts)
    moments = q * (np.expm1(orders[:, None] * np.arange(len(counts))) @ counts)
    log = float((moments - orders * place).min())
    return math.exp(max(min(log, 0.0) + 1e-9 * (1 + abs(log)), -690.0))


def _law_of_draws(
    projections: Array, spacing: float, records: int, q: float, most: int = MAX_LEVELS
) -> ParticipationMixture | None:
    """Return the law of the sum of ``projections``, rounded down, as often as records are drawn.

    It has at most so many places as ``most``.
    """
    levels, counts = np.unique(_levels(projections, spacing), return_counts=True)
    law = np.zeros(most)
    law[0] = 1.0
    for level, count in zip(levels, counts, strict=True):
        if level > 0:
            law = _add_draws(law, min(int(level), most - 1), int(count) * records, q)
    law *= 1 - PROBABILITY_ERROR  # removes what rounding may have added
    last = int(np.flatnonzero(np.append(1.0, law[1:]) > 1e-280)[-1])
    if last == 0:
        return None
    weights = np.maximum(law[: last + 1], 1e-300)
    weights[0] = 1 - float(weights[1:].sum())
    if not weights[0] > 0:
        return None
    return ParticipationMixture(spacing=spacing, weights=tuple(map(float, weights)), conceded=0.0)


def _best_level(projections: Array) -> tuple[float, int]:
    """Return a level and the number of projections above it with the largest product of some."""
    levels = np.linspace(0.3, 0.99, 24) * float(projections.max())
    shown = [(float(level), int((projections >= level).sum())) for level in levels]
    return max(shown, key=lambda pair: pair[0] * pair[1])


def _counted_mixture(
    level: float, draws: int, q: float, farthest: float
) -> ParticipationMixture | None:
    """Return ``independent_draws_mixture`` for ``draws`` that each show at least ``level``."""
    most = min(draws, draws * q + 8 * math.sqrt(draws * q) + 3, farthest / level)
    group = math.ceil(most / (MAX_LEVELS - 1))
    counts = np.arange(1, int(most // group) + 1, dtype=float) * group
    above = participation_tail(counts - 1, draws, q, 1) * (1 - 3 * PROBABILITY_ERROR)
    above = np.minimum.accumulate(np.append(above[above > 1e-280], 0.0))
    if len(above) == 1:
        return None
    weights = np.maximum(np.append(1 - above[0], above[:-1] - above[1:]), 1e-300)
    weights[0] = 1 - float(weights[1:].sum())
    spacing = level * group * (1 - 4 * UNIT)
    return ParticipationMixture(spacing=spacing, weights=tuple(map(float, weights)), conceded=0.0)


def separated_draws_mixture(
    projections: Array, *, probability: Fraction, separation: int, records: int, farthest: float
) -> ParticipationMixture | None:
    """Return ``independent_draws_mixture`` for draws at least b = ``separation`` steps apart.

    A record that has waited for b - 1 steps is drawn with ``probability``, and did so for long
    before the run. In long runs the projections, shape (n,), of a range of consecutive steps count
    as their least, and others as zero.
    """
    chance = math.nextafter(float(probability), 0.0)
    if len(projections) <= MAX_FOLLOWED_STEPS:
        if not projections.max() > 0:
            return None
        law = _followed_law(projections, chance, separation)
        return _rounded_to_levels(law.times(records), records, farthest)
    best: tuple[float, float, int] | None = None
    for share in (0.5, 0.75, 0.9, 0.99):
        level = share * float(projections.max())
        first, last = _longest_run(projections >= level)
        gain = level**2 * (last - first)
        if best is None or gain > best[0]:
            best = gain, level, last - first
    if best is None or not best[1] > 0:
        return None
    _, level, steps = best
    above = _waiting_tail(steps, chance, separation)
    above = np.append(above[above > _NEGLIGIBLE], 0.0)
    if len(above) == 1:
        return None
    weights = np.append(1 - above[0], above[:-1] - above[1:])
    law = Law.of(level * np.arange(float(len(weights))), weights, unit=level)
    return _rounded_to_levels(law.times(records), records, farthest)


def _followed_law(projections: Array, p: float, separation: int) -> Law:
    """Return the law of the move of one record, followed from step to step."""
    steps, rate = len(projections), p / (1 + (separation - 1) * p)
    mean, square = (rate * float((projections**power).sum()) for power in (1, 2))
    largest = float(projections.max())
    # A largest move is a number of places, and so are those that differ by rounding.
    moves = min(mean / largest + 8 * math.sqrt(square) / largest + 3, -(-steps // separation))
    most = MAX_LEVELS if moves <= _FEW_MOVES else MAX_PLACES
    spacing = largest / max(1, int((most - 1) / moves)) * (1 - _PLACE_ERROR)
    places = (projections / spacing).astype(int)
    free, waiting = np.zeros(most), np.zeros((separation, most))
    # How long it still waits is uniform, unless it waits no longer.
    free[0], waiting[1:, 0] = 1 - (separation - 1) * rate, rate
    for step, place in enumerate(places):
        free += waiting[step % separation]
        drawn = waiting[step % separation]  # it is free again b steps later
        drawn[:place] = 0.0
        drawn[place:] = p * free[: most - place]
        drawn[-1] += p * float(free[most - place :].sum())
        free *= 1 - p
    error = gamma(8 * steps + 64)
    weights = (free + waiting.sum(axis=0)) * (1 - error)
    spacing *= 1 - 4 * UNIT
    return Law(lowest=0.0, spacing=spacing, weights=weights, certain=0.0, lost=3 * error)


def _waiting_tail(steps: int, p: float, separation: int) -> Array:
    """Return P(more than k participations) in some steps for k = 0, 1, ..., rounded down.

    After many steps, a record is drawn in each of the first b steps with the rate q and in none of
    them with 1 - bq, and then each step is one more draw.
    """
    rate = p / (1 + (separation - 1) * p)
    counts = np.arange(-(-steps // separation) + 1)
    free = (1 - separation * rate) * _draws_tail(
        counts + 1, steps - separation * (counts + 1) + counts, p
    )
    result = np.maximum(free, 0.0)
    for first in range(min(separation, steps)):
        result += rate * _draws_tail(counts, steps - 1 - first - counts * (separation - 1), p)
    return np.asarray(np.minimum.accumulate(result * (1 - 1e-12 * (separation + 8))))


def _draws_tail(least: NDArray[np.int64], draws: NDArray[np.int64], p: float) -> Array:
    """Return P(at least so many of independent draws succeed), rounded down, shape (n,)."""
    possible = (least <= draws) & (least > 0)
    a, b = np.where(possible, least, 1), np.where(possible, draws - least + 1, 1)
    tail = betainc(a, b, p) * (1 - PROBABILITY_ERROR)
    tail = np.maximum(tail, 1 - betainc(b, a, 1 - p) * (1 + PROBABILITY_ERROR))
    return np.where(possible, np.maximum(tail, 0.0), 1.0 * (least <= 0) * (draws >= 0))


def kept_bins_mixture(
    projections: Array, *, turn: int, records: int, farthest: float
) -> ParticipationMixture | None:
    """Return the move of ``records`` that are thrown into ``turn`` bins for the whole run.

    A record in bin j takes part in the steps j, j + b, ..., b = ``turn``. The projections have
    shape (T,).
    """
    epochs = -(-len(projections) // turn)
    by_bin = padded(projections, epochs * turn).reshape(epochs, turn)
    of_bins = np.asarray(np.sort(by_bin.sum(axis=0)) * (1 - gamma(epochs)), dtype=np.float64)
    law = Law.of(of_bins, np.ones(turn) / turn, unit=_unit(projections, turn))
    return _rounded_to_levels(law.times(records), records, farthest)


def shuffled_epochs_mixture(
    projections: Array, *, turn: int, size: int, lot: int, records: int, farthest: float
) -> ParticipationMixture | None:
    """Return the move of ``records`` of ``size`` in a new order each epoch, in lots of ``lot``.

    The first ``turn`` lots of an epoch are released. Given the places of m - 1 records, another one
    is in one of n lots with a chance of at least (nB - m + 1) / (N - m + 1). The projections have
    shape (T,).
    """
    whole = len(projections) // turn * turn
    epochs = -np.sort(-projections[:whole].reshape(-1, turn), axis=1)
    groups = [
        (group.min(axis=0), len(group))
        for group in np.array_split(epochs, min(MAX_EPOCH_GROUPS, len(epochs)) or 1)
        if len(group)
    ]
    if whole < len(projections):
        groups.append((-np.sort(-projections[whole:]), 1))
    total: Law | None = None
    for falling, number in groups:
        reached = lot * np.arange(1, len(falling) + 1) - (records - 1)
        above = np.maximum(reached, 0) / (size - records + 1)
        weights = np.append(max(0.0, 1 - float(above[-1])), np.diff(above, prepend=0.0)[::-1])
        values = np.append(0.0, falling[::-1])
        law = Law.of(values, weights, unit=_unit(projections, turn)).times(records * number)
        total = law if total is None else total + law
    assert total is not None
    return _rounded_to_levels(total, records * (len(epochs) + 1), farthest)


def _unit(projections: Array, turn: int) -> float | None:
    """Return the move of every step of one epoch or less, or None if there are several."""
    first = float(projections[0])
    is_one = len(projections) <= turn and first > 0 and bool(np.all(projections == first))
    return first if is_one else None


def _rounded_to_levels(law: Law, number: int, farthest: float) -> ParticipationMixture | None:
    """Return ``law``, the sum of a ``number`` of moves, at few distances up to ``farthest``.

    None if it is almost never above zero.
    """
    error = gamma(8 * MAX_PLACES) * (number + 1)
    above = np.cumsum(law.weights[::-1])[::-1] * (1 - error)
    below = law.lost + np.append(0.0, np.cumsum(law.weights)[:-1])
    above = np.maximum(above, 1 - below * (1 + error) - 1e-15)
    above = np.minimum.accumulate(np.minimum(above, 1.0))
    reached = int(np.count_nonzero(above > _NEGLIGIBLE)) - 1
    certain, farthest = (
        min(law.certain, farthest),
        min(max(law.certain, law.lowest + reached * law.spacing), farthest),
    )
    if not farthest > 0:
        return None
    level = farthest / (MAX_LEVELS - 1)
    if law.lowest == certain == 0 and law.spacing >= level:
        level = law.spacing
    elif certain >= level:
        level = certain / math.floor(certain / level)
    first = int(certain / level + _PLACE_ERROR)
    levels = np.arange(first + 1, int(farthest / level + _PLACE_ERROR) + 1)
    places = np.ceil((levels * level - law.lowest) / law.spacing - _PLACE_ERROR)
    tails = np.append(above, 0.0)[places.clip(0, len(above)).astype(np.int64)]
    tails = np.append(tails[tails > _NEGLIGIBLE], 0.0)
    weights = np.full(first + len(tails), 1e-300)
    weights[first + 1 :] = np.maximum(tails[:-1] - tails[1:], 1e-300)
    weights[first] = 0.0
    weights[first] = 1 - math.fsum(weights)
    if len(weights) < 2 or not weights[first] > 0:
        return None
    return ParticipationMixture(
        # Past what the errors of places amount to.
        spacing=level * (1 - 1e-8),
        weights=tuple(map(float, weights)),
        conceded=0.0,
    )


def _longest_run(marked: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first and the end (exclusive) of the longest run of true entries, shape (n,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marked.astype(int), [0]))))
    begins, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest])


def _add_draws(law: Array, level: int, draws: int, q: float) -> Array:
    """Return the distribution after adding ``level`` per successful draw, capped at the end."""
    most = min(draws, (len(law) - 1) // level + 1)
    number = np.arange(1, most + 1)
    ratios = (draws - number + 1) / number * (q / (1 - q))
    probabilities = math.exp(draws * math.log1p(-q)) * np.append(1.0, np.cumprod(ratios))
    result = np.zeros(len(law))
    for times, probability in enumerate(probabilities):
        moved = min(times * level, len(law))
        result[moved:] += probability * law[: len(law) - moved]
        result[-1] += probability * float(law[len(law) - moved :].sum())
    return result
