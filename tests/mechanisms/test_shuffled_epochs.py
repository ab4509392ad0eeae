"""Two shuffled lots cost at most one sample of both (docs/theorems/shuffled-lots.md, Theorem 2)."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.random_seeds import examples, seeded

Array = NDArray[np.float64]
POINTS, REACH = 241, 7.0
FACTORS = np.exp(np.linspace(0, 3, 13))


def normal(at: Array, mean: float, sigma: float) -> Array:
    return np.exp(-(((at - mean) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))


def density(records: list[float], lot: int, sigma: float, at: Array, carry: float = 0) -> Array:
    """The joint density of what the first two lots of a uniform order show, shape (n, n).

    The second output adds ``carry`` times the first lot's sum: C has the rows (1, 0), (carry, 1).
    """
    result = np.zeros((len(at), len(at)))
    places = range(len(records))
    for first in itertools.combinations(places, lot):
        for second in itertools.combinations(set(places) - set(first), lot):
            sums = [sum(records[place] for place in chosen) for chosen in (first, second)]
            sums[1] += carry * sums[0]
            result += np.multiply.outer(*(normal(at, mean, sigma) for mean in sums))
    others = math.comb(len(records) - lot, lot)
    return result / (math.comb(len(records), lot) * others)


def deltas(one: Array, other: Array, step: float) -> Array:
    """The larger δ of both orders at each of ``FACTORS``, by quadrature."""
    orders = (one, other), (other, one)
    return np.array(
        [max(float(np.maximum(p - a * q, 0).sum()) for p, q in orders) * step for a in FACTORS]
    )


@pytest.mark.parametrize(("lot", "carry"), [(1, 0.0), (2, 0.0), (1, 0.8), (2, -0.6)])
def test_two_lots_of_an_order_cost_at_most_a_sample_of_both(lot: int, carry: float) -> None:
    draw, longest = random.Random(seeded(f"shuffled lots of {lot}")), math.hypot(1, carry)
    for _ in range(examples(60 if not carry else 25)):
        size, sigma = draw.randint(2 * lot + 1, 5 + lot), draw.choice([0.5, 1.0, 2.5])
        reach = REACH * sigma + lot * (1 + abs(carry))
        at = np.linspace(-reach, reach, POINTS)
        step = at[1] - at[0]
        others = [draw.choice([-1.0, 0.0, 1.0, draw.uniform(-1, 1)]) for _ in range(size - 1)]
        if draw.random() < 0.5:
            others = [-1.0] * (size - 1)
        here, there = (
            density([record, *others], lot, sigma, at, carry)
            for record in (1.0, draw.choice([-1.0, 0.0]))
        )
        rate = 2 * lot / size
        line = np.linspace(-12 * sigma, 12 * sigma + 3, 20_001)
        without = normal(line, 0, sigma)
        sampled = (1 - rate) * without + rate * normal(line, 2 * longest, sigma)
        bound = np.array([np.maximum(sampled - a * without, 0).sum() for a in FACTORS])
        most = bound * (line[1] - line[0])
        assert np.all(deltas(here, there, step**2) <= most * (1 + 1e-3) + 1e-9), (size, sigma)


def test_a_sample_without_the_last_lot_costs_too_little() -> None:
    """The law can fail: a rate of one lot in place of two is refuted."""
    at = np.linspace(-9.0, 9.0, POINTS)
    here, there = (density([x, -1.0, -1.0, -1.0], 1, 1.0, at) for x in (1.0, -1.0))
    line = np.linspace(-12.0, 14.0, 20_001)
    sampled = 0.75 * normal(line, 0, 1.0) + 0.25 * normal(line, 2, 1.0)
    bound = np.array([np.maximum(sampled - a * normal(line, 0, 1.0), 0).sum() for a in FACTORS])
    shown = deltas(here, there, (at[1] - at[0]) ** 2)
    assert np.any(shown > bound * (line[1] - line[0]) * 1.01)
