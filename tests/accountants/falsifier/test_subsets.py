"""A record in k of T steps shows no more than one allocation to each block of a partition.

Laws are by quadrature over all steps, without the engine: data sets with gradients of any length up
to the clip norm and any sign. A claim of blocks that are all the longer ones must be refuted, and
bounds by conditional moments are little above the curve.
"""

from __future__ import annotations

import functools
import math
import random
from itertools import combinations

import numpy as np
import pytest

from affidavit.accountants.random_allocation import RemovedRecordBound
from affidavit.plan.events import AllocatedRecord
from tests.support.random_seeds import seeded

Array = np.ndarray
RATIOS = np.exp(np.linspace(-3.0, 5.0, 13))
CASES = {"2 of 3": (3, 2), "2 of 4": (4, 2), "3 of 4": (4, 3)}


def line(sigma: float, steps: int) -> Array:
    """Releases of one step, in standard deviations of the noise."""
    return np.linspace(-5 - 1 / sigma, 5 + 1 / sigma, 61 if steps < 4 else 21)


def shifted(points: Array, mean: float) -> Array:
    """Chances of the releases of a step, by the trapezoid rule."""
    return np.exp(-((points - mean) ** 2) / 2) * (points[1] - points[0]) / math.sqrt(2 * math.pi)


def in_some(points: Array, moves: list[float], taken: int) -> Array:
    """The law of the steps of which a record moves ``taken`` by its ``moves``."""
    laws = [
        functools.reduce(
            np.multiply.outer,
            [shifted(points, moves[t] if t in some else 0.0) for t in range(len(moves))],
        ).ravel()
        for some in combinations(range(len(moves)), taken)
    ]
    return np.mean(laws, axis=0)


def blocks(points: Array, move: float, lengths: tuple[int, ...]) -> tuple[Array, Array]:
    """The laws with the record in one step of each block, and without it."""
    with_record = [in_some(points, [move] * length, 1) for length in lengths]
    without = [in_some(points, [0.0] * length, 1) for length in lengths]
    return tuple(  # type: ignore[return-value]
        functools.reduce(np.multiply.outer, laws).ravel() for laws in (with_record, without)
    )


def curve(first: Array, second: Array) -> Array:
    """The hockey stick at the ratios, both orders, shape (2, n)."""
    return np.array(
        [
            [np.maximum(p - ratio * q, 0.0).sum() for ratio in RATIOS]
            for p, q in ((first, second), (second, first))
        ]
    )


def claimed(steps: int, taken: int) -> tuple[int, ...]:
    """Lengths of the blocks."""
    length, longer = divmod(steps, taken)
    return (length + 1,) * longer + (length,) * (taken - longer)


@pytest.mark.parametrize("name", CASES)
def test_no_data_set_shows_more_than_the_blocks_of_a_partition(name: str) -> None:
    (steps, taken), draw = CASES[name], random.Random(f"{seeded(name)}")
    for sigma in (0.5, 1.0, 2.5):
        points = line(sigma, steps)
        bound = curve(*blocks(points, 1 / sigma, claimed(steps, taken)))
        for number in range(3):
            # Quadrature is exact for the signs, as the points are symmetric.
            moves = [draw.choice((-1.0, 1.0)) for _ in range(steps)]
            if number and steps < 4:
                moves = [draw.uniform(-1, 1) for _ in range(steps)]
            law = in_some(points, [move / sigma for move in moves], taken)
            none = in_some(points, [0.0] * steps, taken)
            assert np.all(curve(law, none) <= bound + (1e-4 if steps < 4 else 1e-9))


def test_a_claim_of_longer_blocks_is_refuted() -> None:
    points = line(0.5, 4)
    law, none = in_some(points, [2.0] * 3, 2), in_some(points, [0.0] * 3, 2)
    assert np.any(curve(law, none) > curve(*blocks(points, 2.0, (2, 2))) + 1e-4)


@pytest.mark.soak
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.8, 2.0), (1.0, 1.0), (2.0, 0.5)])
def test_bounds_by_conditional_moments_are_little_above_the_curve(
    sigma: float, epsilon: float
) -> None:
    points = np.linspace(-6, 6 + 1 / sigma, 161)
    law, none = in_some(points, [1 / sigma] * 3, 2), in_some(points, [0.0] * 3, 2)
    exact = float(np.maximum(law - math.exp(epsilon) * none, 0.0).sum())
    record = AllocatedRecord(steps=3, participations=2, noise_multiplier=sigma)
    assert exact * 0.999 <= RemovedRecordBound(record).delta(epsilon).upper <= 1.1 * exact
