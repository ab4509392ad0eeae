"""Means of sums without a lattice, against the enumeration of all sums."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from affidavit.accountants.random_allocation.inverted_sums import Contour, Saddle, upper_excess
from tests.support.random_seeds import examples, seeded


def truth(nodes: np.ndarray, masses: np.ndarray, copies: int, threshold: float) -> float:
    sums = itertools.product(range(nodes.size), repeat=copies)
    return math.fsum(
        math.prod(masses[i] for i in chosen) * max(0.0, sum(nodes[i] for i in chosen) - threshold)
        for chosen in sums
    )


def test_any_contour_gives_an_upper_bound_and_a_good_one_a_narrow_one() -> None:
    draw = random.Random(seeded("means of sums"))
    for _ in range(examples(60)):
        nodes = np.sort([draw.gauss(0, 1) * draw.choice((1, 10)) for _ in range(5)])
        masses = np.array([draw.random() ** 3 for _ in nodes])
        masses /= masses.sum() * draw.choice((1.0, 1.5))
        copies = draw.choice((1, 2, 4))
        threshold = copies * draw.uniform(float(nodes[1]), float(nodes[-1]))
        exact = truth(nodes, masses, copies, threshold)
        if exact < 1e-12:
            continue
        saddle = Saddle.of([(nodes, np.log(masses), copies)], threshold, 1.0)
        good = upper_excess([(nodes, masses, copies)], threshold, saddle.contour(1e-4, exact))
        assert exact * (1 - 1e-12) <= good <= exact * 1.02
        bad = Contour(
            tilt=saddle.tilt * math.exp(draw.uniform(-2, 2)),
            period=draw.uniform(1, 100),
            noise=draw.uniform(0, 1) / saddle.tilt,
            frequencies=draw.choice((3, 40, 2000)),
        )
        assert upper_excess([(nodes, masses, copies)], threshold, bad) >= exact * (1 - 1e-12)


@pytest.mark.parametrize("copies", [1, 1000])
def test_normal_values_have_the_mean_of_their_sum(copies: int) -> None:
    nodes = np.linspace(-9.0, 9.0, 721)
    masses = np.exp(-(nodes**2) / 2) / math.sqrt(2 * math.pi) * (nodes[1] - nodes[0])
    deviation = math.sqrt(copies)
    for z in (0.5, 3.0, 6.0):
        normal = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        exact = deviation * (normal - z * math.erfc(z / math.sqrt(2)) / 2)
        saddle = Saddle.of([(nodes, np.log(masses), copies)], z * deviation, 1.0)
        bound = upper_excess([(nodes, masses, copies)], z * deviation, saddle.contour(1e-3, exact))
        assert exact <= bound <= exact * 1.005


def test_frequencies_that_fail_leave_chernoffs_bound() -> None:
    nodes, masses = np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    copies, tilt = 1000, 1.0
    overflowing = Contour(tilt=tilt, period=1e-16, noise=1.0, frequencies=3)
    chernoff = math.exp(copies * math.log(math.cosh(tilt)) + 0.5) / (math.e * tilt)
    bound = upper_excess([(nodes, masses, copies)], 0.0, overflowing)
    assert chernoff * (1 - 1e-6) <= bound <= chernoff * (1 + 1e-6)
