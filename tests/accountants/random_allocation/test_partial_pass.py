"""A pass that ends early: brackets hold what quadrature gives, in both orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

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


def test_a_run_costs_more_the_longer_it_is_and_at_most_its_pass() -> None:
    plan = affidavit.Plan.dp_sgd(
        adjacency="zero_out",
        sampling={"scheme": "balls_in_bins", "lot_size": 100},
        size=10_000,
        noise_multiplier=0.8,
        delta=1e-6,
        steps=100,
    )
    found = [affidavit.epsilon(plan, steps=steps) for steps in (1, 30, 99, 100)]
    assert all(one.upper < two.lower for one, two in pairwise(found))
    assert all(bound.lower > 0.999 * bound.upper for bound in found)
