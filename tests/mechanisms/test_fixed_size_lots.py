"""Correlated noise over lots of fixed size, by enumeration of who is drawn and by quadrature."""

from __future__ import annotations

import math
import random
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, hypergeom

from affidavit.accountants.composition import leaves
from affidavit.accountants.displaced_sum import DisplacedSumAttack
from affidavit.accountants.fixed_size_run import FixedSizeRunCurve
from affidavit.accountants.fourier_accountant import FourierAccountant, run_curve
from affidavit.accountants.protocol import PrivacyCurve
from affidavit.assessment import certify
from affidavit.mechanisms.fixed_size_lots import at_least_drawn, at_most_drawn
from affidavit.mechanisms.lowering import Lowered, lower
from affidavit.plan import (
    events,
    plan_from,
)
from tests.support.random_seeds import examples, seeded

Array = NDArray[np.float64]
SIZE, LOT = 4, 2
LOTS = [*combinations(range(SIZE), LOT)]
MATRIX = np.array([[1.0, 0.0], [0.8, 1.0]])
EPSILONS = 0.05, 0.3, 1.0, 2.0
EDGE = np.linspace(-12.0, 12.0, 121)
GRID = np.stack(np.meshgrid(EDGE, EDGE, indexing="ij"), axis=-1).reshape(-1, 2)
CELL = (EDGE[1] - EDGE[0]) ** 2


def lowered(sigma: float, adjacency: str = "replace_one", **dataset: Any) -> Lowered:
    """Two steps over lots of two of four records."""
    document = {
        "version": 1,
        "adjacency": adjacency,
        "dataset": {"size": SIZE, **dataset},
        "sampling": {"scheme": "fixed_size", "lot_size": LOT},
        "steps": 2,
        "noise": {"kind": "bidiagonal", "lambda": 0.8},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": sigma}],
        "target": {"delta": 1e-5},
    }
    return lower(plan_from(document))


def density(gradients: Array, sigma: float) -> Array:
    """The density of the run on the grid; a record's gradient by step, shape (records, 2)."""
    result = np.zeros(len(GRID))
    for drawn in product(LOTS, repeat=2):
        sums = [gradients[list(lot), step].sum() for step, lot in enumerate(drawn)]
        squares = ((GRID - MATRIX @ sums) ** 2).sum(axis=1)
        result += np.exp(-squares / (2 * sigma**2))
    return result / (len(LOTS) ** 2 * 2 * math.pi * sigma**2)


def largest_delta(one: Array, other: Array, epsilon: float) -> float:
    """δ at ``epsilon``, of both directions, by the midpoint rule."""
    return max(
        float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * CELL)
        for p, q in ((one, other), (other, one))
    )


@pytest.mark.parametrize("records", [1, 2])
def test_no_data_sets_cost_more_than_the_upper_end_and_the_attack_costs_the_lower_one(
    records: int,
) -> None:
    draw, sigma = random.Random(seeded(52)), 1.5
    user = {"unit": "user", "contributions_per_user": records} if records > 1 else {}
    run = lowered(sigma, **user)
    members = [event.events[0] for event in events.alternatives(run.event())]
    bounds: list[PrivacyCurve] = [
        FourierAccountant().curve(event)
        for event in members
        if isinstance(event, events.GaussianMixture)
    ]
    bounds += [curve for event in members if (curve := run_curve(event)) is not None]
    assert len(bounds) >= 3
    upper = [min(bound.delta(e).upper for bound in bounds) for e in EPSILONS]
    attained = [
        leaf
        for event in events.alternatives(run.attained())
        for leaf, _ in leaves(event)
        if isinstance(leaf, events.GaussianMixture)
    ]
    assert attained
    lower_end = [
        max(FourierAccountant().curve(event).delta(e).lower for event in attained) for e in EPSILONS
    ]
    # The records of the unit lie opposite to all others, and their replacements do not.
    ours = np.full((SIZE, 2), -1.0)
    theirs = ours.copy()
    ours[:records] = 1.0
    attack = density(ours, sigma), density(theirs, sigma)
    for epsilon, least, most in zip(EPSILONS, lower_end, upper, strict=True):
        assert least <= largest_delta(*attack, epsilon) * (1 + 1e-4) <= most * (1 + 2e-4)
    for _ in range(examples(60)):
        one = np.array(
            [[draw.choice((-1.0, 1.0, draw.uniform(-1, 1))) for _ in "ab"] for _ in range(SIZE)]
        )
        other = one.copy()
        other[:records] = [[draw.choice((-1.0, 0.0, 1.0)) for _ in "ab"] for _ in range(records)]
        pair = density(one, sigma), density(other, sigma)
        for epsilon, most in zip(EPSILONS, upper, strict=True):
            assert largest_delta(*pair, epsilon) <= most * (1 + 1e-4)


