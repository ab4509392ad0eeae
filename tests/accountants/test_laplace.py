"""Laplace releases: closed profile, pure privacy, and the two engines that know them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from affidavit.accountants.pld import PldAccountant
from affidavit.accountants.protocol import Unsupported
from affidavit.accountants.registry import ENGINE_NAMES, accountant
from affidavit.plan import events


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_one_release_has_the_closed_profile(scale: float, part: float) -> None:
    """δ(ε) = 1 - exp((ε - 1/s)/2) for ε below 1/s (Balle and Wang, arXiv:1805.06530)."""
    epsilon = part / scale
    true = -math.expm1((epsilon - 1 / scale) / 2)
    result = accountant("pld").curve(events.Laplace(noise_multiplier=scale)).delta(epsilon)
    assert result.lower <= true * (1 + 1e-9)
    assert result.upper >= true * (1 - 1e-9)
    assert result.upper - result.lower < 1e-3
    assert (
        accountant("rdp").curve(events.Laplace(noise_multiplier=scale)).delta(epsilon).upper >= true
    )


@settings(max_examples=10)
@given(scale=st.floats(1.0, 20.0), count=st.integers(1, 20), delta=st.sampled_from([1e-3, 1e-7]))
def test_it_never_costs_more_than_pure_privacy_and_the_engines_meet(
    scale: float, count: int, delta: float
) -> None:
    event = events.Repeated(event=events.Laplace(noise_multiplier=scale), count=count)
    curve = PldAccountant().curve(event)
    pld = curve.epsilon(delta)
    rdp = accountant("rdp").curve(event).epsilon(delta)
    rounded_up = count * curve.interval
    assert pld.upper <= (count / scale + rounded_up) * (1 + 1e-9)
    assert pld.lower <= rdp.upper * (1 + 1e-9)


@pytest.mark.soak
def test_it_composes_with_gaussian_releases() -> None:
    gaussian = events.Repeated(event=events.Gaussian(noise_multiplier=4.0), count=10)
    both = events.Composed(events=(gaussian, events.Laplace(noise_multiplier=5.0)))
    alone = accountant("pld").curve(gaussian).epsilon(1e-6)
    result = accountant("pld").curve(both).epsilon(1e-6)
    assert alone.upper < result.upper < alone.upper + 0.2


@pytest.mark.parametrize(("scale", "sigma"), [(0.3, 2.0), (1.0, 3.0), (20.0, 0.8)])
def test_beside_a_gaussian_release_the_bracket_holds_quadrature(scale: float, sigma: float) -> None:
    """δ(ε) is the mean of the Gaussian curve at ε - l over the Laplace loss l under P."""
    end, mu = 1 / scale, 1 / sigma

    def gaussian(epsilon: float) -> float:
        over, under = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
        return float(over - math.exp(epsilon) * under)

    both = events.Composed(
        events=(events.Laplace(noise_multiplier=scale), events.Gaussian(noise_multiplier=sigma))
    )
    curve = accountant("fourier").curve(both)
    bracket = curve.epsilon(1e-6)
    assert bracket.width <= 2e-4 * bracket.upper
    for epsilon in (bracket.upper, 0.7 * bracket.upper):
        between, _ = quad(
            lambda loss: math.exp((loss - end) / 2) / 4 * gaussian(epsilon - loss),  # noqa: B023
            -end,
            end,
            epsabs=0,
            epsrel=1e-10,
            limit=200,
        )
        ends = gaussian(epsilon - end) / 2 + math.exp(-end) * gaussian(epsilon + end) / 2
        result = curve.delta(epsilon)
        assert result.lower <= (between + ends) * (1 + 1e-9)
        assert result.upper >= (between + ends) * (1 - 1e-9)
        assert result.width <= 1e-2 * result.upper


def test_beside_balls_in_bins_it_costs_at_most_its_own_loss() -> None:
    bins = events.RandomAllocationGaussian(bins=50, noise_multiplier=1.0)
    alone = accountant("allocation").curve(bins).epsilon(1e-6)
    both = accountant("allocation").curve(
        events.Composed(events=(bins, events.Laplace(noise_multiplier=10.0)))
    )
    result = both.epsilon(1e-6)
    assert alone.lower < result.lower <= result.upper < alone.upper + 0.1
    assert result.width <= 1e-3 * result.upper


@pytest.mark.soak
def test_a_loss_beyond_the_exponentials_of_doubles_is_bracketed() -> None:
    """1609.858667821509 is by quadrature in 40 digits, as above."""
    releases = (
        events.Gaussian(noise_multiplier=0.03152331262030761),
        events.Repeated(event=events.Gaussian(noise_multiplier=0.7411), count=971),
        events.Laplace(noise_multiplier=1.423),
    )
    result = accountant("pld").curve(events.Composed(events=releases)).epsilon(1.103e-5)
    assert result.lower <= 1609.858667821509 <= result.upper
    assert result.width < 0.02


def test_alone_it_costs_at_most_its_largest_loss_however_often_it_is_drawn() -> None:
    event = events.Repeated(event=events.Laplace(noise_multiplier=4.0), count=3)
    curve = accountant("participations").curve(event)
    assert 0.75 <= curve.epsilon(1e-9).upper < 0.75 * (1 + 1e-6)
    assert curve.delta(0.75 * (1 + 1e-6)).upper == 0
    assert curve.delta(0.7).upper > 0


KNOW_IT = ("pld", "rdp", "participations")


@pytest.mark.parametrize("name", [name for name in ENGINE_NAMES if name not in KNOW_IT])
def test_the_other_engines_refuse_it_alone(name: str) -> None:
    with pytest.raises(Unsupported):
        accountant(name).curve(events.Laplace(noise_multiplier=1.0))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        events.Laplace(noise_multiplier=scale)
