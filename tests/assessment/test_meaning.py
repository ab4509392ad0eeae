"""What ε means in words: upper bounds of every test, compared with exact Gaussian numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from affidavit.assessment import certify, explain_guarantee, meaning_of
from affidavit.plan import plan_from

MUS = (0.01, 0.2, 0.5, 1.0, 2.0, 4.0)


def profile(mu: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian mechanism (Balle and Wang, theorem 8), by scipy."""
    above = norm.cdf(mu / 2 - epsilon / mu)
    return float(above - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("mu", MUS)
def test_points_of_a_gaussian_approach_its_closed_form_from_above(mu: float) -> None:
    """Of the trade-off function Φ(Φ⁻¹(1 − α) − μ) and of its total variation 2Φ(μ/2) − 1."""
    recognised = float(norm.cdf(norm.ppf(0.01) + mu))
    guessed = float(norm.cdf(mu / 2))
    exact = meaning_of([], mu)
    assert exact.recognised == pytest.approx(recognised, rel=1e-9)
    assert exact.guessed == pytest.approx(guessed, rel=1e-9)
    points = [(mu * step / 200, profile(mu, mu * step / 200)) for step in range(1600)]
    by_points = meaning_of(points)
    assert 0 <= by_points.recognised - recognised < 1e-4
    assert 0 <= by_points.guessed - guessed < 1e-4
    for point in points[::97]:
        one = meaning_of([point])
        assert one.recognised >= recognised
        assert one.guessed >= guessed


@given(st.floats(0, 1e4), st.floats(0, 1), st.floats(0, 1e4), st.floats(0, 1))
def test_bounds_are_probabilities_that_rise_with_epsilon_and_delta(
    epsilon: float, delta: float, more: float, further: float
) -> None:
    less = meaning_of([(epsilon, delta)])
    worse = meaning_of([(epsilon + more, min(1.0, delta + further))])
    assert 0.01 <= less.recognised <= worse.recognised <= 1
    assert 0.5 <= less.guessed <= worse.guessed <= 1


def test_randomized_response_attains_the_bounds() -> None:
    """It tells its input with odds e^ε: (ε, 0)-DP and no less."""
    epsilon = math.log(3)
    meaning = meaning_of([(epsilon, 0.0)])
    assert meaning.guessed == pytest.approx(0.75)
    assert meaning.recognised == pytest.approx(0.03)  # α e^ε, by answering to a part of "yes"


def test_a_signed_guarantee_is_explained_by_its_own_numbers() -> None:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 1000},
        "sampling": {"scheme": "full_batch"},
        "steps": 10,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
        "target": {"delta": 1e-5},
    }
    result = certify(plan_from(document), second_opinion=False)
    assert result.epsilon is not None
    assert result.mu is not None
    guarantee = {
        "epsilon": {"upper": str(result.epsilon.upper)},
        "delta": {"upper": "1e-5"},
        "mu": str(result.mu),
        "unit": "example",
        "adjacency": "add_remove",
    }
    told = explain_guarantee(guarantee)
    exact = 100 * norm.cdf(norm.ppf(0.01) + math.sqrt(10) / 20)
    shown = float(told[0].split("at most ")[1].split(" %")[0])
    assert exact <= shown < exact * 1.01
    assert explain_guarantee({**guarantee, "confidence": "0.99"}) == ()
