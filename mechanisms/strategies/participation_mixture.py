"""How far a record that is drawn at random moves a whole run of correlated noise.

A record that is drawn in the steps b moves the run by at most ``s = ‖ |C| b ‖`` clip norms, and the
run is dominated by Σ_b P(b) N(s_b) against N(0): nobody is told in which steps it was. Of a user
with several records b counts those that are drawn. What is needed is P(s > x) from above. Of k
participations at uniform places,

    s² = Σ_i G_ii + 2 Σ_{i<j} G_ij <= k G_max + 2 Σ_{i<j} G_ij,    G = |C|ᵀ|C|,

and the sum over pairs is a mean over the ways to match them up, of k/2 independent pairs each
(Hoeffding): its moments are bounded by those of G at two uniform places.

>>> from affidavit.mechanisms.strategies.toeplitz import identity
>>> mixture = participation_mixture(identity(100), turn=1, probability=0.01)
>>> round(mixture.weights[0], 4), round(mixture.spacing * (len(mixture.weights) - 1))
(0.366, 18)

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

from affidavit.mechanisms.strategies.numerics import UNIT, fftconvolve, gamma, transform_slack
from affidavit.mechanisms.strategies.strategy import EVALUATION, Strategy, TooLarge
from affidavit.plan import MAX_WEIGHTS

Array = NDArray[np.float64]

NODES, _SHOWN = 256, 500
"""Distances that are told apart; others are rounded up, and those shown down."""
CONCEDED = 1e-32
"""The chance of more than the largest of them."""
MAX_STEPS, MAX_DENSE = 1_000_000, 2048
"""Steps up to which products of columns are counted, of Toeplitz C and of others."""
MAX_PARTICIPATIONS = 1500
_BANDS, _TRANSFORMED = (8, 64), 6_400_000
"""Of the later of two steps: products are as large as those of the first step in its band. There
are fewest of long runs, of so many numbers together."""
_VALUES = 4096
"""Sizes of products that are told apart."""
_ORDERS = 1e-3, 1e4, 256
"""The least, the largest and the number of orders of moments, times the largest product."""
_SLACK = 1e-9
"""Relative allowance for the probabilities' rounding, far above what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParticipationMixture:
    """P(s <= k ``spacing``) is at least the sum of ``weights`` up to k, for every k.

    ``spacing`` is in clip norms. The weights add up to one less ``conceded``.
    """

    spacing: float
    weights: tuple[float, ...]
    conceded: float


