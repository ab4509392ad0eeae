"""b-min-sep with the steps disclosed in which a record may have taken part.

Steps are in blocks of L <= b, each with k stretches of m steps. A block has a phase, uniform in
0..m-1, and a record takes part in the block at most once, in the step of that phase in one of its
stretches. The phases are drawn independently of the data, so disclosing them is sound. Of the
remaining steps, a column c_i meets few others: noise of standard deviation σ/s_i in each, with
s_i² = Σ_j ⟨|c_i|, |c_j|⟩ over these steps, is part of noise of standard deviation σ. How many s are
large depends on the phases, and is bounded except with probability ``conceded``.

>>> from affidavit.mechanisms.strategies.toeplitz import Toeplitz
>>> strategy = Toeplitz.from_strategy([0.8, 0.48, 0.36], steps=1000)
>>> disclosed = disclosed_steps(strategy, separation=3, probability=0.01, stretches=1)
>>> round(disclosed.probability, 3), [(round(s, 3), n) for s, n in disclosed.norms]
(0.02, [(1.358, 182), (1.255, 170), (1.248, 148)])

Reference: docs/theorems/correlated-noise.md, Theorem 15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from affidavit.mechanisms.strategies.numerics import UNIT, Array, gamma, root_up
from affidavit.mechanisms.strategies.strategy import COEFFICIENT_ERROR, Strategy, TooLarge

CONCEDED_PROBABILITY = 1e-18
"""The probability that the numbers of large s exceed their bounds, which adds to δ."""
MAX_PHASES, MAX_BANDS, MAX_DENSE_STEPS = 64, 4096, 2048
_SHARES = (0.02, 0.1, 0.25, 0.5, 0.75)
"""Shares of the disclosed steps at which the levels of s are set."""
_ORDERS = np.geomspace(0.02, 4.0, 24)
"""Orders of the moments that bound the numbers of large s."""
_TIE_TOLERANCE = 1e-12
"""Relative difference of two s² that counts as rounding."""
_MOMENT_BLOCKS = 8
"""Blocks after which the growth of a moment is bounded by its last growth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DisclosedSteps:
    """Releases in which one record is drawn with at most ``probability``, given all earlier ones.

    ``norms`` are its largest moves in clip norms, each with the number of releases that have it.
    """

    probability: float
    norms: tuple[tuple[float, int], ...]
    conceded: float


