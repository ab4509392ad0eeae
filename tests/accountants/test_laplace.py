"""Laplace releases: closed profile, pure privacy, and the two engines that know them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.pld import PldAccountant
from affidavit.accountants.protocol import Unsupported
from affidavit.accountants.registry import NAMES, accountant
from affidavit.plan import Composed, Gaussian, Laplace, Repeated


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_one_release_has_the_closed_profile(scale: float, part: float) -> None:
    """δ(ε) = 1 - exp((ε - 1/s)/2) for ε below 1/s (Balle and Wang, arXiv:1805.06530)."""
    epsilon = part / scale
    true = -math.expm1((epsilon - 1 / scale) / 2)
    result = accountant("pld").curve(Laplace(noise_multiplier=scale)).delta(epsilon)
    assert result.lower <= true * (1 + 1e-9)
    assert result.upper >= true * (1 - 1e-9)
    assert result.upper - result.lower < 1e-3
    assert accountant("rdp").curve(Laplace(noise_multiplier=scale)).delta(epsilon).upper >= true


@settings(max_examples=10)
@given(scale=st.floats(1.0, 20.0), count=st.integers(1, 20), delta=st.sampled_from([1e-3, 1e-7]))
def test_it_never_costs_more_than_pure_privacy_and_the_engines_meet(
    scale: float, count: int, delta: float
) -> None:
    event = Repeated(event=Laplace(noise_multiplier=scale), count=count)
    curve = PldAccountant().curve(event)
    pld = curve.epsilon(delta)
    rdp = accountant("rdp").curve(event).epsilon(delta)
    rounded_up = count * curve.interval
    assert pld.upper <= (count / scale + rounded_up) * (1 + 1e-9)
    assert pld.lower <= rdp.upper * (1 + 1e-9)


def test_it_composes_with_gaussian_releases() -> None:
    gaussian = Repeated(event=Gaussian(noise_multiplier=4.0), count=10)
    both = Composed(events=(gaussian, Laplace(noise_multiplier=5.0)))
    alone = accountant("pld").curve(gaussian).epsilon(1e-6)
    result = accountant("pld").curve(both).epsilon(1e-6)
    assert alone.upper < result.upper < alone.upper + 0.2


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("pld", "rdp")])
def test_the_other_engines_refuse_it(name: str) -> None:
    with pytest.raises(Unsupported):
        accountant(name).curve(Laplace(noise_multiplier=1.0))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        Laplace(noise_multiplier=scale)