@lru_cache(maxsize=16)
def participation_mixture(
    strategy: Strategy, *, turn: int, probability: float, records: int = 1
) -> ParticipationMixture:
    """The law of s where in the steps g, g + b, ... of any group records are drawn independently.

    b = ``turn``; each of a user's ``records`` is drawn with ``probability``. Raises ``TooLarge``
    for strategies or lots of which that is too much work.
    """
    draws = -(-strategy.steps // turn) * records
    # A record is drawn at most as often as a Poisson variable of this mean is above zero.
    mean = -draws * math.log1p(-probability) * (1 + _SLACK)
    if mean > MAX_PARTICIPATIONS / 4:
        raise TooLarge(f"{mean:.0f} participations of one record")
    most = int(mean + 20 * math.sqrt(mean)) + 40
    values, shares = _products(strategy, turn)
    largest = float(values[-1])
    counts = np.arange(most + 1)
    chances = np.exp(counts * math.log(mean) - mean - gammaln(counts + 1.0)) * (1 + _SLACK)
    orders, moments = _log_moments(values, shares)

    def tails(distances: Array) -> Array:
        result = np.full(distances.size, float(pdtrc(most, mean)))
        result += chances[1] * (distances < math.sqrt(largest))
        for count in range(2, most + 1):
            result += chances[count] * _tail(distances, count, largest, orders, moments)
        return np.minimum.accumulate(result * (1 + _SLACK))

    drawn = min(1.0, -math.expm1(draws * math.log1p(-probability)) * (1 + _SLACK))
    slack = (gamma(4 * strategy.steps + 64) + 4 * EVALUATION) * 1.01
    stretch = (1 + slack) / (1 - strategy.residual)
    return _on_nodes(tails, most * math.sqrt(largest), drawn, stretch)


@lru_cache(maxsize=16)
def separated_mixture(
    longest: float, steps: int, probability: float, separation: int
) -> ParticipationMixture:
    """The law of s where participations are at least b = ``separation`` steps apart.

    A record that took part in none of the last b - 1 steps does with ``probability``. No two
    columns of steps b apart share a row, and none is longer than ``longest``, in clip norms: s² is
    at most its square for each participation. Raises ``TooLarge`` for too many participations.
    """
    mean = steps * probability
    most = int(min(-(-steps // separation), mean + 20 * math.sqrt(mean) + 40))
    if most > MAX_PARTICIPATIONS:
        raise TooLarge(f"{most} participations of one record")

    def tails(distances: Array) -> Array:
        taken = np.floor(np.square(distances / longest) * (1 - _SLACK))
        return _taken_more_than(taken, steps, probability, separation)

    drawn = float(_taken_more_than(np.zeros(1), steps, probability, separation)[0])
    return _on_nodes(tails, math.sqrt(most + 1) * longest, drawn, 1 + 4 * UNIT)


def displaced_mixture(mixture: ParticipationMixture, by: float) -> ParticipationMixture | None:
    """``mixture`` with every distance larger by so many clip norms; None where it has too many."""
    units = math.ceil(by / mixture.spacing * (1 + 4 * UNIT))
    if units + len(mixture.weights) > MAX_WEIGHTS:
        return None
    return replace(mixture, weights=(1e-300,) * units + mixture.weights)


def shown_separated(
    shown: Array, probability: Fraction, separation: int, farthest: float
) -> ParticipationMixture | None:
    """Like ``shown_mixture`` where participations are at least ``separation`` steps apart.

    A record that has waited as long is drawn with ``probability``. What is shown, of shape (n,),
    in some neighbouring steps counts as the least of it, and in others as nothing.
    """
    best: tuple[float, float, int] | None = None
    for share in (0.5, 0.75, 0.9, 0.99):
        level = share * float(shown.max())
        first, last = _longest_stretch(shown >= level)
        gain = level**2 * (last - first)
        if best is None or gain > best[0]:
            best = gain, level, last - first
    if best is None or not best[1] > 0:
        return None
    _, level, steps = best
    # At worst a record has just taken part, and waits for b - 1 steps.
    left = steps - (separation - 1)
    most = min(_SHOWN - 1, -(-max(left, 0) // separation), farthest / level)
    counts = np.arange(int(most), dtype=float)
    q = math.nextafter(float(probability), 0.0)
    above = _taken_more_than(counts, left, q, separation) * (1 - 2 * _SLACK)
    above = np.append(above[above > 1e-280], 0.0)
    if len(above) == 1:
        return None
    weights = np.maximum(np.append(1 - above[0], above[:-1] - above[1:]), 1e-300)
    weights[0] = 1 - float(weights[1:].sum())
    spacing = level * (1 - 4 * UNIT)
    return ParticipationMixture(spacing=spacing, weights=tuple(map(float, weights)), conceded=0.0)


def _on_nodes(
    tails: Callable[[Array], Array], farthest: float, drawn: float, stretch: float
) -> ParticipationMixture:
    """The law whose ``tails`` are P(s > x), rounded up to ``NODES`` distances.

    None is above ``farthest``, ``drawn`` is P(s > 0), and each distance grows by ``stretch``.
    """
    coarse = np.linspace(0.0, farthest, NODES + 1)[1:]
    last = int(np.argmax(tails(coarse) <= CONCEDED))
    nodes = np.linspace(0.0, float(coarse[last]), NODES + 1)
    above = np.minimum(np.concatenate(([drawn], tails(nodes[1:]))), drawn)
    # Rounded up, so that the weights beyond a distance add up to no less than its chance.
    weights = np.nextafter(np.concatenate(([1 - drawn], above[:-1] - above[1:])), 2.0)
    weights = np.maximum(weights, 1e-300)
    return ParticipationMixture(
        spacing=float(nodes[1]) * stretch,
        weights=tuple(map(float, weights)),
        conceded=float(above[-1]),
    )


def shown_mixture(
    shown: Array, *, probability: float, records: int, farthest: float
) -> ParticipationMixture | None:
    """A law that the moves along one direction are at least: P(W > k ``spacing``) is no less.

    W adds up ``shown``, shape (n,), in clip norms, each as often as so many ``records`` are drawn,
    and counts as at most ``farthest``. None where it is hardly ever above zero.
    """
    q = probability * (1 - 1e-12)
    mean, square = (q * records * float((shown**power).sum()) for power in (1, 2))
    top = min(farthest, mean + 8 * math.sqrt(square) + 3 * float(shown.max()))
    if not top > 0:
        return None
    spacing = top / (_SHOWN - 1)
    levels, counts = np.unique((shown / spacing * (1 - 4 * UNIT)).astype(int), return_counts=True)
    law = np.zeros(_SHOWN)
    law[0] = 1.0
    for level, count in zip(levels, counts, strict=True):
        if level > 0:
            law = _with_draws(law, min(int(level), _SHOWN - 1), int(count) * records, q)
    law *= 1 - _SLACK  # of what rounding may have added, the rest counts as no move
    last = int(np.flatnonzero(np.append(1.0, law[1:]) > 1e-280)[-1])
    if last == 0:
        return None
    weights = np.maximum(law[: last + 1], 1e-300)
    weights[0] = 1 - float(weights[1:].sum())
    if not weights[0] > 0:
        return None
    return ParticipationMixture(spacing=spacing, weights=tuple(map(float, weights)), conceded=0.0)


def _taken_more_than(counts: Array, steps: int, probability: float, separation: int) -> Array:
    """P(more than so many participations) of a record that has waited long before the first step.

    The (k + 1)-th is one of the first T - k (b - 1) draws that are not waited out. Counts and
    result have shape (n,).
    """
    draws = np.maximum(steps - counts * (separation - 1), 0).astype(np.int64)
    # More accurate for many draws than scipy's ``bdtrc``.
    chances = betainc(counts + 1, np.maximum(draws - counts, 1), probability) * (counts < draws)
    return np.asarray(np.minimum(chances * (1 + _SLACK), 1.0))


def _longest_stretch(marked: NDArray[np.bool_]) -> tuple[int, int]:
    """The first and the last, exclusive, of the most neighbours that are all true; shape (n,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marked.astype(int), [0]))))
    begins, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest])


def _with_draws(law: Array, level: int, draws: int, q: float) -> Array:
    """``law`` plus ``level`` as often as one of ``draws`` falls; what is beyond is at the end."""
    most = min(draws, (len(law) - 1) // level + 1)
    number = np.arange(1, most + 1)
    ratios = (draws - number + 1) / number * (q / (1 - q))
    chances = math.exp(draws * math.log1p(-q)) * np.append(1.0, np.cumprod(ratios))
    result = np.zeros(len(law))
    for times, chance in enumerate(chances):
        moved = min(times * level, len(law))
        result[moved:] += chance * law[: len(law) - moved]
        result[-1] += chance * float(law[len(law) - moved :].sum())
    return result


def _tail(distances: Array, count: int, largest: float, orders: Array, moments: Array) -> Array:
    """P(s > x) of so many participations, from moments of matched pairs; both of shape (n,)."""
    matched = count // 2
    excess = np.square(distances) - count * largest
    tilts = orders * (matched / (count * (count - 1)))
    exponents = matched * moments - tilts * excess[:, None]
    bound = np.exp(np.minimum(exponents.min(axis=1), 0.0))
    return np.asarray(np.where(distances >= count * math.sqrt(largest), 0.0, bound))


def _log_moments(values: Array, shares: Array) -> tuple[Array, Array]:
    """log E e^{λG} at rising λ, rounded up."""
    largest = float(values[-1])
    orders = np.geomspace(*_ORDERS) / largest
    logs = [
        order * largest + math.log(float(shares @ np.exp(order * (values - largest))))
        for order in orders
    ]
    return orders, np.array(logs) + 1e-12 * (1 + orders * largest)


@lru_cache(maxsize=16)
def _products(strategy: Strategy, turn: int) -> tuple[Array, Array]:
    """Sizes of G_UV, rising, and their shares of two uniform steps U and V of a group.

    Sizes are rounded up; those of a group are no larger than those of the first, or than the
    largest at the same places.
    """
    column = strategy.strategy_coefficients
    products = (
        _dense_products(np.abs(_matrix(strategy)), turn)
        if column is None
        else _toeplitz_products(np.abs(column), turn)
    )
    pieces = list(products)
    largest = max(float(sizes.max()) for sizes, _ in pieces)
    shares = np.zeros(_VALUES + 1)
    for sizes, counted in pieces:
        places = np.ceil(sizes / largest * _VALUES * (1 - 4 * UNIT)).clip(0, _VALUES)
        shares += np.bincount(places.astype(np.int64), counted, minlength=_VALUES + 1)
    return np.arange(_VALUES + 1) / _VALUES * largest * (1 + 8 * UNIT), shares / shares.sum()


def _matrix(strategy: Strategy) -> Array:
    if strategy.steps > MAX_DENSE:
        raise TooLarge(f"a strategy of kind {strategy.kind} over {strategy.steps} steps")
    return strategy.strategy_matrix()


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
    """By the distance of two steps, those of one band of later steps at a time."""
    total = len(column)
    if total > MAX_STEPS:
        raise TooLarge(f"a strategy over {total} steps")
    steps = -(-total // turn)
    slack = transform_slack(total) * float(column @ column)
    bands = min(steps, max(_BANDS[0], min(_BANDS[1], _TRANSFORMED // total)))
    for band in np.array_split(np.arange(steps), bands):
        first, last = int(band[0]), int(band[-1])
        overlap = column[: total - first * turn]
        # ⟨c, S^d c⟩ of columns that the end of the run cuts after ``overlap``.
        shifted = fftconvolve(column, overlap[::-1])[len(overlap) - 1 :][::turn]
        sizes = shifted[: last + 1] + slack
        pairs = np.minimum(len(band), last + 1 - np.arange(len(sizes))) * 2.0
        pairs[0] /= 2
        yield sizes, pairs
