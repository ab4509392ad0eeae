"""Records that are replaced, and users, under cyclic Poisson sampling, by quadrature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.accountants.fourier_accountant import FourierAccountant, run_curve
from affidavit.accountants.overlapping_columns import OverlappingColumnsCurve
from affidavit.assessment import Solver, certify
from affidavit.mechanisms.lowering import lower
from affidavit.plan import (
    Plan,
    events,
    plan_from,
)

Array = NDArray[np.float64]
CHANCE, SIGMA = 0.2, 0.8
MATRIX = np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.375, 0.5, 1.0]])
"""C of the square root, whose second row a record of the first group reaches."""
EDGE = np.linspace(-6.0, 6.0, 41)
GRID = np.stack(np.meshgrid(EDGE, EDGE, EDGE, indexing="ij"), axis=-1).reshape(-1, 3)
CELL = (EDGE[1] - EDGE[0]) ** 3
EPSILONS = 0.2, 1.0, 2.5


def plan(steps: int = 3, sigma: float = SIGMA, **changes: Any) -> Plan:
    """Two groups, of which each step draws a record with probability 0.2."""
    return plan_from(
        {
            "version": 1,
            "adjacency": "replace_one",
            "dataset": {"size": 1000},
            "sampling": {"scheme": "cyclic_poisson", "lot_size": 100, "groups": 2},
            "steps": steps,
            "noise": {"kind": "sqrt"},
            "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": sigma}],
            "target": {"delta": 1e-5},
            **changes,
        }
    )


def density(group: int, gradients: tuple[float, ...]) -> Array:
    """The density of the run of three steps with a record of ``group`` among zeros."""
    means, chances = [np.zeros(3)], [1.0]
    for step in range(group, 3, 2):
        moved = [mean + gradients[step] * MATRIX[:, step] for mean in means]
        chances = [chance * c for c in (1 - CHANCE, CHANCE) for chance in chances]
        means += moved
    squares = [((GRID - mean) ** 2).sum(axis=1) for mean in means]
    densities = [np.exp(-square / (2 * SIGMA**2)) for square in squares]
    total = sum(chance * one for chance, one in zip(chances, densities, strict=True))
    return np.asarray(total / (2 * math.pi * SIGMA**2) ** 1.5)


def test_a_replaced_record_costs_no_more_wherever_its_replacement_is() -> None:
    ones, signs = (1.0, 1.0, 1.0), (-1.0, -1.0, -1.0)
    pairs = {
        "same group": (density(0, ones), density(0, signs)),
        "other group": (density(0, ones), density(1, signs)),
        "alike": (density(0, ones), density(1, ones)),
        "signs": (density(0, (1.0, 1.0, -1.0)), density(1, (1.0, 1.0, 1.0))),
    }
    lowered = lower(plan())
    curve = Solver(lowered=lowered, engine=FourierAccountant()).bracketing_curve(lowered)
    (columns,) = (
        one
        for bound in events.alternatives(lowered.event())
        if isinstance(one := run_curve(bound), OverlappingColumnsCurve)
    )
    for epsilon in EPSILONS:
        delta = curve.delta(epsilon)
        costs = {
            name: max(
                float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * CELL)
                for p, q in ((one, other), (other, one))
            )
            for name, (one, other) in pairs.items()
        }
        assert max(costs.values()) <= delta.upper * (1 + 1e-3)
        assert max(costs.values()) <= columns.delta(epsilon).upper
        # What is attained is attained by a replacement in the same group.
        assert delta.lower <= costs["same group"] * (1 + 1e-3)


def test_a_record_that_is_drawn_once_at_most_costs_what_a_poisson_sample_does() -> None:
    epsilon = certify(plan(steps=2), second_opinion=False).epsilon
    assert epsilon is not None
    # The column of the first step.
    length = math.hypot(1.0, 0.5)
    pair = events.PoissonSubsampledGaussian(
        sampling_probability=CHANCE, noise_multiplier=SIGMA / length, pair="replace_one"
    )
    truth = FourierAccountant().curve(events.Repeated(event=pair, count=1)).epsilon(1e-5)
    assert epsilon.lower == pytest.approx(truth.lower, rel=1e-5)
    assert epsilon.upper == pytest.approx(truth.upper, rel=1e-5)


def test_a_replaced_record_of_a_long_memory_has_ends_less_than_twice_apart() -> None:
    """A chain of two neighbours costs more than twice what the attack shows."""
    epsilon = certify(
        plan(
            steps=2113,
            sigma=1.63,
            dataset={"size": 1_891_227},
            sampling={"scheme": "cyclic_poisson", "lot_size": 1454, "groups": 31},
            noise={"kind": "bisr", "bands": 16},
            target={"delta": 1.2e-7},
        ),
        second_opinion=False,
    ).epsilon
    assert epsilon is not None
    assert epsilon.upper < 1.9 * epsilon.lower


def test_all_records_of_a_user_may_be_in_one_group() -> None:
    """The attack comes near the upper end, which is a chain of neighbours or one Gaussian."""
    users = {"size": 1000, "unit": "user", "contributions_per_user": 3}
    sampling = {"scheme": "cyclic_poisson", "lot_size": 20, "groups": 10}
    banded = {"kind": "bsr", "bands": 4}
    bounded = plan(
        steps=300,
        sigma=5.0,
        adjacency="zero_out",
        dataset=users,
        sampling=sampling,
        noise=banded,
    )
    epsilon = certify(bounded, second_opinion=False).epsilon
    assert epsilon is not None
    assert epsilon.upper <= 1.01 * epsilon.lower
