"""Calibration is one-sided: what it returns meets the target, a hair less does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.calibration import SLACK, least_noise, most_steps
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.protocol import NoSolution, OutOfReach
from affidavit.accountants.registry import accountant
from affidavit.plan.events import Event, PoissonSubsampledGaussian, Repeated


def gaussian_epsilon(scale: float) -> float:
    return GaussianCurve(mu=3.0 / scale).epsilon(1e-5).upper


def poisson(q: float, sigma: float, steps: int) -> Event:
    step = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return Repeated(event=step, count=steps)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(target=st.floats(1e-2, 1e3))
def test_least_noise_meets_the_target_and_no_less_does(target: float) -> None:
    scale = least_noise(gaussian_epsilon, target)
    assert gaussian_epsilon(scale) <= target
    assert gaussian_epsilon(scale * (1 - 2 * SLACK)) > target


@pytest.mark.parametrize("name", ["fourier", "rdp"])
@pytest.mark.parametrize("target", [0.1, 2.0, 30.0])
def test_poisson_noise_is_least_and_enough(name: str, target: float) -> None:
    def upper(sigma: float) -> float:
        return accountant(name).curve(poisson(0.02, sigma, 500)).epsilon(1e-6).upper

    sigma = least_noise(upper, target)
    assert upper(sigma) <= target < upper(sigma * (1 - 1e-3))


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_most_steps_fit_and_one_more_does_not(target: float) -> None:
    def upper(steps: int) -> float:
        return accountant("fourier").curve(poisson(0.01, 1.0, steps)).epsilon(1e-5).upper

    steps = most_steps(upper, target)
    assert upper(steps) <= target < upper(steps + 1)


def test_a_target_that_one_step_passes_has_no_steps() -> None:
    with pytest.raises(NoSolution):
        most_steps(lambda steps: 2.0 * steps, 1.0)


def test_a_target_that_no_noise_meets_has_no_solution() -> None:
    with pytest.raises(NoSolution):
        least_noise(lambda _: 5.0, 1.0)


def test_a_target_that_holds_without_noise_has_no_least_noise() -> None:
    with pytest.raises(NoSolution):
        least_noise(lambda _: 0.5, 1.0)


def reciprocal_above_0_7(scale: float) -> float:
    if scale < 0.7:
        raise OutOfReach("too little noise")
    return 1 / scale


def test_noise_too_small_to_bound_counts_as_too_small() -> None:
    found = least_noise(reciprocal_above_0_7, 1.0, guess=0.1)
    assert found == pytest.approx(1.0, rel=1e-4)


def test_a_search_that_ends_where_nothing_is_bounded_does_not_call_it_least() -> None:
    with pytest.raises(OutOfReach, match="too little"):
        least_noise(reciprocal_above_0_7, 10.0)


def test_an_unbounded_epsilon_counts_as_too_large() -> None:
    found = least_noise(lambda scale: math.inf if scale < 4 else 8 / scale, 1.0)
    assert found == pytest.approx(8.0, rel=1e-4)
