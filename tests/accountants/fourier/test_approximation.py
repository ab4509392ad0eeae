"""Approximations are near where they should be."""

from __future__ import annotations

import pytest

from affidavit.accountants.fourier import FourierAccountant, approximate_epsilon
from affidavit.plan import PoissonSubsampledGaussian, Repeated


def plan(q: float, sigma: float, steps: int) -> Repeated:
    leaf = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return Repeated(event=leaf, count=steps)


def test_approximations_are_near_where_many_releases_compose() -> None:
    event = plan(0.05, 2.0, 2000)
    curve = FourierAccountant().curve(event)
    assert approximate_epsilon(event, 1e-6) == pytest.approx(curve.epsilon(1e-6).upper, rel=0.01)


def test_one_release_of_hardly_any_noise_has_its_closed_form() -> None:
    event = plan(0.1, 1e-6, 1)
    upper = FourierAccountant().curve(event).epsilon(1e-5).upper
    assert approximate_epsilon(event, 1e-5) == pytest.approx(upper, rel=1e-9)
