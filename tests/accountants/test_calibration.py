"""Calibration is one-sided: what it returns meets the target, a hair less does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.calibration import (
    SLACK,
    find_max_count,
    find_max_probability,
    find_max_steps,
    find_min_noise,
)
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.protocol import NoSolution, OutOfReach
from affidavit.accountants.registry import accountant
from tests.accountants.events import poisson
from tests.support.random_seeds import examples


def gaussian_epsilon(scale: float) -> float:
    return GaussianCurve(mu=3.0 / scale).epsilon(1e-5).upper


@settings(max_examples=examples(60))
@given(target=st.floats(1e-4, 1e3))
def test_least_noise_meets_the_target_and_no_less_does(target: float) -> None:
    scale = find_min_noise(gaussian_epsilon, target)
    assert gaussian_epsilon(scale) <= target
    assert gaussian_epsilon(scale * (1 - SLACK)) > target


@pytest.mark.ordinary("not 30.0-rdp", "not 0.1-rdp")
@pytest.mark.parametrize("name", ["fourier", "rdp"])
@pytest.mark.parametrize("target", [0.1, 2.0, 30.0])
def test_poisson_noise_is_least_and_enough(name: str, target: float) -> None:
    def upper(sigma: float) -> float:
        return accountant(name).curve(poisson(0.02, sigma, 500)).epsilon(1e-6).upper

    sigma = find_min_noise(upper, target)
    assert upper(sigma) <= target < upper(sigma * (1 - 1e-3))


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_most_steps_fit_and_one_more_does_not(target: float) -> None:
    def upper(steps: int) -> float:
        return accountant("fourier").curve(poisson(0.01, 1.0, steps)).epsilon(1e-5).upper

    steps = find_max_steps(upper, target)
    assert upper(steps) <= target < upper(steps + 1)


def fourier_epsilon(q: float, sigma: float, steps: int, delta: float) -> float:
    return FourierAccountant().curve(poisson(q, sigma, steps)).epsilon(delta).upper


def about_epsilon(q: float, sigma: float, steps: int, delta: float) -> float:
    return FourierAccountant().approximate_epsilon(poisson(q, sigma, steps), delta)


guessed = pytest.mark.parametrize("guessed", [True, False], ids=["guessed", "unguessed"])


@pytest.mark.ordinary("not 0.0001-*")
@guessed
@pytest.mark.parametrize(
    ("q", "steps", "epsilon", "delta"),
    [
        (0.0244, 410, 8.0, 8e-6),
        (0.004267, 14062, 3.0, 1e-10),
        (0.1, 1000, 0.5, 1e-5),
        (0.01, 500, 0.01, 1e-5),
        (0.01, 100, 1e-4, 1e-5),
        (1e-4, 1000, 0.05, 1e-6),
        (0.2, 50, 40.0, 1e-8),
    ],
)
def test_noise_that_is_less_by_the_slack_fails(
    q: float, steps: int, epsilon: float, delta: float, guessed: bool
) -> None:
    result = find_min_noise(
        lambda sigma: fourier_epsilon(q, sigma, steps, delta),
        epsilon,
        guess=(lambda sigma: about_epsilon(q, sigma, steps, delta)) if guessed else None,
    )
    assert fourier_epsilon(q, result, steps, delta) <= epsilon
    assert fourier_epsilon(q, result * (1 - SLACK), steps, delta) > epsilon


@guessed
@pytest.mark.parametrize(
    ("sigma", "steps", "epsilon", "delta"),
    [(0.9, 500, 4.0, 1e-5), (3.0, 20_000, 0.5, 1e-8), (20.0, 10, 0.01, 1e-6)],
)
def test_a_rate_that_is_larger_by_the_slack_fails(
    sigma: float, steps: int, epsilon: float, delta: float, guessed: bool
) -> None:
    result = find_max_probability(
        lambda q: fourier_epsilon(q, sigma, steps, delta),
        epsilon,
        guess=(lambda q: about_epsilon(q, sigma, steps, delta)) if guessed else None,
    )
    assert fourier_epsilon(result, sigma, steps, delta) <= epsilon
    assert fourier_epsilon(result * (1 + SLACK), sigma, steps, delta) > epsilon


def test_a_rate_of_one_that_meets_the_target_is_returned() -> None:
    assert find_max_probability(lambda q: q, 1.0) == 1.0
    assert find_max_probability(lambda q: q, 1.0, guess=lambda q: q) == 1.0


@pytest.mark.ordinary("not 0.0001-*")
@guessed
@pytest.mark.parametrize(
    ("q", "sigma", "epsilon", "delta"),
    [(0.0244, 0.9, 4.0, 1e-5), (0.005, 1.5, 1.0, 1e-9), (1e-4, 0.5, 4.0, 1e-8)],
)
def test_one_step_more_fails(
    q: float, sigma: float, epsilon: float, delta: float, guessed: bool
) -> None:
    result = find_max_steps(
        lambda steps: fourier_epsilon(q, sigma, steps, delta),
        epsilon,
        guess=(lambda steps: about_epsilon(q, sigma, steps, delta)) if guessed else None,
    )
    assert fourier_epsilon(q, sigma, result, delta) <= epsilon
    assert fourier_epsilon(q, sigma, result + 1, delta) > epsilon


@settings(max_examples=examples(200))
@given(
    edge=st.integers(1, 10**6),
    power=st.floats(0.3, 3.0),
    wobble=st.floats(0, 1e-4),
    error=st.floats(0.5, 2.0),
)
def test_a_wobbling_bound_and_a_wrong_guess_still_end_at_an_edge(
    edge: int, power: float, wobble: float, error: float
) -> None:
    """A bound that zigzags by ``wobble``, with a guess that is off by a factor."""

    def upper(count: int) -> float:
        return ((count + 0.5) / (edge + 1)) ** power * (1 + wobble * (count % 7) / 6)

    result = find_max_count(upper, 1.0, ceiling=10**7, guess=lambda count: error * upper(count))
    assert upper(result) <= 1.0 < upper(result + 1)
    # A larger count that meets the target again lies within the wobble.
    assert edge * (1 - 2 * wobble / power) - 2 <= result <= edge + 1


@settings(max_examples=examples(200))
@given(
    edge=st.floats(1e-3, 1e3),
    power=st.floats(1.0, 30.0),
    wobble=st.floats(0, 3e-5),
    error=st.floats(0.5, 2.0),
)
def test_noise_is_found_through_wobble_and_a_wrong_guess(
    edge: float, power: float, wobble: float, error: float
) -> None:
    calls = 0

    def upper(scale: float) -> float:
        nonlocal calls
        calls += 1
        return (edge / scale) ** power * (1 + wobble * math.sin(1e6 * scale))

    result = find_min_noise(upper, 1.0, guess=lambda scale: error * upper(scale) ** 1.1)
    assert upper(result) <= 1.0
    assert edge * (1 - SLACK) <= result <= edge * (1 + SLACK)
    assert calls < 150


def test_all_that_there_is_may_fit() -> None:
    assert find_max_count(lambda count: count / 1000, 1.0, ceiling=700) == 700
    assert find_max_count(lambda count: count / 1000, 1.0, ceiling=1) == 1


def test_a_wall_between_what_fails_and_what_would_do_is_no_solution_but_a_limit() -> None:
    def bounded_below_ten(scale: float) -> float:
        if scale > 10:
            raise OutOfReach("too much noise")
        return 100 / scale

    with pytest.raises(OutOfReach, match="too much"):
        find_min_noise(bounded_below_ten, 1.0)
    assert find_min_noise(bounded_below_ten, 10.5) == pytest.approx(100 / 10.5, rel=SLACK)


def test_a_target_that_flattens_out_below_a_wall_is_given_up_soon() -> None:
    scales: list[float] = []

    def flat(scale: float) -> float:
        scales.append(scale)
        if scale > 1000:
            raise OutOfReach("too much noise")
        return 1.08 + 1 / scale

    with pytest.raises(OutOfReach, match="too much"):
        find_min_noise(flat, 1.0)
    assert len(scales) < 20


@given(edge=st.floats(1.0, 990.0), steep=st.floats(0.5, 4.0))
def test_an_edge_just_below_a_wall_is_found(edge: float, steep: float) -> None:
    """Where ε all at once falls to zero, too, as it does where δ alone is nearly enough."""

    def falling(scale: float) -> float:
        if scale > 1000:
            raise OutOfReach("too much noise")
        return max(0.0, 2.0 - (scale / edge) ** steep)

    assert find_min_noise(falling, 1.0) == pytest.approx(edge, rel=3 * SLACK)


def test_nothing_bounded_anywhere_is_a_limit() -> None:
    def never(_: float) -> float:
        raise OutOfReach("delta is too small")

    with pytest.raises(OutOfReach, match="delta"):
        find_min_noise(never, 1.0)
    with pytest.raises(OutOfReach, match="delta"):
        find_max_probability(never, 1.0)
    with pytest.raises(OutOfReach, match="delta"):
        find_max_steps(never, 1.0)


def test_a_target_that_one_step_passes_has_no_steps() -> None:
    with pytest.raises(NoSolution):
        find_max_steps(lambda steps: 2.0 * steps, 1.0)


def test_a_target_that_no_noise_meets_has_no_solution() -> None:
    with pytest.raises(NoSolution):
        find_min_noise(lambda _: 5.0, 1.0)


def test_a_target_that_holds_without_noise_has_no_least_noise() -> None:
    with pytest.raises(NoSolution):
        find_min_noise(lambda _: 0.5, 1.0)


def reciprocal_above_0_7(scale: float) -> float:
    if scale < 0.7:
        raise OutOfReach("too little noise")
    return 1 / scale


def test_noise_too_small_to_bound_counts_as_too_small() -> None:
    result = find_min_noise(reciprocal_above_0_7, 1.0, start=0.1)
    assert result == pytest.approx(1.0, rel=1e-4)


def test_a_search_that_ends_where_nothing_is_bounded_does_not_call_it_least() -> None:
    with pytest.raises(OutOfReach, match="too little"):
        find_min_noise(reciprocal_above_0_7, 10.0)


def test_an_unbounded_epsilon_counts_as_too_large() -> None:
    result = find_min_noise(lambda scale: math.inf if scale < 4 else 8 / scale, 1.0)
    assert result == pytest.approx(8.0, rel=1e-4)