@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_others_that_oppose_a_zeroed_record_show_what_the_attack_says(sigma: float) -> None:
    """The attack sees one direction of the two steps; steps are no test of their own."""
    tested = lowered(sigma, "zero_out").phases[0].attack
    assert tested is not None
    sums, number = tested
    assert isinstance(sums, events.DisplacedSum)
    assert number == 1
    others = -np.ones((SIZE, 2))
    present, zeroed = others.copy(), others.copy()
    present[0], zeroed[0] = 1.0, 0.0
    both = density(present, sigma), density(zeroed, sigma)
    for epsilon in EPSILONS[:3]:
        exact = largest_delta(*both, epsilon)
        shown = DisplacedSumAttack(sums).delta(epsilon).lower
        assert 0.8 * exact - 1e-4 <= shown <= exact * 1.005 + 1e-6


def test_what_both_data_sets_share_is_shared_out_as_well_as_can_be() -> None:
    """No share, by quadrature of each term, bounds δ below the formula, and one comes near."""
    draw = random.Random(seeded(18))
    places = np.linspace(-12.0, 20.0, 8_001)
    normal = np.exp(-np.square(places) / 2) / math.sqrt(2 * math.pi) * (places[1] - places[0])
    for _ in range(examples(40)):
        weights = np.array([draw.uniform(0.05, 1.0) for _ in range(3)])
        weights[0] *= draw.choice((0.1, 1.0, 30.0))
        weights /= weights.sum()
        weights[0] = 1 - math.fsum(weights[1:])
        moves = np.array([1.0, 2.0]) / draw.uniform(0.5, 4.0)
        epsilon = draw.uniform(0.1, 4.0)
        run = events.FixedSizeRun(weights=tuple(weights), noise_multiplier=1 / float(moves[0]))
        ratios = np.exp(np.outer(moves, places) - np.square(moves)[:, None] / 2)
        parts = np.linspace(0, 1, 101)
        # The share of the first distance, shape (101, 1), and the rest.
        totals = np.zeros(101)
        for share, p, ratio in zip((parts, 1 - parts), weights[1:], ratios, strict=True):
            lost = math.expm1(epsilon) * share[:, None] * weights[0] + math.exp(epsilon) * p
            totals += np.maximum(p * ratio - lost, 0) @ normal
        best, bound = float(totals.min()), FixedSizeRunCurve(run).delta(epsilon).upper
        assert bound <= best * (1 + 1e-5) + 1e-12
        assert best <= bound * 1.05 + 1e-7


def test_a_user_is_drawn_no_more_and_no_less_often_than_by_independent_draws() -> None:
    draw = random.Random(seeded(7))
    for _ in range(examples(1000)):
        size = draw.randint(3, 60)
        lot, records = draw.randint(1, size - 1), draw.randint(1, min(8, size))
        sizes: dict[str, Any] = {"dataset_size": size, "sample_size": lot, "noise_multiplier": 1.0}
        leaf = (
            events.WithoutReplacementGaussian(**sizes)
            if records == 1
            else events.WithoutReplacementGroupGaussian(records=records, **sizes)
        )
        counts = np.arange(records + 1)
        real = hypergeom.sf(counts, size, records, lot)
        least, most = at_least_drawn(leaf), at_most_drawn(leaf)
        fewer = binom.sf(counts, getattr(least, "records", 1), least.sampling_probability)
        assert np.all(fewer <= real + 1e-12)
        assert (most is None) == (lot >= size - records + 1)
        if most is not None:
            more = binom.sf(counts, records, most.sampling_probability)
            assert np.all(real <= more + 1e-12)


def test_a_long_run_with_little_noise_is_bounded_by_who_is_drawn() -> None:
    """Without the law of the participations the two ends were a thousand times apart."""
    plan = plan_from(
        {
            "version": 1,
            "adjacency": "replace_one",
            "dataset": {"size": 60_000},
            "sampling": {"scheme": "fixed_size", "lot_size": 1024},
            "steps": 1000,
            "noise": {"kind": "blt", "decays": [0.999, 0.9], "scales": [0.06, 0.3]},
            "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 2.0}],
            "target": {"delta": 1e-5},
        }
    )
    epsilon = certify(plan, second_opinion=False).epsilon
    assert epsilon is not None
    assert epsilon.upper <= 1.5 * epsilon.lower
