"""The attack on fresh passes: below what is tight, near it, and below what is proved."""

from __future__ import annotations

import math

import numpy as np
import pytest

from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.accountants.random_allocation.attack import Losses, repeated_attack
from affidavit.plan import RandomAllocationGaussian, Repeated


def tight(bins: int, sigma: float, delta: float) -> tuple[float, float]:
    leaf = RandomAllocationGaussian(bins=bins, noise_multiplier=sigma)
    bracket = AllocationAccountant().curve(leaf).epsilon(delta)
    return bracket.lower, bracket.upper


def attacked(bins: int, sigma: float, passes: int, delta: float) -> float:
    return max(side.epsilon(delta) for side in repeated_attack(bins, 1 / sigma, passes))


@pytest.mark.parametrize(
    ("bins", "sigma", "share"),
    [(100, 2.0, 0.95), (40, 1.0, 0.95), (1000, 1.0, 0.9), (10, 0.6, 0.8)],
)
@pytest.mark.parametrize("delta", [1e-4, 1e-6])
def test_of_one_pass_it_is_below_the_tight_value_and_near_it(
    bins: int, sigma: float, share: float, delta: float
) -> None:
    lower, upper = tight(bins, sigma, delta)
    assert share * lower <= attacked(bins, sigma, 1, delta) <= upper


def test_one_bin_is_the_gaussian_mechanism_of_all_passes() -> None:
    _, upper = tight(1, 2.0 / math.sqrt(4), 1e-5)
    assert 0.98 * upper <= attacked(1, 2.0, 4, 1e-5) <= upper


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
    side = repeated_attack(bins, rate, passes)[0 if removed else 1]
    assert side.delta(epsilon) <= mean + 5 * spread
    assert side.delta(epsilon) >= 0.9 * (mean - 5 * spread)


def test_passes_raise_the_lower_end_and_it_stays_below_the_upper() -> None:
    leaf = RandomAllocationGaussian(bins=50, noise_multiplier=1.5)
    ends = []
    for passes in (1, 2, 5, 20):
        curve = AllocationAccountant().curve(Repeated(event=leaf, count=passes))
        bracket = curve.epsilon(1e-6)
        assert bracket.lower <= bracket.upper
        assert curve.delta(bracket.lower * 0.9).lower <= curve.delta(bracket.lower * 0.9).upper
        ends.append(bracket.lower)
    assert ends == sorted(ends)
    assert ends[-1] > 2 * ends[0]


def test_the_last_of_several_passes_that_is_not_whole_is_not_attained() -> None:
    def lower(attained_at: float | None, passes: int) -> float:
        leaf = RandomAllocationGaussian(bins=50, noise_multiplier=1.5, attained_at=attained_at)
        return AllocationAccountant().curve(Repeated(event=leaf, count=passes)).epsilon(1e-6).lower

    assert lower(math.inf, 6) == lower(None, 5) < lower(None, 6)


def test_what_transforms_round_is_subtracted() -> None:
    exact = Losses(np.array([0.0, 0.5, 0.5]), 0.0, 1.0, 0.0)
    rounded = Losses(np.array([0.0, 0.5, 0.5]), 0.0, 1.0, 1e-3)
    assert exact.delta(0.5) == pytest.approx(0.5 * (2 - math.exp(-0.5) - math.exp(-1.5)), rel=1e-9)
    assert rounded.delta(0.5) == pytest.approx(exact.delta(0.5) - 1e-3 * math.sqrt(2), rel=1e-9)
    assert exact.epsilon(0.99) == 0.0
