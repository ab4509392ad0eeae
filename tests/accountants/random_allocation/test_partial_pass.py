"""A pass that ends early, first or last: brackets hold what quadrature gives, in both orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import affidavit
from affidavit.accountants.random_allocation.accountant import AllocationAccountant
from affidavit.plan import events

CASES = [(1, 100, 1.0), (1, 2, 0.5), (2, 3, 0.6), (2, 100, 1.0), (2, 1000, 2.0)]


def call(strike: float, sigma: float) -> float:
    """E (X - strike)_+ for X = exp(z/σ - 1/(2σ²))."""
    if strike <= 0:
        return 1 - strike
    d = deviation(strike, sigma)
    return float(norm.cdf(d) - strike * norm.cdf(d - 1 / sigma))


def put(strike: float, sigma: float) -> float:
    """E (strike - X)_+ for the same X, without cancelling against E (X - strike)_+."""
    if strike <= 0:
        return 0.0
    d = deviation(strike, sigma)
    return float(strike * norm.sf(d - 1 / sigma) - norm.sf(d))


def deviation(strike: float, sigma: float) -> float:
    return sigma * (1 / (2 * sigma**2) - math.log(strike))


def truth(released: int, bins: int, sigma: float, epsilon: float) -> float:
    """max over both orders of E (1 - q + q S - e^ε)_+ and E (1 - e^ε (1 - q + q S))_+."""
    q, ratio = released / bins, math.exp(epsilon)

    def mean(payoff: Callable[[float], float]) -> float:
        if released == 1:
            return payoff(0.0)
        law = lambda z: norm.pdf(z) * payoff(math.exp(z / sigma - 1 / (2 * sigma**2)))  # noqa: E731
        points = [-6, -3, -1, 0, 1, 3, 6]
        return float(quad(law, -14, 14, points=points, limit=300, epsabs=0, epsrel=1e-9)[0])

    up, down = (ratio - 1 + q) * released / q, (1 - ratio * (1 - q)) * released / (ratio * q)
    remove = mean(lambda others: q / released * call(up - others, sigma))
    return max(remove, mean(lambda others: ratio * q / released * put(down - others, sigma)))


@pytest.mark.ordinary("1-*")
@pytest.mark.parametrize(("released", "bins", "sigma"), CASES)
def test_brackets_hold_quadrature(released: int, bins: int, sigma: float) -> None:
    event = events.RandomAllocationGaussian(
        bins=bins, noise_multiplier=sigma, attained_at=math.inf, released=released
    )
    curve = AllocationAccountant().curve(event)
    epsilon = curve.epsilon(1e-6)
    assert epsilon.lower * (1 - 1e-9) > 0
    assert epsilon.width <= 1e-4 * epsilon.upper
    assert truth(released, bins, sigma, epsilon.lower) >= 1e-6 * (1 - 1e-8)
    assert truth(released, bins, sigma, epsilon.upper) <= 1e-6 * (1 + 1e-8)
    delta = curve.delta(epsilon.upper / 2)
    exact = truth(released, bins, sigma, epsilon.upper / 2)
    assert delta.lower <= exact * (1 + 1e-8)
    assert exact <= delta.upper * (1 + 1e-8)


def of_two_bins(rates: tuple[float, float], epsilon: float) -> float:
    """max over both orders for S = (X + Y)/2, X and Y of the two ``rates``."""
    rate, other = rates
    ratio = math.exp(epsilon)

    def mean(payoff: Callable[[float], float]) -> float:
        law = lambda z: norm.pdf(z) * payoff(math.exp(rate * z - rate**2 / 2))  # noqa: E731
        points = [-6, -3, -1, 0, 1, 3, 6]
        return float(quad(law, -14, 14, points=points, limit=300, epsabs=0, epsrel=1e-9)[0])

    remove = mean(lambda x: call(2 * ratio - x, 1 / other) / 2)
    return max(remove, mean(lambda x: ratio / 2 * put(2 / ratio - x, 1 / other)))


@pytest.mark.parametrize(("whole", "sigma", "delta"), [(1, 0.7, 1e-6), (3, 4.0, 1e-3)])
def test_bins_of_a_last_pass_hold_quadrature(whole: int, sigma: float, delta: float) -> None:
    most, least = math.sqrt(whole + 1) / sigma, math.sqrt(whole) / sigma
    event = events.RandomAllocationGaussian(
        bins=2, noise_multiplier=1 / most, attained_at=1 / least, longer=1
    )
    found = AllocationAccountant().curve(event).epsilon(delta)
    assert found.width <= 1e-4 * found.upper
    assert of_two_bins((least, most), found.lower) >= delta * (1 - 1e-8)
    assert of_two_bins((least, most), found.upper) <= delta * (1 + 1e-8)


def test_many_bins_of_a_last_pass_hold_samples() -> None:
    bins, longer, rates, epsilon, draws = 200, 60, (1.3, 0.9), 0.2, 20_000
    event = events.RandomAllocationGaussian(
        bins=bins, noise_multiplier=1 / rates[0], attained_at=1 / rates[1], longer=longer
    )
    generator = np.random.Generator(np.random.PCG64(7))
    each = np.repeat(rates, (longer, bins - longer))
    # The record is in a random bin: δ is the mean of (1 - α/S)_+ with it.
    z = generator.standard_normal((draws, bins))
    place = generator.integers(bins, size=draws)
    z[range(draws), place] += each[place]
    ratios = np.exp(each * z - each**2 / 2).mean(axis=1)
    paid = np.maximum(0.0, 1 - math.exp(epsilon) / ratios)
    error = 5 * float(paid.std()) / math.sqrt(draws)
    bound = AllocationAccountant().curve(event).delta(epsilon)
    assert bound.lower <= float(paid.mean()) + error
    assert bound.upper >= float(paid.mean()) - error
    assert bound.width < 0.01 * bound.upper
    assert error < 0.3 * bound.upper


def test_a_run_costs_more_the_longer_it_is_and_at_most_its_pass() -> None:
    plan = affidavit.Plan.dp_sgd(
        adjacency="zero_out",
        sampling={"scheme": "balls_in_bins", "lot_size": 100},
        size=10_000,
        noise_multiplier=0.8,
        delta=1e-6,
        steps=100,
    )
    found = [affidavit.epsilon(plan, steps=steps) for steps in (1, 30, 100, 130, 200)]
    assert all(one.upper < two.lower for one, two in pairwise(found))
    assert all(bound.lower > 0.999 * bound.upper for bound in found)


def test_what_the_checker_proves_of_a_last_pass_is_a_whole_one() -> None:
    event = events.RandomAllocationGaussian(bins=5, noise_multiplier=1.0, attained_at=1.3, longer=2)
    engine = AllocationAccountant()
    proved = engine.provable_alone().curve(event).epsilon(1e-5)
    whole = engine.curve(events.RandomAllocationGaussian(bins=5, noise_multiplier=1.0))
    assert proved.upper == whole.epsilon(1e-5).upper
    assert proved.lower < engine.curve(event).epsilon(1e-5).lower
