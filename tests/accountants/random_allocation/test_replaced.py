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


def released(rates: list[float], sign: float, line: np.ndarray) -> np.ndarray:
    """Chances of outputs of bins of these rates on a lattice, in deviations of the noise."""
    step = line[1] - line[0]
    still, *moved = (
        step * np.exp(-((line - at) ** 2) / 2) / math.sqrt(2 * math.pi)
        for at in (0, *(sign * rate for rate in rates))
    )
    parts = [
        [one if here == there else still for there, one in enumerate(moved)]
        for here in range(len(rates))
    ]
    return np.asarray(sum(functools.reduce(np.multiply.outer, part) for part in parts)) / len(rates)


@pytest.mark.parametrize(
    ("bins", "rate", "epsilon"),
    [(2, 1.0, 0.0), (2, 1.0, 2.5), (2, 2.0, 6.0), (3, 0.2, 0.1), (3, 1.5, 3.0)],
)
def test_the_upper_end_is_hardly_above_what_few_bins_show(
    bins: int, rate: float, epsilon: float
) -> None:
    line = np.linspace(-8 - rate, 8 + rate, 161 if bins == 3 else 801)
    p, q = (released([rate] * bins, sign, line) for sign in (1.0, -1.0))
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
        p, q = (released([rate] * 2, distance, line) for distance in moves)
        truth = max(truth, float(np.maximum(p - math.exp(epsilon) * q, 0).sum()))
    upper = curve(2, rate, order).delta(epsilon).upper
    assert truth * (1 - 2e-4) <= upper <= truth * 1.35


@pytest.mark.parametrize("order", ["replaced", "zeroed", "restored"])
@pytest.mark.parametrize("rates", [[0.9, 0.4], [0.7, 0.7, 0.3], [0.8, 0.5, 0.5]])
def test_bins_that_show_more_than_others_cost_more_than_these(
    order: Order, rates: list[float]
) -> None:
    """Others lie at -1 or at nothing; all bins like the most or the least are the other ends."""
    longest, shortest, bins = max(rates), min(rates), len(rates)
    number = rates.count(shortest)
    line = np.linspace(-7 - 2 * longest, 7 + 2 * longest, 161 if bins == 3 else 801)
    pairs = {
        "replaced": ((2, 0), (0, -2)),
        "zeroed": ((2, 1), (0, -1)),
        "restored": ((1, 0), (1, 2)),
    }
    mixed = ReplacedCurve(
        (ReplacedDirection(bins=bins, rate=longest, order=order, slower=(number, shortest)),)
    )
    for epsilon in (0.0, 0.3, 1.2):
        truth = 0.0
        for there, gone in pairs[order]:
            p, q = (released(rates, distance, line) for distance in (there, gone))
            truth = max(truth, float(np.maximum(p - math.exp(epsilon) * q, 0).sum()))
        upper = mixed.delta(epsilon).upper
        assert truth * (1 - 1e-3) <= upper
        closest = mean_of_differences(rates, order, epsilon)
        assert closest * (1 - 1e-2) <= upper <= closest * 1.05
        least, most = (
            curve(bins, rate, order).delta(epsilon).upper for rate in (shortest, longest)
        )
        assert least * (1 - 1e-3) <= upper <= most * (1 + 1e-3)


def mean_of_differences(rates: list[float], order: Order, epsilon: float) -> float:
    """E (ΣV)₊ over the number of bins, by sums over a grid of the normal deviations."""
    z = np.linspace(-7, 7 + 2 * max(rates), 121 if len(rates) == 3 else 801)
    chances = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    moves = {"replaced": ((2, 0), (0, 2)), "zeroed": ((2, 1), (0, 1)), "restored": ((1, 0), (1, 2))}
    sums, masses = np.zeros(1), np.ones(1)
    for rate in rates:
        values, shares = [np.zeros(1)], [np.zeros(1)]
        for (over, under), sign in zip(moves[order], (1, -1), strict=True):
            first, second = (np.exp(m * rate * z - (m * rate) ** 2 / 2) for m in (over, under))
            difference = first - math.exp(epsilon) * second
            values.append(difference[sign * difference > 0])
            shares.append(chances[sign * difference > 0])
        shares[0] += 1 - sum(share.sum() for share in shares)
        sums = np.add.outer(sums, np.concatenate(values)).ravel()
        masses = np.multiply.outer(masses, np.concatenate(shares)).ravel()
    return float(masses @ np.maximum(sums, 0)) / len(rates)


@pytest.mark.parametrize(("bins", "epsilon"), [(40, 0.3), (300, 0.1)])
def test_many_bins_of_two_rates_lie_between_those_of_one(bins: int, epsilon: float) -> None:
    orders: tuple[Order, ...] = ("replaced", "zeroed", "restored")
    for order in orders:
        low, high = (curve(bins, rate, order).delta(epsilon).upper for rate in (0.3, 0.5))
        few, many = (
            ReplacedCurve(
                (ReplacedDirection(bins=bins, rate=0.5, order=order, slower=(number, 0.3)),)
            )
            .delta(epsilon)
            .upper
            for number in (2, bins - 2)
        )
        assert low * (1 - 0.02) <= many <= few * (1 + 0.02)
        assert few <= high * (1 + 0.02)
        assert math.log(high / few) < math.log(high / low) / 4


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
