"""Composed allocations: brackets that hold what other methods give, and are narrow."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import norm

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.random_allocation import (
    AllocationAccountant,
    RenyiAllocationAccountant,
)
from affidavit.accountants.random_allocation.composed import Pass
from affidavit.accountants.random_allocation.directions import Direction
from affidavit.accountants.random_allocation.replaced import replaced_orders
from affidavit.accountants.witness_search import search_witness
from affidavit.plan import events
from tests.accountants.events import allocated


def repeated(event: events.Event, count: int) -> events.Event:
    return events.Repeated(event=event, count=count)


def bracket(*members: events.Event, delta: float = 1e-6) -> Bracket:
    return AllocationAccountant().curve(events.Composed(events=members)).epsilon(delta)


@pytest.mark.ordinary("40.0-1000")
@pytest.mark.parametrize(("sigma", "passes"), [(2.0, 4), (0.6, 3), (40.0, 1000)])
def test_passes_of_one_bin_are_the_gaussian_mechanism(sigma: float, passes: int) -> None:
    result = bracket(repeated(allocated(1, sigma), passes))
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma / math.sqrt(passes)))
    assert result.lower <= exact.epsilon(1e-6).upper
    assert exact.epsilon(1e-6).lower <= result.upper
    assert result.width <= 1e-3 * result.upper


def test_beside_other_releases_one_bin_is_a_gaussian_release() -> None:
    step = events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=1.2)
    others = repeated(step, 300), events.Gaussian(noise_multiplier=9.0)
    exact = FourierAccountant().curve(
        events.Composed(events=(*others, events.Gaussian(noise_multiplier=3.0)))
    )
    result, other = bracket(*others, allocated(1, 3.0)), exact.epsilon(1e-6)
    assert result.lower <= other.upper
    assert other.lower <= result.upper
    assert result.width <= 1e-3 * result.upper


@pytest.mark.soak
@pytest.mark.parametrize("removed", [True, False])
def test_an_experiment_agrees(removed: bool) -> None:
    """Likelihood ratios of two passes, drawn from either hypothesis."""
    bins, rate, passes, epsilon, count = 20, 0.8, 2, 0.5, 400_000
    draw = np.random.default_rng(11)
    losses = np.zeros(count)
    for _ in range(passes):
        z = draw.standard_normal((count, bins))
        if removed:
            z[:, 0] += rate
        ratio = np.exp(rate * z - rate**2 / 2).mean(axis=1)
        losses += np.log(ratio) if removed else -np.log(ratio)
    gains = np.maximum(0, -np.expm1(epsilon - losses))
    mean, spread = float(gains.mean()), float(gains.std() / math.sqrt(count))
    curve = AllocationAccountant().curve(repeated(allocated(bins, 1 / rate), passes))
    result = curve.delta(epsilon)
    assert mean - 5 * spread <= result.upper
    if removed:  # the worse of the two
        assert result.lower <= mean + 5 * spread
        assert result.width <= 1e-2 * result.upper


@pytest.mark.ordinary("5-10.0-*")
@pytest.mark.parametrize(
    ("bins", "sigma", "passes", "delta"),
    [(100, 2.0, 10, 1e-6), (5, 10.0, 1000, 1e-6), (100, 0.6, 100, 1e-7), (20, 0.4, 2, 1e-9)],
)
def test_it_is_narrow_and_below_the_moments(
    bins: int, sigma: float, passes: int, delta: float
) -> None:
    run = repeated(allocated(bins, sigma), passes)
    result = bracket(run, delta=delta)
    assert (
        0
        < result.lower
        <= result.upper
        <= RenyiAllocationAccountant().curve(run).epsilon(delta).upper
    )
    assert result.width <= 2e-3 * result.upper
    back = AllocationAccountant().curve(run).delta(result.upper)
    assert back.lower <= delta <= back.upper * (1 + 1e-2)


@pytest.mark.soak
def test_every_release_costs_something_and_their_order_does_not_matter() -> None:
    first, second, metric = (
        allocated(50, 1.0),
        allocated(80, 1.5),
        events.Gaussian(noise_multiplier=20.0),
    )
    ends = [bracket(first), bracket(first, second), bracket(first, second, metric)]
    assert all(one.upper < two.lower for one, two in pairwise(ends))
    assert bracket(metric, second, first) == ends[-1]


@pytest.mark.soak
def test_a_last_pass_of_one_released_bin_is_a_poisson_sample() -> None:
    """The record is in the bin with probability 1/b, whatever the others are."""
    whole = repeated(allocated(20, 1.2), 3)
    sample = events.PoissonSubsampledGaussian(sampling_probability=1 / 20, noise_multiplier=1.2)
    begun = events.RandomAllocationGaussian(bins=20, noise_multiplier=1.2, released=1)
    result, other = bracket(whole, begun), bracket(whole, sample)
    assert result.lower <= other.upper
    assert other.lower <= result.upper
    assert result.width <= 1e-3 * result.upper


@pytest.mark.ordinary("0.5")
@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_measures_of_a_pass_enclose_its_curve(mu: float) -> None:
    """One bin, whose curve is closed."""
    remove, add = (Direction(bins=1, rate=mu, side=side) for side in ("remove", "add"))
    above, below = Pass(this=remove, other=add).measures(1e-9)
    for epsilon in np.linspace(-2, 4, 301) * mu:
        exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        for measure, sign in ((above, 1), (below, -1)):
            losses = measure.grid.losses()
            gains = np.maximum(0, -np.expm1(epsilon - losses)) @ measure.masses + measure.infinite
            assert sign * (gains - exact) >= -64 * UNIT_ROUNDOFF
            assert abs(gains - exact) <= 3e-3


@pytest.mark.soak
def test_what_the_checker_proves_is_not_below() -> None:
    begun = events.RandomAllocationGaussian(bins=30, noise_multiplier=1.0, released=10)
    run = events.Composed(events=(repeated(allocated(30, 1.0), 2), begun))
    result = bracket(run)
    witness, _ = search_witness(run, result, 1e-6, 1e-3)
    assert result.lower <= float(witness.epsilon) <= result.upper * (1 + 1e-3)


@pytest.mark.parametrize("infinite", [0.2, 1e-3])
def test_no_outcome_of_a_pass_has_a_negative_probability(infinite: float) -> None:
    """With little noise some bounds of δ are of 1, after lesser ones at smaller ε."""
    leaf = events.ReplacedAllocationGaussian(
        bins=2, noise_multiplier=0.4238950328209178, drawn=0.5, place="zero_out"
    )
    one, other = replaced_orders(leaf)
    for this, that in ((one, other), (other, one)):
        above, _ = Pass(this=this, other=that).measures(infinite)
        assert above.masses.min() >= 0
        assert above.infinite >= 0
        assert 0 < above.masses.sum() + above.infinite <= 1 + 1e-9
