"""Searches end on the safe side, with little slack; costs are predicted in time."""

from __future__ import annotations

import time

import pytest

from affidavit.accountants.fourier import (
    FourierAccountant,
    approximate_delta,
    approximate_epsilon,
    calibrate_noise_multiplier,
    calibrate_steps,
    estimate_cost,
)
from affidavit.accountants.protocol import NoSolution, OutOfReach
from affidavit.plan.events import Composed, Event, PoissonSubsampledGaussian, Repeated


def plan(q: float, sigma: float, steps: int) -> Repeated:
    leaf = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return Repeated(event=leaf, count=steps)


TARGETS = [
    (0.0244, 410, 8.0, 8e-6),
    (0.004267, 14062, 3.0, 1e-10),
    (0.1, 1000, 0.5, 1e-5),
    (0.01, 500, 0.01, 1e-5),
    (0.2, 50, 40.0, 1e-8),
]


@pytest.mark.parametrize(("q", "steps", "epsilon", "delta"), TARGETS)
def test_noise_meets_the_target_and_hardly_more(
    q: float, steps: int, epsilon: float, delta: float
) -> None:
    def make(noise: float) -> Event:
        return plan(q, noise, steps)

    noise = calibrate_noise_multiplier(make, epsilon, delta)
    accountant = FourierAccountant(relative_width=3e-5)
    assert accountant.curve(make(noise)).epsilon(delta).upper <= epsilon
    less = accountant.curve(make(noise * (1 - 3e-4))).epsilon(delta)
    assert less.lower > epsilon


@pytest.mark.parametrize(
    ("q", "sigma", "epsilon", "delta"), [(0.0244, 0.9, 4.0, 1e-5), (0.005, 1.5, 1.0, 1e-9)]
)
def test_steps_are_the_most_that_fit(q: float, sigma: float, epsilon: float, delta: float) -> None:
    def make(steps: int) -> Event:
        return plan(q, sigma, steps)

    steps = calibrate_steps(make, epsilon, delta)
    accountant = FourierAccountant(relative_width=3e-5)
    assert accountant.curve(make(steps)).epsilon(delta).upper <= epsilon
    assert accountant.curve(make(steps + 1)).epsilon(delta).upper > epsilon


def test_a_target_that_is_already_met_returns_the_least_noise_allowed() -> None:
    noise = calibrate_noise_multiplier(lambda s: plan(1e-3, s, 1), 500.0, 0.01, low=0.5)
    assert noise == 0.5


def test_a_target_out_of_range_has_no_solution() -> None:
    with pytest.raises(NoSolution):
        calibrate_noise_multiplier(lambda s: plan(0.5, s, 10_000), 0.1, 1e-6, high=5.0)
    with pytest.raises(NoSolution):
        calibrate_steps(lambda t: plan(0.5, 0.5, t), 0.1, 1e-6)


def test_approximations_are_near_where_many_releases_compose() -> None:
    event = plan(0.05, 2.0, 2000)
    curve = FourierAccountant().curve(event)
    assert approximate_epsilon(event, 1e-6) == pytest.approx(curve.epsilon(1e-6).upper, rel=0.01)
    assert approximate_delta(event, 3.0) == pytest.approx(curve.delta(3.0).upper, rel=0.05)


def test_cost_is_predicted_without_doing_the_work() -> None:
    event = plan(0.001, 0.8, 10_000)
    started = time.perf_counter()
    cost = estimate_cost(event, 1e-8)
    predicted_in = time.perf_counter() - started
    started = time.perf_counter()
    FourierAccountant().curve(event).epsilon(1e-8)
    took = time.perf_counter() - started
    assert predicted_in < 0.05
    # A factor of three is meant; a busy machine may add to the measured time.
    assert took / 10 < cost.seconds < took * 4
    assert cost.bytes > 0


def test_cost_grows_with_precision_and_is_refused_out_of_range() -> None:
    event = plan(0.01, 1.0, 10_000)
    rough = estimate_cost(event, 1e-6, relative_width=1e-3)
    fine = estimate_cost(event, 1e-6, relative_width=1e-5)
    assert rough.seconds < fine.seconds
    assert rough.bytes < fine.bytes
    assert estimate_cost(Composed(events=()), 1e-6).seconds == 0.0
    with pytest.raises(OutOfReach):
        estimate_cost(plan(0.01, 0.01, 100), 1e-6)
