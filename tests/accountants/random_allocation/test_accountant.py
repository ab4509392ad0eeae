"""A random allocation is bracketed: by quadrature, by sampling, by other people's numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import beta

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.accountants.random_allocation.accountant import bracket_delta, bracket_epsilon
from affidavit.accountants.random_allocation.directions import Direction
from affidavit.plan import events
from tests.accountants.events import allocated


def epsilon(bins: int, sigma: float, delta: float, width: float = 1e-4) -> Bracket:
    return AllocationAccountant(relative_width=width).curve(allocated(bins, sigma)).epsilon(delta)


@pytest.mark.ordinary("0.001-0.3", "1e-10-7.0", "1e-06-300.0", "1e-06-1.0")
@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0, 300.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_one_bin_is_the_gaussian_mechanism(sigma: float, delta: float) -> None:
    ours = epsilon(1, sigma, delta)
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma)).epsilon(delta)
    assert ours.lower <= exact.upper
    assert exact.lower <= ours.upper
    assert ours.width <= max(1e-4 * ours.upper, 1e-6) * 1.01


def two_bins(sigma: float, ratio: float, side: str) -> float:
    """δ of two bins: the first term in closed form given the second, which is integrated."""
    s = 1 / sigma

    def integrand(z: float) -> float:
        other = math.exp(s * z - s * s / 2)
        if side == "remove":
            strike = 2 * ratio - other
            if strike <= 0:
                value = 1 - strike
            else:
                d = -math.log(strike) / s - s / 2
                value = float(ndtr(d + s)) - strike * float(ndtr(d))
            return value / 2 * math.exp(-z * z / 2)
        strike = 2 / ratio - other
        if strike <= 0:
            return 0.0
        d = math.log(strike) / s + s / 2
        value = strike * float(ndtr(d)) - float(ndtr(d - s))
        return ratio * value / 2 * math.exp(-z * z / 2)

    kink = math.log(2 * (ratio if side == "remove" else 1 / ratio)) / s + s / 2
    ends = sorted({-13.0, min(max(kink, -13.0), 13.0 + s), 13.0 + s})
    total = sum(
        quad(integrand, a, b, limit=400, epsabs=0, epsrel=1e-12)[0]
        for a, b in itertools.pairwise(ends)
    )
    return float(total / math.sqrt(2 * math.pi))


@pytest.mark.parametrize("side", ["remove", "add"])
@pytest.mark.parametrize(
    ("sigma", "at"),
    [(1.0, 0.5), (1.0, 3.0), (0.5, 6.0), (3.0, 0.3), (0.4, 0.1), (20.0, 0.05), (2.0, 0.0)],
)
def test_two_bins_are_bracketed_as_by_quadrature(side: str, sigma: float, at: float) -> None:
    direction = Direction(bins=2, rate=1 / sigma, side=side)  # type: ignore[arg-type]
    result = bracket_delta(direction, at, 1e-3)
    exact = two_bins(sigma, math.exp(at), side)
    assert result.lower <= exact * (1 + 1e-9)
    assert exact * (1 - 1e-9) <= result.upper
    assert result.width <= 2e-3 * result.upper + 1e-15


def sampled(bins: int, sigma: float, at: float, side: str, draws: int) -> tuple[float, float]:
    """δ as a chance: U > α/S under P, or U > αS under Q; Clopper-Pearson at 1e-9."""
    generator = np.random.Generator(np.random.PCG64([bins, draws]))
    s = 1 / sigma
    hits = 0
    for _ in range(20):
        z = generator.standard_normal((draws // 20, bins))
        if side == "remove":
            z[:, 0] += s
        ratio = np.exp(s * z - s * s / 2).mean(axis=1)
        u = generator.random(draws // 20)
        chance = math.exp(at) / ratio if side == "remove" else math.exp(at) * ratio
        hits += int((u > chance).sum())
    low = beta.ppf(5e-10, hits, draws - hits + 1) if hits else 0.0
    return float(low), float(beta.ppf(1 - 5e-10, hits + 1, draws - hits))


@pytest.mark.ordinary("50-1.0-*", "7-*")
@pytest.mark.parametrize("side", ["remove", "add"])
@pytest.mark.parametrize(
    ("bins", "sigma", "at"), [(7, 0.6, 1.0), (50, 1.0, 0.3), (50, 0.5, 0.5), (200, 0.8, 0.05)]
)
def test_what_is_sampled_lies_in_the_bracket(bins: int, sigma: float, at: float, side: str) -> None:
    direction = Direction(bins=bins, rate=1 / sigma, side=side)  # type: ignore[arg-type]
    result = bracket_delta(direction, at, 1e-3)
    low, high = sampled(bins, sigma, at, side, 100_000)
    assert low <= result.upper
    assert result.lower <= high


@pytest.mark.parametrize(
    ("bins", "sigma", "delta", "theirs"),
    [
        (10, 1.0, 1e-5, (2.1866261, 2.1902771)),
        (100, 1.0, 1e-6, (0.8550673, 0.8605379)),
        (100, 0.5, 1e-6, (6.3927314, 6.3941394)),
        (1000, 5.0, 1e-6, (0.0177347, 0.0240923)),
    ],
)
def test_the_published_construction_meets_ours(
    bins: int, sigma: float, delta: float, theirs: tuple[float, float]
) -> None:
    """PLD_accounting 2.0 (arXiv:2602.17284), geometric convolution, loss grid 0.01, both ends."""
    ours = epsilon(bins, sigma, delta)
    assert theirs[0] <= ours.upper
    assert ours.lower <= theirs[1]
    assert ours.width < (theirs[1] - theirs[0]) / 10


@pytest.mark.parametrize(("bins", "sigma"), [(20, 1.0), (100, 0.7), (1000, 2.0)])
def test_poisson_sampling_given_at_least_one_participation_is_no_better(
    bins: int, sigma: float
) -> None:
    """δ ≤ γ δ_Poisson(log(1 + (e^ε - 1)/γ)), γ = 1/(1 - (1-1/b)^b); arXiv:2502.08202."""
    step = events.PoissonSubsampledGaussian(sampling_probability=1 / bins, noise_multiplier=sigma)
    poisson = FourierAccountant(relative_width=1e-3).curve(events.Repeated(event=step, count=bins))
    gamma = 1 / -math.expm1(bins * math.log1p(-1 / bins))
    remove = Direction(bins=bins, rate=1 / sigma, side="remove")
    for delta in (1e-3, 1e-6):
        at = bracket_epsilon(remove, delta, 1e-3).upper
        bound = gamma * poisson.delta(math.log1p(math.expm1(at) / gamma)).upper
        assert bracket_delta(remove, at, 1e-3).lower <= bound


@pytest.mark.soak
def test_more_bins_and_more_noise_cost_less() -> None:
    by_bins = [epsilon(bins, 0.8, 1e-6) for bins in (1, 2, 3, 10, 100, 1000, 10_000)]
    by_noise = [epsilon(100, sigma, 1e-6) for sigma in (0.2, 0.5, 1.0, 2.0, 10.0, 100.0)]
    for result in (by_bins, by_noise):
        assert all(b.upper < a.lower for a, b in itertools.pairwise(result))


@pytest.mark.ordinary("2")
@pytest.mark.parametrize("bins", [2, pytest.param(64, marks=pytest.mark.soak), 10_000])
def test_the_bracket_is_narrow_down_to_small_deltas_and_falls_with_delta(bins: int) -> None:
    result = [epsilon(bins, 1.1, delta) for delta in (0.1, 1e-3, 1e-6, 1e-10, 1e-14)]
    assert all(item.width <= max(2e-4 * item.upper, 2e-6) for item in result)
    assert all(a.upper < b.lower for a, b in itertools.pairwise(result))


def test_refining_stays_inside() -> None:
    wide, narrow = epsilon(300, 0.9, 1e-6, 1e-2), epsilon(300, 0.9, 1e-6, 1e-5)
    assert wide.lower <= narrow.lower <= narrow.upper <= wide.upper
    assert narrow.width < wide.width / 20


@pytest.mark.ordinary("5-*")
@pytest.mark.parametrize(("bins", "sigma"), [(5, 0.1), (41, 0.1056), (1000, 0.25)])
def test_little_noise_is_still_bracketed(bins: int, sigma: float) -> None:
    result = epsilon(bins, sigma, 1e-6)
    assert 0 < result.lower <= result.upper <= result.lower * (1 + 1e-3)
    alone = GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma)).epsilon(1e-6)
    # At most the bin is unknown: between all of the Gaussian and log b less.
    assert alone.lower - math.log(bins) - 2 <= result.upper <= alone.upper


def test_delta_at_the_epsilon_of_delta_is_delta() -> None:
    curve = AllocationAccountant().curve(allocated(100, 1.0))
    back = curve.delta(curve.epsilon(1e-6).upper)
    assert back.lower <= 1e-6 <= back.upper * (1 + 1e-3)
    assert curve.delta(0.0).upper <= 1


@pytest.mark.soak
def test_a_run_that_ends_within_a_pass_lies_between_the_whole_passes() -> None:
    less, more = allocated(50, 1.0), allocated(50, 1 / math.sqrt(2))
    engine = AllocationAccountant()
    between = events.RandomAllocationGaussian(
        bins=50, noise_multiplier=more.noise_multiplier, attained_at=1.0
    )
    result = engine.curve(between).epsilon(1e-6)
    assert result.lower == engine.curve(less).epsilon(1e-6).lower
    assert result.upper == engine.curve(more).epsilon(1e-6).upper
    first = events.RandomAllocationGaussian(bins=50, noise_multiplier=1.0, attained_at=math.inf)
    begun = engine.curve(first).epsilon(1e-6)
    assert begun == Bracket(lower=0.0, upper=engine.curve(less).epsilon(1e-6).upper)
    assert engine.curve(first).delta(0.5).lower == 0


def test_what_it_does_not_know_is_refused() -> None:
    engine = AllocationAccountant()
    with pytest.raises(Unsupported):
        engine.curve(events.Gaussian(noise_multiplier=1.0))
    for leaf in (allocated(10, 0.05), allocated(10, 2000.0), allocated(2_000_000, 1.0)):
        with pytest.raises(OutOfReach):
            engine.curve(leaf)
    with pytest.raises(OutOfReach, match="delta"):
        engine.curve(allocated(10, 1.0)).epsilon(1e-16)


def test_the_empty_composition_costs_nothing() -> None:
    nothing = AllocationAccountant().curve(events.Repeated(event=allocated(10, 1.0), count=0))
    assert nothing.epsilon(1e-6) == Bracket(lower=0.0, upper=0.0)
    assert nothing.delta(0.5) == Bracket(lower=0.0, upper=0.0)
