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
from functools import lru_cache

import numpy as np
from scipy.special import betainc, gammaln, pdtrc

from affidavit.mechanisms.strategies.lots_apart import products_by_lag, squares_by_lag
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
from affidavit.plan import events

MIN_NODES = 32
"""Distances of an upper bound below which places are not rounded up any further."""
NODES = 256
"""Distances, to which others are rounded up."""
CONCEDED_PROBABILITY = 1e-32
"""The probability of distances beyond the largest one."""
MAX_STEPS, MAX_DENSE_STEPS = 1_000_000, 2048
"""Steps up to which products of columns are computed, for Toeplitz C and for others."""
MAX_PARTICIPATIONS = 1500
"""Participations up to which each number is counted; of more, ``_MAX_COUNTS`` numbers are."""
_MAX_COUNTS = 400
_MAX_EPOCHS = 1000
"""Epochs of lots that are drawn anew in each of them."""
_STEP_BANDS, _MAX_TRANSFORMED = (8, 64), 6_400_000
"""The least and largest number of bands of later steps, and a limit of bands times steps. The
products of a band are those of its first step, and long runs have few bands."""
_VALUES = 4096
"""Number of distinct product sizes."""
_MAX_CHAIN = 10_000_000
"""Products of a chain of lots, of epochs and pairs of places."""
_CHAIN_ORDERS = 1e-3, 1e2, 64
"""The orders λ of a chain of lots, over the largest product: least, largest and number."""
_ORDERS = 1e-3, 1e4, 256
"""Least order, largest order and number of orders of moments, over the largest product."""
PROBABILITY_ERROR = 1e-9
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
    mean = -draws * math.log1p(-probability) * (1 + PROBABILITY_ERROR)
    most = int(mean + 20 * math.sqrt(mean)) + 40
    values, shares = _products(strategy, turn)
    largest = float(values[-1])
    counts, probabilities = _poisson_counts(mean, most)
    orders, moments = _log_moments(values, shares, largest)
    # A record that is drawn in all of its steps moves the run no further than this.
    whole = draws * math.sqrt(float(values @ shares)) * (1 + PROBABILITY_ERROR)

    def tails(distances: Array) -> Array:
        result = np.full(distances.size, float(pdtrc(most, mean)))
        for count, probability in zip(counts, probabilities, strict=True):
            result += probability * _tail(distances, count, largest, orders, moments)
        result = np.where(distances >= whole, 0.0, result)
        return np.minimum.accumulate(result * (1 + PROBABILITY_ERROR))

    drawn = min(1.0, -math.expm1(draws * math.log1p(-probability)) * (1 + PROBABILITY_ERROR))
    slack = (gamma(4 * strategy.steps + 64) + 4 * COEFFICIENT_ERROR) * 1.01
    stretch = (1 + slack) / (1 - strategy.residual)
    return round_to_nodes(tails, min(whole, most * math.sqrt(largest)), drawn, stretch)


