"""How far a randomly drawn record moves a whole run of correlated noise.

A record that is drawn in the steps b moves the run by at most ``s = ‖ |C| b ‖`` clip norms, and the
run is dominated by Σ_b P(b) N(s_b) against N(0), with the steps kept secret. For a user with
several records, b counts the drawn ones. P(s > x) is bounded by moments of G = |C|ᵀ|C| at two
uniform steps, because the sum over pairs of participations is a mean over their matchings.

>>> from affidavit.mechanisms.strategies.toeplitz import identity
>>> mixture = participation_mixture(identity(100), turn=1, probability=0.01)
>>> round(mixture.weights[0], 4), round(mixture.spacing * (len(mixture.weights) - 1))
(0.366, 10)

Reference: docs/theorems/correlated-noise.md, Theorem 14; Hoeffding, "Probability inequalities for
sums of bounded random variables", 1963, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, pdtrc

from affidavit.mechanisms.strategies.numerics import (
    UNIT,
    Array,
    fftconvolve,
    gamma,
    transform_slack,
)
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.strategy import COEFFICIENT_ERROR, Strategy, TooLarge
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.plan import MAX_WEIGHTS

MIN_NODES = 32
"""Distances of an upper bound below which places are not rounded up any further."""
NODES, MAX_LEVELS = 256, 500
"""Distances of an upper bound, which rounds up, and of a lower bound, which rounds down."""
CONCEDED_PROBABILITY = 1e-32
"""The probability of distances beyond the largest one."""
MAX_STEPS, MAX_DENSE_STEPS = 1_000_000, 2048
"""Steps up to which products of columns are computed, for Toeplitz C and for others."""
MAX_PARTICIPATIONS = 1500
"""Participations up to which each number is counted; of more, ``_MAX_COUNTS`` numbers are."""
_MAX_COUNTS = 400
_STEP_BANDS, _MAX_TRANSFORMED = (8, 64), 6_400_000
"""The least and largest number of bands of later steps, and a limit of bands times steps. The
products of a band are those of its first step, and long runs have few bands."""
_VALUES = 4096
"""Number of distinct product sizes."""
_ORDERS = 1e-3, 1e4, 256
"""Least order, largest order and number of orders of moments, over the largest product."""
_SLACK = 1e-9
"""Relative allowance for the rounding of probabilities, far above its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParticipationMixture:
    """P(s <= k ``spacing``) is at least the sum of ``weights`` up to k, for every k.

    ``spacing`` is in clip norms. The weights add up to 1 - ``conceded``.
    """

    spacing: float
    weights: tuple[float, ...]
    conceded: float


