"""dp_accounting's closed form against 60 digits, and as a second opinion on ours."""

from __future__ import annotations

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.analytic_gaussian import AnalyticCurve, AnalyticGaussianAccountant
from affidavit.accountants.gaussian import GaussianAccountant, GaussianCurve
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.plan import events
from tests.support.random_seeds import examples


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@settings(max_examples=examples(60))
@given(log_mu=st.floats(-6.9, 4), log_delta=st.floats(-40, -0.3))
def test_epsilon_brackets_the_truth_and_is_tight(log_mu: float, log_delta: float) -> None:
    mu, delta = 10**log_mu, 10**log_delta
    bracket = AnalyticCurve(mu=mu).epsilon(delta)
    assert true_delta(mu, bracket.upper) <= delta
    if bracket.lower > 0:
        assert true_delta(mu, bracket.lower) >= delta
    assert bracket.width <= 4e-9 * bracket.upper + 1e-11


@settings(max_examples=examples(60))
@given(log_mu=st.floats(-6.9, 4), deviations=st.floats(-8, 36))
def test_delta_brackets_the_truth(log_mu: float, deviations: float) -> None:
    mu = 10**log_mu
    epsilon = max(0.0, mu * mu / 2 + deviations * mu)
    bracket = AnalyticCurve(mu=mu).delta(epsilon)
    assert bracket.lower <= true_delta(mu, epsilon) <= bracket.upper


@settings(max_examples=examples(40))
@given(log_mu=st.floats(-6.9, 4), log_delta=st.floats(-100, -0.3))
def test_it_contradicts_an_epsilon_that_is_off_by_a_millionth(
    log_mu: float, log_delta: float
) -> None:
    mu, delta = 10**log_mu, 10**log_delta
    theirs = AnalyticCurve(mu=mu).epsilon(delta)
    assert GaussianCurve(mu=mu).epsilon(delta).meets(theirs)
    if theirs.lower > 1e-4:
        assert not GaussianCurve(mu=mu * (1 + 1e-5)).epsilon(delta).meets(theirs)


def test_releases_are_put_together_as_ours_puts_them() -> None:
    run = events.Composed(
        events=(
            events.Repeated(event=events.Gaussian(noise_multiplier=2.0), count=16),
            events.Gaussian(noise_multiplier=0.25),
        )
    )
    ours = GaussianAccountant().curve(run).epsilon(1e-6)
    assert ours.meets(AnalyticGaussianAccountant().curve(run).epsilon(1e-6))


@pytest.mark.parametrize(
    "event", [events.Gaussian(noise_multiplier=1e9), events.Gaussian(noise_multiplier=1e-6)]
)
def test_noise_that_was_not_compared_is_refused(event: events.Event) -> None:
    with pytest.raises(OutOfReach, match="μ"):
        AnalyticGaussianAccountant().curve(event)


def test_a_delta_that_was_not_compared_is_refused() -> None:
    with pytest.raises(OutOfReach, match="1e-200"):
        AnalyticCurve(mu=1.0).epsilon(1e-201)


def test_a_laplace_release_is_refused() -> None:
    with pytest.raises(Unsupported):
        AnalyticGaussianAccountant().curve(events.Laplace(noise_multiplier=1.0))
