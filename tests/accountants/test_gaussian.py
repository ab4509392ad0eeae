"""The exact Gaussian profile against 80-digit arithmetic, and its inversion."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.gaussian import GaussianAccountant, GaussianCurve, joint_mu
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.plan import events
from tests.support.random_seeds import examples


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@settings(max_examples=examples(300))
@given(log_mu=st.floats(-6.5, 4.5), deviations=st.floats(-8, 36))
def test_delta_brackets_the_truth(log_mu: float, deviations: float) -> None:
    mu = 10**log_mu
    epsilon = max(0.0, mu * mu / 2 + deviations * mu)
    bracket = GaussianCurve(mu=mu).delta(epsilon)
    truth = true_delta(mu, epsilon)
    assert bracket.lower <= truth <= bracket.upper
    if truth > 1e-200 and 1e-3 < mu < 1e3:
        assert bracket.width <= 1e-6 * truth


@settings(max_examples=examples(60))
@given(log_mu=st.floats(-4, 2), log_delta=st.floats(-40, -0.5))
def test_epsilon_is_on_the_safe_side_and_tight(log_mu: float, log_delta: float) -> None:
    mu, delta = 10**log_mu, 10**log_delta
    bracket = GaussianCurve(mu=mu).epsilon(delta)
    assert true_delta(mu, bracket.upper) <= delta
    if bracket.lower > 0:
        assert true_delta(mu, bracket.lower) >= delta
        assert bracket.width <= 1e-6 * bracket.upper


def test_composition_adds_squares() -> None:
    run = events.Composed(
        events=(
            events.Repeated(event=events.Gaussian(noise_multiplier=2.0), count=16),
            events.Gaussian(noise_multiplier=0.25),
        )
    )
    assert joint_mu(run) == pytest.approx(math.sqrt(16 / 4 + 16), rel=1e-12)


def test_rho_is_half_of_mu_squared() -> None:
    assert GaussianCurve(mu=3.0).rho == 4.5


def test_a_delta_above_the_total_variation_needs_no_epsilon() -> None:
    assert GaussianCurve(mu=0.01).epsilon(0.1).upper == 0


def test_sampled_releases_are_refused() -> None:
    sampled = events.PoissonSubsampledGaussian(sampling_probability=0.1, noise_multiplier=1.0)
    with pytest.raises(Unsupported):
        GaussianAccountant().curve(sampled)


@pytest.mark.parametrize("sigma", [1e-9, 1e9])
def test_noise_outside_double_precision_is_refused(sigma: float) -> None:
    with pytest.raises(OutOfReach, match="μ"):
        GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma))
