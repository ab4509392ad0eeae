"""b-min-sep where it is told in which few steps a record may have taken part.

Steps are in blocks of L <= b, each of them in k stretches of m. A block has a phase U, uniform in
0..m-1 and independent of all others, and a record takes part in it at most once, in the step U of
one of its stretches. With the right chances, none above ``probability``, that is b-min-sep: the
phases are drawn with nothing known of the data, so that it costs nothing less to tell them.

Of the steps that remain a column c_i meets few others. Noise of deviation σ/s_i in each,
independent of all others, with s_i² = Σ_j ⟨|c_i|, |c_j|⟩ over these steps, is in noise of deviation
σ. How many of them have a large s depends on the phases, and is bounded but for the chance
``conceded``.

>>> from affidavit.mechanisms.strategies.toeplitz import Toeplitz
>>> strategy = Toeplitz.from_strategy([0.8, 0.48, 0.36], steps=1000)
>>> told = disclosed_steps(strategy, separation=3, probability=0.01, stretches=1)
>>> round(told.probability, 3), [(round(s, 3), n) for s, n in told.norms]
(0.02, [(1.358, 182), (1.255, 170), (1.248, 148)])

Reference: docs/theorems/correlated-noise.md, Theorem 15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.numerics import UNIT, gamma, root_up
from affidavit.mechanisms.strategies.strategy import EVALUATION, Strategy, TooLarge

Array = NDArray[np.float64]

CONCEDED = 1e-18
MAX_PHASES, MAX_BANDS, MAX_DENSE = 64, 4096, 2048
_SHARES = (0.02, 0.1, 0.25, 0.5, 0.75)
"""Of the steps that are told, those with an s that is counted as larger than the others'."""
_ORDERS = np.geomspace(0.02, 4.0, 24)
"""Of the moments that bound how many there are."""
_ALIKE = 1e-12
"""Relative difference of two s² that is rounding."""
_ROUNDS = 8
"""Blocks after which a moment is known to grow no faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DisclosedSteps:
    """So many releases of one record each, drawn with ``probability`` at most whatever is known.

    ``norms`` are its largest moves in clip norms over σ, with how many releases have them.
    """

    probability: float
    norms: tuple[tuple[float, int], ...]
    conceded: float


@lru_cache(maxsize=32)
def disclosed_steps(
    strategy: Strategy, *, separation: int, probability: float, stretches: int
) -> DisclosedSteps | None:
    """The releases where each block has so many ``stretches``, k.

    C has at most b = ``separation`` bands, and a record that took part in none of the last b - 1
    steps does with ``probability``. None where the blocks do not fit. Raises ``TooLarge``.
    """
    phases = -(-(strategy.bands - 1) // stretches)
    length = stretches * phases
    if not 2 <= phases <= MAX_PHASES or length > separation:
        return None
    rate = _rate(probability, stretches, phases)
    if not rate < 1:
        return None
    squares = _squares(_products(strategy, 2 * length), stretches, phases)
    blocks = -(-strategy.steps // length)
    slack, stretch = _rounding(strategy)
    norms = tuple(
        (root_up(square * slack, 4) * stretch, count) for square, count in _levels(squares, blocks)
    )
    return DisclosedSteps(probability=rate, norms=norms, conceded=CONCEDED)


def products_of_columns(strategy: Strategy) -> tuple[float, ...]:
    """At least ⟨|c_i|, |c_j|⟩ of steps 0, 1, ... apart, in squared clip norms; none are beyond.

    Raises ``TooLarge``.
    """
    slack, stretch = _rounding(strategy)
    products = _products(strategy, strategy.bands)
    return tuple(map(float, products * (slack * stretch**2 * (1 + 4 * UNIT))))


def _rounding(strategy: Strategy) -> tuple[float, float]:
    """What products of computed columns grow by, and what norms grow by for C = (I + R)⁻¹ Ĉ."""
    slack = 1 + gamma(4 * strategy.steps + 64) + 4 * EVALUATION
    return slack, (1 + 4 * UNIT) / (1 - strategy.residual)


def _rate(probability: float, stretches: int, phases: int) -> float:
    """The largest chance of a step, given its phase and all before; infinite if there is none."""
    missed = math.exp(phases * math.log1p(-probability)) if probability < 1 else 0.0
    earlier, ahead, largest = 0.0, 1.0, 0.0
    for _ in range(stretches):
        left = 1 - phases * probability * earlier
        if left <= 0:
            return math.inf
        largest = max(largest, phases * probability * ahead / left)
        earlier += ahead
        ahead *= missed
    return largest * (1 + 1e-12)


def _products(strategy: Strategy, most: int) -> Array:
    """The largest ⟨|c_i|, |c_j|⟩ of steps 0, 1, ..., ``most`` - 1 apart; shape (most,)."""
    bands = strategy.bands
    column = strategy.strategy_coefficients
    if bands > MAX_BANDS or (column is None and strategy.steps > MAX_DENSE):
        raise TooLarge(f"a strategy of kind {strategy.kind} over {strategy.steps} steps")
    result = np.zeros(max(most, bands))
    if column is None:
        columns = np.abs(strategy.strategy_matrix()).T
        for apart in range(min(bands, len(columns))):
            products = np.einsum("ij,ij->i", columns[: len(columns) - apart], columns[apart:])
            result[apart] = products.max()
    else:
        own = np.abs(column[:bands])
        result[: len(own)] = np.correlate(own, own, "full")[len(own) - 1 :]
    return result[:most]


def _squares(products: Array, stretches: int, phases: int) -> Array:
    """s² of the steps of a block, shape (k, m, m, m), by the phases of the block before, its own
    and the next one's."""
    step = np.arange(stretches)
    within = products[np.abs(step[:, None] - step) * phases].sum(axis=1)
    # How far apart the stretches of two blocks are, the later one's first, and the phases of both.
    apart = (stretches + step[:, None] - step) * phases
    later = np.arange(phases)[None, :] - np.arange(phases)[:, None]
    met = products[apart[:, :, None, None] + later]
    before, after = met.sum(axis=1), met.sum(axis=0)
    return np.asarray(within[:, None, None, None] + before[:, :, :, None] + after[:, None, :, :])


