"""Rényi divergences at whole orders: against their closed form, and never below the tight ε."""

from __future__ import annotations

import math

import mpmath
import pytest

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.rdp import RdpAccountant
from affidavit.plan import events
from tests.accountants.events import poisson


def subsampled_divergence(q: float, sigma: float, order: int) -> float:
    """Mironov, Talwar and Zhang, arXiv:1908.10530, Section 3.3, by mpmath."""
    with mpmath.workdps(60):
        moment = mpmath.fsum(
            mpmath.binomial(order, k)
            * (1 - mpmath.mpf(q)) ** (order - k)
            * mpmath.mpf(q) ** k
            * mpmath.exp((k * k - k) / (2 * mpmath.mpf(sigma) ** 2))
            for k in range(order + 1)
        )
        return float(mpmath.log(moment) / (order - 1))


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.01, 1.0, 100), (0.3, 4.0, 1), (1e-3, 0.6, 9)])
def test_they_are_those_of_the_closed_form(q: float, sigma: float, steps: int) -> None:
    result = dict(RdpAccountant().curve(poisson(q, sigma, steps)).divergences())
    assert {2, 8, 63} <= result.keys()
    for order in (2, 3, 8, 32, 63):
        exact = steps * subsampled_divergence(q, sigma, order)
        assert exact * (1 - 1e-9) <= result[order] <= exact * (1 + 1e-6)


def test_an_order_has_the_same_bound_whichever_others_are_asked() -> None:
    event = events.Composed(events=(poisson(0.01, 1.0, 100), events.Gaussian(noise_multiplier=3.0)))
    among_all = dict(RdpAccountant().curve(event).divergences())
    alone = RdpAccountant(orders=(2, 63)).curve(event).divergences()
    assert alone == ((2, among_all[2]), (63, among_all[63]))


def test_those_of_a_gaussian_grow_with_the_order() -> None:
    event = events.Composed(
        events=(events.Repeated(event=events.Gaussian(noise_multiplier=3.0), count=7),)
    )
    for order, result in RdpAccountant().curve(event).divergences():
        assert result == pytest.approx(order * 7 / 18, rel=1e-8)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.01, 1.0, 1000), (0.2, 3.0, 50)])
def test_no_order_converts_to_less_than_the_tight_epsilon(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    """Canonne, Kamath and Steinke, arXiv:2004.00010, Proposition 12."""
    event = poisson(q, sigma, steps)
    tight = FourierAccountant().curve(event).epsilon(delta)
    converted = [
        result + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, result in RdpAccountant().curve(event).divergences()
    ]
    assert min(converted) >= tight.lower
    assert min(converted) <= 1.3 * tight.upper
