"""A replaced record on two and three bins, by quadrature."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from affidavit import delta
from affidavit.accountants import FourierAccountant
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.accountants.random_allocation.replaced import (
    Order,
    ReplacedCurve,
    ReplacedDirection,
)
from affidavit.plan import events


def curve(bins: int, rate: float, order: Order = "independent") -> ReplacedCurve:
    return ReplacedCurve((ReplacedDirection(bins=bins, rate=rate, order=order),))


def released(bins: int, rate: float, sign: float, line: np.ndarray) -> np.ndarray:
    """Chances of outputs on a lattice, in standard deviations of the noise."""
    step = line[1] - line[0]
    still, moved = (
        step * np.exp(-((line - at) ** 2) / 2) / math.sqrt(2 * math.pi) for at in (0, sign * rate)
    )
    parts = [[moved if here == there else still for there in range(bins)] for here in range(bins)]
    return np.asarray(sum(functools.reduce(np.multiply.outer, part) for part in parts)) / bins


@pytest.mark.parametrize(
    ("bins", "rate", "epsilon"),
    [(2, 1.0, 0.0), (2, 1.0, 2.5), (2, 2.0, 6.0), (3, 0.2, 0.1), (3, 1.5, 3.0)],
)
def test_the_upper_end_is_hardly_above_what_few_bins_show(
    bins: int, rate: float, epsilon: float
) -> None:
    line = np.linspace(-8 - rate, 8 + rate, 161 if bins == 3 else 801)
    p, q = (released(bins, rate, sign, line) for sign in (1.0, -1.0))
    truth = float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
    upper = curve(bins, rate).delta(epsilon).upper
    assert truth * (1 - 2e-4) <= upper <= truth * 1.1


@pytest.mark.parametrize("order", ["zeroed", "restored"])
@pytest.mark.parametrize(("rate", "epsilon"), [(0.4, 0.3), (1.0, 1.0)])
def test_a_record_in_the_place_of_another_costs_hardly_more_than_an_attack(
    order: Order, rate: float, epsilon: float
) -> None:
    """All others lie at -1, or contribute nothing, in two lots."""
    line, truth = np.linspace(-8 - 2 * rate, 8 + 2 * rate, 801), 0.0
    for there, gone in ((2.0, 1.0), (1.0, 0.0)):
        moves = (there, gone) if order == "zeroed" else (gone, there)
        p, q = (released(2, rate * distance, 1.0, line) for distance in moves)
        truth = max(truth, float(np.maximum(p - math.exp(epsilon) * q, 0).sum()))
    upper = curve(2, rate, order).delta(epsilon).upper
    assert truth * (1 - 2e-4) <= upper <= truth * 1.35


@pytest.mark.ordinary("1-*")
@pytest.mark.parametrize("rate", [0.3, 1.2])
@pytest.mark.parametrize("steps", [1, 40])
def test_one_bin_that_may_stay_empty_is_a_sampled_release(rate: float, steps: int) -> None:
    q, sigma = 0.05, 1 / rate
    sampled: list[tuple[events.ReplacedAllocationGaussian, events.Event]] = [
        (
            events.ReplacedAllocationGaussian(bins=1, noise_multiplier=sigma, drawn=q),
            events.PoissonSubsampledGaussian(
                sampling_probability=q, noise_multiplier=sigma, pair="replace_one"
            ),
        ),
        (
            events.ReplacedAllocationGaussian(
                bins=1, noise_multiplier=sigma, drawn=q, place="replace_one"
            ),
            events.WithoutReplacementGaussian(
                dataset_size=100, sample_size=5, noise_multiplier=sigma
            ),
        ),
    ]
    beside = events.Gaussian(noise_multiplier=20.0)
    for one, other in sampled:
        own, known = (
            events.Composed(events=(events.Repeated(event=event, count=steps), beside))
            for event in (one, other)
        )
        least = FourierAccountant().curve(known).epsilon(1e-5).upper
        assert least * (1 - 1e-4) <= AllocationAccountant().curve(own).epsilon(1e-5).upper
        assert AllocationAccountant().curve(own).epsilon(1e-5).upper <= 1.05 * least


def test_epsilon_is_about_where_delta_is() -> None:
    one = curve(100, 1.58)
    assert one.delta(one.epsilon(1e-6).upper).upper == pytest.approx(1e-6, rel=0.1)


def test_a_plan_of_several_epochs_is_bounded_by_it() -> None:
    document = {
        "version": 1,
        "adjacency": "replace_one",
        "dataset": {"size": 1000},
        "sampling": {"scheme": "balls_in_bins", "lot_size": 100},
        "epochs": 4,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4.0}],
        "target": {"delta": 1e-4},
    }
    own = curve(10, 0.5).delta(1.0).upper
    assert delta(document, epsilon=1.0) == pytest.approx(own, rel=1e-3)


@pytest.mark.soak
def test_replaced_records_compose_over_epochs_and_over_steps_drawn_for_each_record() -> None:
    document = {
        "version": 1,
        "adjacency": "replace_one",
        "dataset": {"size": 1000},
        "sampling": {"scheme": "balls_in_bins", "lot_size": 100, "bins_drawn": "each_epoch"},
        "epochs": 4,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4.0}],
        "target": {"delta": 1e-4},
    }
    passes = events.Repeated(
        event=events.ReplacedAllocationGaussian(bins=10, noise_multiplier=4.0), count=4
    )
    own = AllocationAccountant().curve(passes).delta(1.0).upper
    assert delta(document, epsilon=1.0) == pytest.approx(own, rel=1e-3)
    steps = {**document, "sampling": {"scheme": "random_allocation", "participations": 4}}
    assert delta({**steps, "steps": 40, "epochs": None}, epsilon=1.0) <= own * (1 + 1e-3)