@lru_cache(maxsize=32)
def disclosed_steps(
    strategy: Strategy, *, separation: int, probability: float, stretches: int
) -> DisclosedSteps | None:
    """Return the releases for blocks of k = ``stretches``, or None if the blocks do not fit.

    C has at most b = ``separation`` bands, and a record that took part in none of the last b - 1
    steps takes part with ``probability``. Raises ``TooLarge``.
    """
    phases = -(-(strategy.bands - 1) // stretches)
    length = stretches * phases
    if not 2 <= phases <= MAX_PHASES or length > separation:
        return None
    rate = _drawing_probability(probability, stretches, phases)
    if not rate < 1:
        return None
    squares = _squares(_products(strategy, 2 * length), stretches, phases)
    blocks = -(-strategy.steps // length)
    slack, stretch = _rounding(strategy)
    norms = tuple(
        (root_up(square * slack, 4) * stretch, count) for square, count in _levels(squares, blocks)
    )
    return DisclosedSteps(probability=rate, norms=norms, conceded=CONCEDED_PROBABILITY)


def products_of_columns(strategy: Strategy) -> tuple[float, ...]:
    """Return upper bounds of ⟨|c_i|, |c_j|⟩ for steps 0, 1, ... apart, in squared clip norms.

    Products of steps that are further apart are zero. Raises ``TooLarge``.
    """
    return tuple(map(float, _products(strategy, strategy.bands) * rounding_of_products(strategy)))


def rounding_of_products(strategy: Strategy) -> float:
    """Return by how much ⟨|c_i|, |c_j|⟩ may be above what is computed of C."""
    slack, stretch = _rounding(strategy)
    return slack * stretch**2 * (1 + 4 * UNIT)


def _rounding(strategy: Strategy) -> tuple[float, float]:
    """Return the relative error of computed products, and the stretch of C = (I + R)⁻¹ Ĉ."""
    slack = 1 + gamma(4 * strategy.steps + 64) + 4 * COEFFICIENT_ERROR
    return slack, (1 + 4 * UNIT) / (1 - strategy.residual)


def _drawing_probability(probability: float, stretches: int, phases: int) -> float:
    """Return the largest probability of a step given its phase and the past; ∞ if undefined."""
    missed = math.exp(phases * math.log1p(-probability)) if probability < 1 else 0.0
    earlier, ahead, largest = 0.0, 1.0, 0.0
    for _ in range(stretches):
        remaining = 1 - phases * probability * earlier
        if remaining <= 0:
            return math.inf
        largest = max(largest, phases * probability * ahead / remaining)
        earlier += ahead
        ahead *= missed
    return largest * (1 + 1e-12)


def _products(strategy: Strategy, count: int) -> Array:
    """Return the largest ⟨|c_i|, |c_j|⟩ of steps 0, 1, ... apart, shape (count,)."""
    bands = strategy.bands
    column = strategy.strategy_coefficients
    if bands > MAX_BANDS or (column is None and strategy.steps > MAX_DENSE_STEPS):
        raise TooLarge(f"a strategy of kind {strategy.kind} over {strategy.steps} steps")
    result = np.zeros(max(count, bands))
    if column is None:
        columns = np.abs(strategy.strategy_matrix()).T
        for apart in range(min(bands, len(columns))):
            products = np.einsum("ij,ij->i", columns[: len(columns) - apart], columns[apart:])
            result[apart] = products.max()
    else:
        own = np.abs(column[:bands])
        result[: len(own)] = np.correlate(own, own, "full")[len(own) - 1 :]
    return result[:count]


def _squares(products: Array, stretches: int, phases: int) -> Array:
    """Return s² of the steps of a block, shape (k, m, m, m).

    The last axes are the phases of the previous, this and the next block.
    """
    step = np.arange(stretches)
    within = products[np.abs(step[:, None] - step) * phases].sum(axis=1)
    # The distance between the stretches of two blocks, the later one first, and their phases.
    apart = (stretches + step[:, None] - step) * phases
    later = np.arange(phases)[None, :] - np.arange(phases)[:, None]
    met = products[apart[:, :, None, None] + later]
    before, after = met.sum(axis=1), met.sum(axis=0)
    return np.asarray(within[:, None, None, None] + before[:, :, :, None] + after[:, None, :, :])


def _levels(squares: Array, blocks: int) -> list[tuple[float, int]]:
    """Return bounds of the descending s² of all blocks, and how many steps have each.

    They hold except with probability ``CONCEDED_PROBABILITY``.
    """
    total = blocks * len(squares)
    ordered = np.sort(squares, axis=None)
    places = [int(len(ordered) * (1 - share)) for share in _SHARES]
    limits = sorted({float(ordered[place]) for place in places}, reverse=True)
    result, counted = [], 0
    highest = float(ordered[-1])
    for limit in (limit for limit in limits if limit * (1 + _TIE_TOLERANCE) < highest):
        exceeding = (squares > limit * (1 + _TIE_TOLERANCE)).sum(axis=0).astype(float)
        most = min(total, _count_bound(exceeding, blocks, CONCEDED_PROBABILITY / len(limits)))
        if most > counted:
            result.append((highest, most - counted))
            counted = most
        highest = limit * (1 + _TIE_TOLERANCE)
    if total > counted:
        result.append((highest, total - counted))
    return result


def _count_bound(exceeding: Array, blocks: int, probability: float) -> int:
    """Return a bound of a count over all blocks, exceeded with at most ``probability`` (Chernoff).

    ``exceeding``, shape (m, m, m), is the count in a block by the phases around it.
    """
    least = math.inf
    for order in _ORDERS:
        factors = np.exp(order * exceeding) / len(exceeding)
        moments = np.ones(exceeding.shape[:2])
        log_mean, rounds = 0.0, min(blocks, _MOMENT_BLOCKS)
        for _ in range(rounds):
            grown = np.einsum("uv,uvw->vw", moments, factors)
            growth = float((grown / moments).max())
            scale = float(grown.max())
            moments, log_mean = grown / scale, log_mean + math.log(scale)
        log_mean += math.log(float(moments.mean())) + (blocks - rounds) * math.log(growth)
        least = min(least, (log_mean - math.log(probability)) / order)
    return math.floor(least * (1 + 1e-9) + 1e-6)
