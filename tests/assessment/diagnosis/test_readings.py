"""Readings that no installed library has, against their published formulas."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from affidavit.assessment.diagnosis import ClaimedEpsilon
from affidavit.assessment.diagnosis.accountant_inputs import Part
from affidavit.assessment.diagnosis.readings import (
    Effort,
    central_limit,
    readings,
)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of μ-Gaussian DP, solved by a general root finder."""

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu)) - second - delta

    return float(brentq(excess, 0, mu**2 + 50 * mu + 50, xtol=1e-12))


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.01, 1.1, 2000), (0.2, 3.0, 50), (0.004, 0.7, 9000)]
)
def test_the_central_limit_is_that_of_poisson_and_of_uniform_lots(
    q: float, sigma: float, steps: int
) -> None:
    """Bu, Dong, Long and Su, arXiv:1911.11607, for both; the second is Opacus's too."""
    delta = 1e-5
    poisson = q * math.sqrt(steps * math.expm1(sigma**-2))
    growth = math.exp(sigma**-2) * norm.cdf(1.5 / sigma) + 3 * norm.cdf(-0.5 / sigma) - 2
    uniform = q * math.sqrt(2 * steps * growth)
    parts = ((Part(noise_multiplier=sigma, probability=q), steps),)
    assert [item.epsilon for item in central_limit(parts, delta)] == pytest.approx(
        [gaussian_epsilon(poisson, delta), gaussian_epsilon(uniform, delta)], rel=1e-6
    )


def test_the_central_limit_of_what_is_not_sampled_is_the_gaussian_itself() -> None:
    parts = ((Part(noise_multiplier=4.0), 30),)
    exact = gaussian_epsilon(math.sqrt(30) / 4, 1e-6)
    assert [item.epsilon for item in central_limit(parts, 1e-6)] == pytest.approx([exact] * 2)


@pytest.mark.parametrize("precision", [0.01, 0.001])
@pytest.mark.parametrize("q", [0.01, 0.001])
def test_a_tight_value_is_as_narrow_as_a_quarter_of_the_claims_last_digit(
    q: float, precision: float
) -> None:
    parts = ((Part(noise_multiplier=1.0, probability=q), 5000),)
    effort = Effort(left=3)
    result = effort.bracket(parts, 1e-5, 0.0, math.inf, precision)
    assert result is not None
    assert 0 < result.lower <= result.upper <= result.lower * (1 + precision / 4)
    assert effort.left == 2


def test_a_value_that_cannot_be_the_claim_is_told_coarsely_and_an_effort_ends() -> None:
    parts = ((Part(noise_multiplier=1.0, probability=0.01), 5000),)
    fine = Effort(left=1).bracket(parts, 1e-5, 0.0, math.inf, 1e-3)
    effort = Effort(left=1)
    coarse = effort.bracket(parts, 1e-5, 8.0, 9.0, 1e-3)
    assert coarse is not None
    assert fine is not None
    assert coarse.lower <= fine.lower <= fine.upper <= coarse.upper <= coarse.lower * 1.02
    assert effort.bracket(parts, 1e-5, 0.0, math.inf, 1e-3) == fine  # the same costs nothing
    assert effort.bracket(parts, 1e-6, 0.0, math.inf, 1e-3) is None


@pytest.mark.parametrize("q", [None, 0.02])
def test_textbook_compositions_are_those_of_the_textbook(q: float | None) -> None:
    """Dwork and Roth (2014): Theorem A.1 for a step, amplified, then 3.16 or 3.20 for all."""
    sigma, steps, delta, rate = 30.0, 40, 1e-5, q or 1.0

    def step(share: float) -> float:
        """ε of one step that may fail with probability ``share``, over its sampling's q."""
        classical = math.sqrt(2 * math.log(1.25 * rate / share)) / sigma
        return math.log(1 + rate * (math.exp(classical) - 1))

    entry = step(delta / 2 / steps)
    requested = {
        "basic": steps * step(delta / steps),
        "advanced": math.sqrt(2 * steps * math.log(2 / delta)) * entry
        + steps * entry * (math.exp(entry) - 1),
    }
    parts = ((Part(noise_multiplier=sigma, probability=q), steps),)
    anything = ClaimedEpsilon(value=10, unit=1e-6, noise_uncertainty=1e9)
    result = {
        reading.accountant: reading for reading in readings(parts, delta, anything, Effort(left=1))
    }
    for name, epsilon in requested.items():
        assert result[name].epsilon == pytest.approx(epsilon, rel=1e-9)
        assert result[name].cost >= max(item.cost for item in result.values())


def test_where_a_step_of_the_textbook_says_nothing_it_is_not_asked() -> None:
    anything = ClaimedEpsilon(value=10, unit=1e-6, noise_uncertainty=1e9)
    for sigma, requested in ((0.05, False), (0.5, True)):
        parts = ((Part(noise_multiplier=sigma), 3),)
        data = {reading.accountant for reading in readings(parts, 1e-5, anything, Effort(left=1))}
        assert ("basic" in data, "advanced" in data) == (requested, requested)
