"""Rényi bounds of allocations: by direct moments, against the lattice, and composed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import dblquad, quad

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.random_allocation import (
    AllocationAccountant,
    RenyiAllocationAccountant,
    renyi,
)
from affidavit.accountants.random_allocation.renyi import ORDERS
from affidavit.accountants.random_allocation.tail_truncation import log_laplace
from affidavit.accountants.rdp import RdpAccountant
from affidavit.plan import events
from tests.accountants.events import allocated


def divergences(event: events.Event) -> tuple[np.ndarray, np.ndarray]:
    remove, add = RenyiAllocationAccountant().curve(event).divergences
    return remove, add


def upper(event: events.Event, delta: float = 1e-6) -> float:
    return RenyiAllocationAccountant().curve(event).epsilon(delta).upper


@pytest.mark.ordinary("*-3")
@pytest.mark.parametrize(("rate", "order"), [(1.0, 2), (1.0, 3), (0.5, 6)])
def test_moments_of_two_bins_are_those_of_quadrature(rate: float, order: int) -> None:
    def moment(power: float) -> float:
        def density(y: float, x: float) -> float:
            mean = (math.exp(rate * x - rate**2 / 2) + math.exp(rate * y - rate**2 / 2)) / 2
            return float(mean**power * math.exp(-(x * x + y * y) / 2) / (2 * math.pi))

        return float(dblquad(density, -11, 15, -11, 15, epsrel=1e-9)[0])

    remove, add = divergences(allocated(2, 1 / rate))
    place = order - int(ORDERS[0])
    for bound, power in ((remove[place], order), (add[place], 1 - order)):
        exact = math.log(moment(power)) / (order - 1)
        assert exact * (1 - 1e-7) <= bound <= exact * 1.002 + 1e-8


@pytest.mark.ordinary("3")
@pytest.mark.parametrize("bins", [3, 100, 3000])
def test_order_two_is_in_closed_form(bins: int) -> None:
    remove, _ = divergences(allocated(bins, 0.8))
    exact = math.log1p(math.expm1(1 / 0.8**2) / bins)
    assert exact <= remove[0] <= exact * (1 + 1e-8)


@pytest.mark.parametrize("tilt", [1e-3, 0.3, 5.0, 200.0])
def test_the_laplace_transform_is_bounded_from_above_and_closely(tilt: float) -> None:
    def integrand(z: float) -> float:
        return math.exp(-tilt * math.exp(0.9 * z - 0.405) - z * z / 2) / math.sqrt(2 * math.pi)

    exact = quad(integrand, -12, 12, epsabs=1e-14, epsrel=1e-12, limit=400)[0]
    bound = math.exp(float(log_laplace(np.array([tilt]), 0.9)[0]))
    assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-3) + 1e-12


@pytest.mark.ordinary("1000-3.0", "10-0.5")
@pytest.mark.parametrize(("bins", "sigma"), [(1, 1.0), (10, 0.5), (100, 1.0), (1000, 3.0)])
def test_it_is_never_below_the_lattice(bins: int, sigma: float) -> None:
    exact = AllocationAccountant().curve(allocated(bins, sigma)).epsilon(1e-6)
    quick = RenyiAllocationAccountant(stride=renyi.WIDE_STRIDE).curve(allocated(bins, sigma))
    assert exact.lower <= min(upper(allocated(bins, sigma)), quick.epsilon(1e-6).upper)
    at = exact.upper
    assert RenyiAllocationAccountant().curve(allocated(bins, sigma)).delta(at).upper >= 1e-6


@pytest.mark.soak
def test_bins_drawn_afresh_lie_between_one_pass_and_bins_that_are_kept() -> None:
    one, run = allocated(100, 1.0), events.Repeated(event=allocated(100, 1.0), count=10)
    once = AllocationAccountant().curve(one).epsilon(1e-6)
    stored = AllocationAccountant().curve(allocated(100, 1 / math.sqrt(10))).epsilon(1e-6)
    result = AllocationAccountant().curve(run).epsilon(1e-6)
    assert once.lower <= result.lower <= result.upper <= min(stored.upper, upper(run)) * (1 + 1e-9)
    assert result.upper < 0.2 * stored.upper
    back = AllocationAccountant().curve(run).delta(result.upper)
    assert back.lower <= 1e-6 <= back.upper * (1 + 1e-6)


def test_a_moment_that_is_no_number_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = np.full(ORDERS.size, np.nan)
    monkeypatch.setattr(renyi, "_divergences", lambda *_: (failed, failed))
    with pytest.raises(OutOfReach, match="numerically"):
        RenyiAllocationAccountant().curve(allocated(10, 1.0))


def test_composition_adds_and_does_not_depend_on_order() -> None:
    metric = events.Gaussian(noise_multiplier=20.0)
    first, second = allocated(50, 1.0), allocated(80, 1.5)
    both = events.Composed(events=(first, second, metric))
    turned = events.Composed(events=(metric, events.Composed(events=(second, first))))
    assert upper(both) == upper(turned)
    assert max(upper(first), upper(second)) < upper(both)
    alone = GaussianAccountant().curve(metric).epsilon(1e-6)
    assert upper(both) < upper(first) + upper(second) + alone.upper


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.01, 1.0, 1000), (0.1, 3.0, 200)])
def test_poisson_phases_cost_what_the_public_renyi_accountant_says(
    q: float, sigma: float, steps: int
) -> None:
    step = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    run = events.Repeated(event=step, count=steps)
    theirs = RdpAccountant().curve(run).epsilon(1e-6).upper
    nearly = upper(events.Composed(events=(run, allocated(1000, 1000.0))))
    assert theirs * (1 - 1e-9) <= nearly <= theirs * 1.02
    both = events.Composed(events=(run, allocated(100, 1.0)))
    assert nearly < upper(both) < nearly + upper(allocated(100, 1.0))


def test_what_it_does_not_know_is_refused() -> None:
    engine = RenyiAllocationAccountant()
    replaced = events.PoissonSubsampledGaussian(
        sampling_probability=0.1, noise_multiplier=1.0, pair="replace_one"
    )
    for event in (replaced, events.Composed(events=(replaced, allocated(10, 1.0)))):
        with pytest.raises(Unsupported):
            engine.curve(event)
    with pytest.raises(OutOfReach):
        engine.curve(allocated(10, 0.05))
    nothing = engine.curve(events.Composed(events=()))
    assert nothing.epsilon(1e-6) == nothing.delta(0.0) == Bracket(lower=0.0, upper=0.0)