@lru_cache(maxsize=16)
def placed_mixture(
    strategy: Strategy, *, turn: int, records: int, drawn_anew: bool, distinct_of: int | None
) -> ParticipationMixture:
    """Return the distribution of s if each of several ``records`` has a lot of each epoch.

    The lots are uniform, of b = ``turn``, and independent between records; if ``drawn_anew``, also
    between epochs. Their places are distinct ones of ``distinct_of`` in each epoch, if that is not
    None. Raises ``TooLarge``.
    """
    epochs = -(-strategy.steps // turn)
    if epochs * turn > MAX_STEPS or (drawn_anew and epochs > _MAX_EPOCHS):
        raise TooLarge(f"{epochs} epochs of {turn} lots")
    draws = records * (epochs if drawn_anew else 1)
    by_lag = products_by_lag(strategy) if drawn_anew else squares_by_lag(strategy, turn)
    padded = np.zeros((epochs + 1) * turn)
    padded[: len(by_lag)] = by_lag
    lags = np.abs(np.arange(1 - turn, turn))
    largest, orders, pairs = float(by_lag[0]), np.zeros(0), 0
    logs = np.zeros(_ORDERS[2])
    for gap in range(epochs if drawn_anew else 1):
        count = (epochs - gap) * records**2 if gap else (draws // records) * math.comb(records, 2)
        lengths = np.abs(gap * turn + np.arange(1 - turn, turn))
        places = np.ceil(padded[lengths] / largest * _VALUES * (1 - 4 * UNIT)).clip(0, _VALUES)
        shares = np.bincount(places.astype(np.int64), (turn - lags) / turn**2, _VALUES + 1)
        taken = np.flatnonzero(shares)
        values = taken / _VALUES * largest * (1 + 8 * UNIT)
        orders, moments = _log_moments(values, shares[taken] / shares.sum(), largest)
        logs, pairs = logs + count * moments, pairs + count
    # Distinct places are independent ones, given that these are distinct.
    shown = sum(math.log1p(-place / (distinct_of or math.inf)) for place in range(records))
    likelier = math.exp(min(-epochs * shown * (1 + PROBABILITY_ERROR), 700.0))

    def tails(distances: Array) -> Array:
        result = likelier * _tail(distances, draws, largest, orders, logs / pairs)
        return np.minimum.accumulate(np.minimum(result * (1 + PROBABILITY_ERROR), 1.0))

    farthest = draws * math.sqrt(largest)
    return round_to_nodes(tails, farthest, 1.0, 1 + 4 * UNIT)


@lru_cache(maxsize=16)
def reordered_mixture(strategy: Strategy, *, turn: int) -> ParticipationMixture:
    """Return the distribution of s if a record has one lot of b = ``turn`` in each epoch, anew.

    Lots of neighbouring epochs are a Markov chain; of others the largest product counts. Raises
    ``TooLarge``. Source: docs/theorems/correlated-noise.md, Theorem 22 (c).
    """
    epochs, rest = -(-strategy.steps // turn), (strategy.steps - 1) % turn + 1
    if epochs * turn > MAX_STEPS or epochs * turn * turn > _MAX_CHAIN:
        raise TooLarge(f"{epochs} epochs of {turn} lots")
    by_lag = products_by_lag(strategy) * (1 + 8 * UNIT)
    padded = np.zeros((epochs + 1) * turn)
    padded[: len(by_lag)] = by_lag
    farther = np.maximum.accumulate(padded[::-1])[::-1]
    gaps = np.arange(2, epochs)
    common = 2 * float((epochs - gaps) @ farther[(gaps - 1) * turn + 1])
    own, places = float(padded[0]), np.arange(turn)
    near = padded[turn + places - places[:, None]]
    most = 2 * float(near.max())
    largest = (epochs * own + common + (epochs - 1) * most) * (1 + (epochs + 64) * UNIT)
    orders = np.geomspace(*_CHAIN_ORDERS) / own
    moments = orders * largest
    for place, order in enumerate(orders):
        # What is less than a double can hold counts as more.
        step = np.maximum(np.exp(order * (2 * near - most)), 1e-300) / turn
        # Steps that are never run move nothing.
        runs = np.where(places < rest, 1.0, max(math.exp(-order * own), 1e-300))
        after = step
        if rest < turn:
            after = step.copy()
            after[:, rest:] = max(math.exp(-order * most), 1e-300) / turn
        for epoch in range(epochs - 1):
            runs = (step if epoch else after) @ runs
            size = float(runs.max())
            runs, moments[place] = runs / size, moments[place] + math.log(size)
        moments[place] += math.log(float(runs.mean()))
    moments += 1e-12 * (1 + orders * largest) + 4 * UNIT * epochs * (turn + 16)

    def tails(distances: Array) -> Array:
        square = np.square(distances)
        result = np.exp(np.minimum((moments - orders * square[:, None]).min(axis=1), 0.0))
        result = np.where(square >= largest, 0.0, result * (1 + PROBABILITY_ERROR))
        return np.minimum.accumulate(np.minimum(result, 1.0))

    farthest = math.sqrt(largest) * (1 + 4 * UNIT)
    return round_to_nodes(tails, farthest, 1.0, 1 + 4 * UNIT)


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
        taken = np.floor(np.square(distances / longest) * (1 - PROBABILITY_ERROR))
        return participation_tail(taken, steps, probability, separation)

    drawn = float(participation_tail(np.zeros(1), steps, probability, separation)[0])
    return round_to_nodes(tails, math.sqrt(most + 1) * longest, drawn, 1 + 4 * UNIT)


def displaced_mixture(mixture: ParticipationMixture, by: float) -> ParticipationMixture | None:
    """Return ``mixture`` with all distances increased ``by`` clip norms; None for too many."""
    units = math.ceil(by / mixture.spacing * (1 + 4 * UNIT))
    if units + len(mixture.weights) <= events.MAX_WEIGHTS:
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


def round_to_nodes(
    tails: Callable[[Array], Array], farthest: float, drawn: float, stretch: float
) -> ParticipationMixture:
    """Return the distribution with ``tails`` P(s > x), rounded up to ``NODES`` distances.

    ``tails`` takes distances, shape (n,), and returns as many probabilities. No distance is above
    ``farthest``, ``drawn`` is P(s > 0), and all are multiplied by ``stretch``.
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


def participation_tail(counts: Array, steps: int, probability: float, separation: int) -> Array:
    """Return P(more than ``counts`` participations) of a record that has waited before the run.

    The (k + 1)-th participation is one of the first T - k (b - 1) draws after waiting. The counts
    and the result have shape (n,).
    """
    draws = np.maximum(steps - counts * (separation - 1), 0).astype(np.int64)
    # More accurate for many draws than scipy's ``bdtrc``.
    tail = betainc(counts + 1, np.maximum(draws - counts, 1), probability) * (counts < draws)
    return np.asarray(np.minimum(tail * (1 + PROBABILITY_ERROR), 1.0))


def _poisson_counts(mean: float, most: int) -> tuple[list[int], Array]:
    """Return numbers of participations from 1 to ``most`` and their probabilities, rounded up.

    Of many numbers some stand for those that are less than them.
    """
    if most <= MAX_PARTICIPATIONS:
        every = np.arange(1, most + 1)
        chances = np.exp(every * math.log(mean) - mean - gammaln(every + 1.0))
        return every.tolist(), chances * (1 + PROBABILITY_ERROR)
    first = max(0, int(mean - 20 * math.sqrt(mean)))
    edges = np.unique(np.linspace(first, most, _MAX_COUNTS).astype(np.int64))
    above = np.append(1.0, pdtrc(edges, mean))
    return edges.tolist(), (above[:-1] - above[1:]) * (
        1 + PROBABILITY_ERROR
    ) + PROBABILITY_ERROR * above[1:]


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


def _log_moments(values: Array, shares: Array, scale: float) -> tuple[Array, Array]:
    """Return increasing orders λ, over ``scale``, and log E e^{λG}, rounded up."""
    largest = float(values[-1])
    orders = np.geomspace(*_ORDERS) / scale
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
