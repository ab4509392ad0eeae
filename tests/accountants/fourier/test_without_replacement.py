"""Sampling without replacement: between two proved curves."""

from __future__ import annotations

import math

import mpmath
import pytest

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events


def leaf(size: int, sample: int, sigma: float) -> events.WithoutReplacementGaussian:
    return events.WithoutReplacementGaussian(
        dataset_size=size, sample_size=sample, noise_multiplier=sigma
    )


def closed_form(gamma: float, sigma: float, epsilon: float) -> mpmath.mpf:
    """δ of one step at ε >= 0: γ times the Gaussian's at the inner α."""
    with mpmath.workdps(40):
        gamma, mu = mpmath.mpf(gamma), 2 / mpmath.mpf(sigma)
        alpha = (mpmath.e ** mpmath.mpf(epsilon) - (1 - gamma)) / gamma
        z = mpmath.log(alpha) / mu
        return gamma * (mpmath.ncdf(mu / 2 - z) - alpha * mpmath.ncdf(-mu / 2 - z))


@pytest.mark.parametrize(
    ("size", "sample", "sigma", "at"),
    [(10_000, 100, 2.0, 0.1), (1000, 300, 4.0, 0.3), (60_000, 60, 1.0, 1.5), (100, 50, 30.0, 0.01)],
)
def test_one_step_meets_the_closed_form(size: int, sample: int, sigma: float, at: float) -> None:
    bracket = FourierAccountant().curve(leaf(size, sample, sigma)).delta(at)
    assert bracket.lower <= closed_form(sample / size, sigma, at) <= bracket.upper
    assert bracket.width <= 1e-3 * bracket.upper


@pytest.mark.ordinary("100-*")
@pytest.mark.parametrize(("sample", "sigma", "steps"), [(100, 1.0, 200), (1000, 5.0, 50)])
def test_the_bracket_holds_the_poisson_curve_of_the_attained_pair(
    sample: int, sigma: float, steps: int
) -> None:
    """((1-γ)N(0) + γN(2), N(0)) is the add/remove pair at half the noise multiplier."""
    fixed = events.Repeated(event=leaf(10_000, sample, sigma), count=steps)
    poisson = events.Repeated(
        event=events.PoissonSubsampledGaussian(
            sampling_probability=sample / 10_000, noise_multiplier=sigma / 2
        ),
        count=steps,
    )
    result = FourierAccountant().curve(fixed).epsilon(1e-6)
    attained = FourierAccountant().curve(poisson).epsilon(1e-6)
    assert result.lower <= attained.upper
    assert result.upper >= attained.lower
    assert result.upper <= 1.25 * attained.upper
    assert math.isclose(result.lower, attained.lower, rel_tol=2e-3)


def test_never_above_the_unsampled_gaussian() -> None:
    fixed = events.Repeated(event=leaf(1000, 900, 5.0), count=30)
    full = events.Repeated(event=events.Gaussian(noise_multiplier=2.5), count=30)
    result = FourierAccountant().curve(fixed).epsilon(1e-6)
    assert result.upper < FourierAccountant().curve(full).epsilon(1e-6).upper


@pytest.mark.soak
def test_it_composes_with_other_leaves() -> None:
    fixed = events.Repeated(event=leaf(1000, 100, 5.0), count=30)
    mixed = events.Composed(events=(fixed, events.Gaussian(noise_multiplier=10.0)))
    curve = FourierAccountant().curve
    assert curve(fixed).epsilon(1e-6).lower < curve(mixed).epsilon(1e-6).upper