def _levels(squares: Array, blocks: int) -> list[tuple[float, int]]:
    """Values that s² of all blocks, falling, is nowhere above, but for the chance ``CONCEDED``."""
    total = blocks * len(squares)
    ordered = np.sort(squares, axis=None)
    places = [int(len(ordered) * (1 - share)) for share in _SHARES]
    limits = sorted({float(ordered[place]) for place in places}, reverse=True)
    result, counted = [], 0
    highest = float(ordered[-1])
    for limit in (limit for limit in limits if limit * (1 + _ALIKE) < highest):
        exceeding = (squares > limit * (1 + _ALIKE)).sum(axis=0).astype(float)
        most = min(total, _most_often(exceeding, blocks, CONCEDED / len(limits)))
        if most > counted:
            result.append((highest, most - counted))
            counted = most
        highest = limit * (1 + _ALIKE)
    if total > counted:
        result.append((highest, total - counted))
    return result


def _most_often(exceeding: Array, blocks: int, chance: float) -> int:
    """The steps of all blocks are more than that with at most this chance, by a moment (Chernoff).

    ``exceeding``, of shape (m, m, m), counts those of a block by the phases around it.
    """
    least = math.inf
    for order in _ORDERS:
        factors = np.exp(order * exceeding) / len(exceeding)
        moments = np.ones(exceeding.shape[:2])
        log_mean, rounds = 0.0, min(blocks, _ROUNDS)
        for _ in range(rounds):
            grown = np.einsum("uv,uvw->vw", moments, factors)
            growth = float((grown / moments).max())
            scale = float(grown.max())
            moments, log_mean = grown / scale, log_mean + math.log(scale)
        log_mean += math.log(float(moments.mean())) + (blocks - rounds) * math.log(growth)
        least = min(least, (log_mean - math.log(chance)) / order)
    return math.floor(least * (1 + 1e-9) + 1e-6)