@lru_cache(maxsize=16)
def participation_mixture(
    strategy: Strategy, *, turn: int, probability: float, records: int = 1
) -> ParticipationMixture:
    """Return the distribution of s if records are drawn independently in their group's steps.

    A group has the steps g, g + b, ..., b = ``turn``. Each of a user's ``records`` is drawn with
    ``probability``. Raises ``TooLarge`` for strategies or lots that take too much work.
    """
    draws = -(-strategy.steps // turn) * records
    # The number of draws is dominated by a Poisson variable of this mean.
    mean = -draws * math.log1p(-probability) * (1 + _SLACK)
    most = int(mean + 20 * math.sqrt(mean)) + 40
    values, shares = _products(strategy, turn)
    largest = float(values[-1])
    counts, probabilities = _poisson_counts(mean, most)
    orders, moments = _log_moments(values, shares)
    # A record that is drawn in all of its steps moves the run no further than this.
    whole = draws * math.sqrt(float(values @ shares)) * (1 + _SLACK)

    def tails(distances: Array) -> Array:
        result = np.full(distances.size, float(pdtrc(most, mean)))
        for count, probability in zip(counts, probabilities, strict=True):
            result += probability * _tail(distances, count, largest, orders, moments)
        result = np.where(distances >= whole, 0.0, result)
        return np.minimum.accumulate(result * (1 + _SLACK))

    drawn = min(1.0, -math.expm1(draws * math.log1p(-probability)) * (1 + _SLACK))
    slack = (gamma(4 * strategy.steps + 64) + 4 * COEFFICIENT_ERROR) * 1.01
    stretch = (1 + slack) / (1 - strategy.residual)
    return _round_to_nodes(tails, min(whole, most * math.sqrt(largest)), drawn, stretch)


@lru_cache(maxsize=16)
def separated_mixture(
    longest: float, steps: int, probability: float, separation: int
) -> ParticipationMixture:
    """Return the distribution of s if participations are at least b = ``separation`` steps apart.

    A record that took part in none of the last b - 1 steps takes part with ``probability``. Columns
    of steps b apart share no row, and none is longer than ``longest``, in clip norms, so s² is at
    most its square per participation. Raises ``TooLarge`` for too many participations.
    """
    mean = steps * probability
    most = int(min(-(-steps // separation), mean + 20 * math.sqrt(mean) + 40))
    if most > MAX_PARTICIPATIONS:
        raise TooLarge(f"{most} participations of one record")

    def tails(distances: Array) -> Array:
        taken = np.floor(np.square(distances / longest) * (1 - _SLACK))
        return _participation_tail(taken, steps, probability, separation)

    drawn = float(_participation_tail(np.zeros(1), steps, probability, separation)[0])
    return _round_to_nodes(tails, math.sqrt(most + 1) * longest, drawn, 1 + 4 * UNIT)


def displaced_mixture(mixture: ParticipationMixture, by: float) -> ParticipationMixture | None:
    """Return ``mixture`` with all distances increased ``by`` clip norms; None for too many."""
    units = math.ceil(by / mixture.spacing * (1 + 4 * UNIT))
    if units + len(mixture.weights) <= MAX_WEIGHTS:
        return replace(mixture, weights=(1e-300,) * units + mixture.weights)
    coarser = _round_to_even(mixture)
    return None if coarser is None else displaced_mixture(coarser, by)


def _round_to_even(mixture: ParticipationMixture) -> ParticipationMixture | None:
    """Return ``mixture`` with odd places rounded up to even ones, at twice the spacing.

    Returns None if few places are left.
    """
    first, *rest = mixture.weights
    if len(rest) < MIN_NODES:
        return None
    pairs = np.array([*rest, *[0.0] * (len(rest) % 2)]).reshape(-1, 2)
    moved = np.nextafter(pairs.sum(axis=1), 2.0)
    weights = (first, *map(float, moved))
    return replace(mixture, spacing=2 * mixture.spacing, weights=weights)


def projected_separated_mixture(
    projections: Array, probability: Fraction, separation: int, farthest: float
) -> ParticipationMixture | None:
    """Return ``projected_mixture`` for participations at least ``separation`` steps apart.

    A record that has waited long enough is drawn with ``probability``. The projections, shape (n,),
    of a range of consecutive steps count as their least, and others as zero.
    """
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
    # In the worst case a record has just taken part, and waits for b - 1 steps.
    remaining = steps - (separation - 1)
    most = min(MAX_LEVELS - 1, -(-max(remaining, 0) // separation), farthest / level)
    counts = np.arange(int(most), dtype=float)
    q = math.nextafter(float(probability), 0.0)
    above = _participation_tail(counts, remaining, q, separation) * (1 - 2 * _SLACK)
    above = np.append(above[above > 1e-280], 0.0)
    if len(above) == 1:
        return None
    weights = np.maximum(np.append(1 - above[0], above[:-1] - above[1:]), 1e-300)
    weights[0] = 1 - float(weights[1:].sum())
    spacing = level * (1 - 4 * UNIT)
    return ParticipationMixture(spacing=spacing, weights=tuple(map(float, weights)), conceded=0.0)


def _round_to_nodes(
    tails: Callable[[Array], Array], farthest: float, drawn: float, stretch: float
) -> ParticipationMixture:
    """Return the distribution with ``tails`` P(s > x), rounded up to ``NODES`` distances.

    No distance is above ``farthest``, ``drawn`` is P(s > 0), and all are multiplied by ``stretch``.
    """
    coarse = np.linspace(0.0, farthest, NODES + 1)[1:]
    last = int(np.argmax(tails(coarse) <= CONCEDED_PROBABILITY))
    nodes = np.linspace(0.0, float(coarse[last]), NODES + 1)
    above = np.minimum(np.concatenate(([drawn], tails(nodes[1:]))), drawn)
    # Rounded up, so the weights beyond a distance add up to at least its probability.
    weights = np.nextafter(np.concatenate(([1 - drawn], above[:-1] - above[1:])), 2.0)
    weights = np.maximum(weights, 1e-300)
    return ParticipationMixture(
        spacing=float(nodes[1]) * stretch,
        weights=tuple(map(float, weights)),
        conceded=float(above[-1]),
    )


def projected_mixture(
    projections: Array, *, probability: float, records: int, farthest: float
) -> ParticipationMixture | None:
    """Return a lower bound of the move W along one direction; None if W is almost never > 0.

    P(W > k ``spacing``) is at least that of the mixture. W adds up ``projections``, shape (n,), in
    clip norms, each as often as one of ``records`` is drawn, and is capped at ``farthest``.
    """
    q = probability * (1 - 1e-12)
    mean, square = (q * records * float((projections**power).sum()) for power in (1, 2))
    top = min(farthest, mean + 8 * math.sqrt(square) + 3 * float(projections.max()))
    if not top > 0:
        return None
    spacing = top / (MAX_LEVELS - 1)
    level, number = _best_level(projections)
    rounded = float((projections / spacing).astype(int).sum()) * spacing
    if level * number > 1.05 * rounded:
        return _counted_mixture(level, number * records, q, farthest)
    levels, counts = np.unique(
        (projections / spacing * (1 - 4 * UNIT)).astype(int), return_counts=True
    )
    law = np.zeros(MAX_LEVELS)
    law[0] = 1.0
    for level, count in zip(levels, counts, strict=True):
        if level > 0:
            law = _add_draws(law, min(int(level), MAX_LEVELS - 1), int(count) * records, q)
    law *= 1 - _SLACK  # removes what rounding may have added
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
    """Return ``projected_mixture`` for many ``draws``, each of which shows at least ``level``."""
    most = min(draws, draws * q + 8 * math.sqrt(draws * q) + 3, farthest / level)
    group = math.ceil(most / (MAX_LEVELS - 1))
    counts = np.arange(1, int(most // group) + 1, dtype=float) * group
    above = _participation_tail(counts - 1, draws, q, 1) * (1 - 3 * _SLACK)
    above = np.minimum.accumulate(np.append(above[above > 1e-280], 0.0))
    if len(above) == 1:
        return None
    weights = np.maximum(np.append(1 - above[0], above[:-1] - above[1:]), 1e-300)
    weights[0] = 1 - float(weights[1:].sum())
    spacing = level * group * (1 - 4 * UNIT)
    return ParticipationMixture(spacing=spacing, weights=tuple(map(float, weights)), conceded=0.0)


def _participation_tail(counts: Array, steps: int, probability: float, separation: int) -> Array:
    """Return P(more than ``counts`` participations) of a record that has waited before the run.

    The (k + 1)-th participation is one of the first T - k (b - 1) draws after waiting. The counts
    and the result have shape (n,).
    """
    draws = np.maximum(steps - counts * (separation - 1), 0).astype(np.int64)
    # More accurate for many draws than scipy's ``bdtrc``.
    tail = betainc(counts + 1, np.maximum(draws - counts, 1), probability) * (counts < draws)
    return np.asarray(np.minimum(tail * (1 + _SLACK), 1.0))


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


def _poisson_counts(mean: float, most: int) -> tuple[list[int], Array]:
    """Return numbers of participations from 1 to ``most`` and their probabilities, rounded up.

    Of many numbers some stand for those that are less than them.
    """
    if most <= MAX_PARTICIPATIONS:
        every = np.arange(1, most + 1)
        chances = np.exp(every * math.log(mean) - mean - gammaln(every + 1.0))
        return every.tolist(), chances * (1 + _SLACK)
    first = max(0, int(mean - 20 * math.sqrt(mean)))
    edges = np.unique(np.linspace(first, most, _MAX_COUNTS).astype(np.int64))
    above = np.append(1.0, pdtrc(edges, mean))
    return edges.tolist(), (above[:-1] - above[1:]) * (1 + _SLACK) + _SLACK * above[1:]


def _tail(distances: Array, count: int, largest: float, orders: Array, moments: Array) -> Array:
    """Return P(s > x) for ``count`` participations, from moments of matched pairs, shape (n,)."""
    if count < 2:
        return (distances < count * math.sqrt(largest)).astype(float)
    matched = count // 2
    excess = np.square(distances) - count * largest
    tilts = orders * (matched / (count * (count - 1)))
    exponents = matched * moments - tilts * excess[:, None]
    bound = np.exp(np.minimum(exponents.min(axis=1), 0.0))
    return np.asarray(np.where(distances >= count * math.sqrt(largest), 0.0, bound))


def _log_moments(values: Array, shares: Array) -> tuple[Array, Array]:
    """Return increasing orders λ and log E e^{λG}, rounded up."""
    largest = float(values[-1])
    orders = np.geomspace(*_ORDERS) / largest
    logs = [
        order * largest + math.log(float(shares @ np.exp(order * (values - largest))))
        for order in orders
    ]
    return orders, np.array(logs) + 1e-12 * (1 + orders * largest)


@lru_cache(maxsize=16)
def _products(strategy: Strategy, turn: int) -> tuple[Array, Array]:
    """Return the increasing sizes of G_UV and their shares, for uniform steps U, V of a group.

    Sizes are rounded up. Those of a group are at most those of the first group, or the largest at
    the same positions.
    """
    if isinstance(strategy, Scheduled) and strategy.steps > MAX_DENSE_STEPS:
        values, shares = _products(strategy.unscaled, turn)
        return values * float(np.max(strategy.factors)) ** 2 * (1 + 4 * UNIT), shares
    pieces = list(_pieces(strategy, turn))
    largest = max(float(sizes.max()) for sizes, _ in pieces)
    shares = np.zeros(_VALUES + 1)
    for sizes, counted in pieces:
        places = np.ceil(sizes / largest * _VALUES * (1 - 4 * UNIT)).clip(0, _VALUES)
        shares += np.bincount(places.astype(np.int64), counted, minlength=_VALUES + 1)
    return np.arange(_VALUES + 1) / _VALUES * largest * (1 + 8 * UNIT), shares / shares.sum()


def _pieces(strategy: Strategy, turn: int) -> Iterator[tuple[Array, Array]]:
    """Yield sizes of G at two steps of a group, and the number of pairs of each."""
    column = strategy.strategy_coefficients
    if column is not None:
        yield from _toeplitz_products(np.abs(column), turn)
    elif strategy.steps <= MAX_DENSE_STEPS:
        yield from _dense_products(np.abs(strategy.strategy_matrix()), turn)
    elif isinstance(strategy, Tree):
        yield _tree_products(strategy, turn)
    else:
        raise TooLarge(f"a strategy of kind {strategy.kind} over {strategy.steps} steps")


def _tree_products(tree: Tree, turn: int) -> tuple[Array, Array]:
    """Return the numbers of common nodes of two steps, and the most pairs that have each.

    Steps with all but l levels of nodes in common are in one range of 2^l steps, with at most
    ⌈2^l/b⌉ of a group.
    """
    steps, levels = -(-tree.steps // turn), tree.period.bit_length()
    inside = np.minimum(-(-(1 << np.arange(levels)) // turn), steps)
    pairs = steps * np.diff(inside, prepend=0).astype(float)
    rest = float(steps) ** 2 - float(pairs.sum())
    return np.append(levels - np.arange(levels), 0.0), np.append(pairs, rest)


def _dense_products(matrix: Array, turn: int) -> Iterator[tuple[Array, Array]]:
    steps = -(-matrix.shape[1] // turn)
    result = np.zeros((steps, steps))
    for group in range(min(turn, matrix.shape[1])):
        columns = matrix[:, group::turn]
        products = columns.T @ columns
        size = len(products)
        result[:size, :size] = np.maximum(result[:size, :size], products)
    yield result.ravel(), np.ones(steps * steps)


def _toeplitz_products(column: Array, turn: int) -> Iterator[tuple[Array, Array]]:
    """Yield products by the distance of two steps, for one band of later steps at a time."""
    total = len(column)
    if total > MAX_STEPS:
        raise TooLarge(f"a strategy over {total} steps")
    steps = -(-total // turn)
    slack = transform_slack(total) * float(column @ column)
    bands = min(steps, max(_STEP_BANDS[0], min(_STEP_BANDS[1], _MAX_TRANSFORMED // total)))
    for band in np.array_split(np.arange(steps), bands):
        first, last = int(band[0]), int(band[-1])
        overlap = column[: total - first * turn]
        # ⟨c, S^d c⟩ of columns that the end of the run truncates after ``overlap``.
        shifted = fftconvolve(column, overlap[::-1])[len(overlap) - 1 :][::turn]
        sizes = shifted[: last + 1] + slack
        pairs = np.minimum(len(band), last + 1 - np.arange(len(sizes))) * 2.0
        pairs[0] /= 2
        yield sizes, pairs
