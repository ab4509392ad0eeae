"""Repeat and select: bounds against their theorems and against attacks and exact profiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from affidavit.accountants.composition import parts
from affidavit.accountants.protocol import Unsupported
from affidavit.accountants.registry import ENGINE_NAMES, accountant
from affidavit.plan import events

Weight = Callable[[float], float]


def selected(sigma: float, mean: float, shape: float, steps: int = 1) -> events.RepeatAndSelect:
    run = events.Repeated(event=events.Gaussian(noise_multiplier=sigma), count=steps)
    return events.RepeatAndSelect(event=run, mean=mean, shape=shape)


def upper(event: events.Event, delta: float) -> float:
    return accountant("rdp").curve(event).epsilon(delta).upper


def gamma_of(mean: float, shape: float) -> float:
    """γ of the truncated negative binomial with this mean (Papernot and Steinke, Definition 1)."""

    def excess(log_gamma: float) -> float:
        gamma = math.exp(log_gamma)
        if shape == 0:
            return (1 / gamma - 1) / -log_gamma - mean
        return shape * (1 - gamma) / (gamma * (1 - gamma**shape)) - mean

    return math.exp(float(brentq(excess, -30, -1e-9)))


# ---- the theorem -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize(("sigma", "mean"), [(2.0, 3.0), (5.0, 20.0), (5.0, 1000.0)])
def test_it_is_theorem_2_for_the_truncated_negative_binomial(
    sigma: float, mean: float, shape: float
) -> None:
    """Rewritten from the paper and converted over a much finer grid of orders."""
    delta, gamma = 1e-6, gamma_of(mean, shape)
    orders = np.concatenate([np.linspace(1.01, 12, 4000), np.linspace(12, 3000, 20000)])
    run = orders / (2 * sigma**2)
    best = (1 + shape) * np.min((1 - 1 / orders) * run - math.log(gamma) / orders)
    bound = run + best + math.log(mean) / (orders - 1)
    epsilons = bound + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    finest = float(np.min(epsilons))
    # The grid above may pass the best order by up to half a step.
    assert finest * (1 - 1e-5) <= upper(selected(sigma, mean, shape), delta) <= finest * 1.02


@pytest.mark.parametrize(("sigma", "mean"), [(2.0, 3.0), (5.0, 20.0), (10.0, 200.0)])
def test_it_is_theorem_6_for_poisson(sigma: float, mean: float) -> None:
    delta = 1e-6
    orders = np.linspace(1.2, 400, 1000)
    run = orders / (2 * sigma**2)
    thresholds = np.log1p(1 / (orders - 1))
    fine = np.linspace(1.001, 2000, 5000)
    exponents = (fine - 1) * (fine / (2 * sigma**2) - thresholds[:, None]) + fine * np.log1p(
        -1 / fine
    )
    deltas = np.exp(np.min(exponents - np.log(fine - 1), axis=1))
    bound = run + mean * deltas + math.log(mean) / (orders - 1)
    epsilons = bound + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    finest = float(np.min(epsilons))
    assert finest * 0.98 <= upper(selected(sigma, mean, math.inf), delta) <= finest * 1.1


# ---- the truth ---------------------------------------------------------------------


def weight(mean: float, shape: float) -> Weight:
    """E[K F^(K-1)]: the density of the best of K scores over that of one, at rank F."""
    if math.isinf(shape):
        return lambda rank: mean * math.exp(mean * (rank - 1))
    gamma = gamma_of(mean, shape)
    if shape == 0:
        return lambda rank: (1 - gamma) / ((1 - (1 - gamma) * rank) * -math.log(gamma))
    scale = shape * (1 - gamma) / (gamma**-shape - 1)
    return lambda rank: scale * (1 - (1 - gamma) * rank) ** (-shape - 1)


def delta_of_the_best_score(sigma: float, epsilon: float, of: Weight) -> float:
    """δ(ε) of the largest of K Gaussian releases that a record raises, by integration."""

    def excess(y: float) -> float:
        with_it = norm.pdf(y - 1 / sigma) * of(float(norm.cdf(y - 1 / sigma)))
        without = norm.pdf(y) * of(float(norm.cdf(y)))
        return max(0.0, float(with_it - math.exp(epsilon) * without))

    return float(quad(excess, -12, 12 + 1 / sigma, limit=400, points=[0, 3, 6])[0])


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
@pytest.mark.parametrize(("sigma", "mean", "epsilon"), [(1.0, 5.0, 4.0), (2.0, 30.0, 2.0)])
def test_the_bound_is_not_below_the_profile_of_a_selection_by_score(
    sigma: float, mean: float, epsilon: float, shape: float
) -> None:
    of = weight(mean, shape)
    total = quad(of, 0, 1)[0]
    assert total == pytest.approx(1 if math.isfinite(shape) else 1 - math.exp(-mean))
    true = delta_of_the_best_score(sigma, epsilon, of)
    result = accountant("rdp").curve(selected(sigma, mean, shape)).delta(epsilon).upper
    assert 0 < true <= result


# ---- the laws ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in ENGINE_NAMES if name not in ("rdp", "selection")]
)
def test_every_other_engine_refuses_it_and_says_which_does_not(name: str) -> None:
    with pytest.raises(Unsupported, match="repeat-and-select") as caught:
        accountant(name).curve(
            events.Composed(events=(events.Gaussian(noise_multiplier=1), selected(2, 5, 1)))
        )
    assert "selection" in caught.value.remedy


def test_one_walk_counts_selections_and_what_is_inside_them() -> None:
    event = events.Composed(
        events=(selected(2, 5, 1), events.Repeated(event=selected(2, 5, 1), count=2))
    )
    ((part, count),) = parts(event)
    assert isinstance(part, events.RepeatAndSelect)
    assert count == 3


def test_it_costs_more_with_more_repetitions_and_more_than_one_run() -> None:
    once = upper(events.Gaussian(noise_multiplier=4), 1e-6)
    costs = [upper(selected(4, mean, 0.5), 1e-6) for mean in (1.5, 5, 50, 500)]
    assert once < costs[0]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("mean", "shape"), [(0.9, 1), (math.inf, 1), (math.nan, 1), (2, -1), (2, math.nan)]
)
def test_a_distribution_that_is_none_is_refused(mean: float, shape: float) -> None:
    with pytest.raises(ValueError, match=r"mean|shape"):
        selected(1, mean, shape)
