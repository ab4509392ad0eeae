"""Bounds by how often a record takes part hold what exact and Fourier accounting give."""

from __future__ import annotations

import math

import mpmath
import pytest

import affidavit
from affidavit.accountants import accountant
from affidavit.accountants.participations import BELOW, Counted, ParticipationAccountant
from affidavit.plan import Gaussian, PoissonSubsampledGaussian, Repeated, WithoutReplacementGaussian

POISSON = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=0.1)


def once(epsilon: float, q: float, sigma: float) -> mpmath.mpf:
    """δ(ε) of one Poisson-sampled Gaussian release, removing a record, to 40 digits."""
    with mpmath.workdps(max(40, mpmath.mp.dps)):
        ratio, mu = mpmath.e ** mpmath.mpf(epsilon), 1 / mpmath.mpf(sigma)
        inner = mpmath.log((ratio - 1 + q) / q)
        return q * (
            mpmath.ncdf(mu / 2 - inner / mu) - mpmath.e**inner * mpmath.ncdf(-mu / 2 - inner / mu)
        )


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_one_release_is_between_its_bounds(delta: float) -> None:
    upper = ParticipationAccountant().curve(POISSON).epsilon(delta).upper
    lower = Counted(POISSON, 1).epsilon(delta).lower
    assert once(upper, 0.01, 0.1) <= delta <= once(lower, 0.01, 0.1)
    assert 0 < lower < upper < 2 * lower


@pytest.mark.parametrize("delta", [1e-20, 1e-30, 1e-60])
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.2, 3.0), (1e-4, 0.1)])
def test_one_release_is_attacked_where_its_loss_is_rare(
    q: float, sigma: float, delta: float
) -> None:
    leaf = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    lower = Counted(leaf, 1).epsilon(delta).lower
    with mpmath.workdps(120):
        assert once(lower, q, sigma) >= delta
        assert once(lower * 1.1, q, sigma) < delta


def test_an_attack_gains_what_is_claimed_of_it() -> None:
    """The best threshold and count, evaluated in 60 digits."""
    q, sigma, steps, delta = 0.3, 0.9, 40, 1e-10
    leaf = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    best = mpmath.mpf(0)
    with mpmath.workdps(60):
        for below in BELOW:
            threshold = 1 - mpmath.mpf(float(below)) * sigma
            false = mpmath.ncdf(-threshold / sigma)
            true = (1 - q) * false + q * mpmath.ncdf((1 - threshold) / sigma)
            right = wrong = mpmath.mpf(0)
            for count in range(steps, 0, -1):
                ways, rest = mpmath.binomial(steps, count), steps - count
                right += ways * true**count * (1 - true) ** rest
                wrong += ways * false**count * (1 - false) ** rest
                if right > delta:
                    best = max(best, mpmath.log((right - delta) / wrong))
    claimed = Counted(leaf, steps).epsilon(delta).lower
    assert best * (1 - 1e-7) <= claimed <= best


def test_the_mean_over_participations_is_that_of_the_sum() -> None:
    curve = ParticipationAccountant().curve(Repeated(event=POISSON, count=60))
    epsilon = 400.0
    exact = mpmath.mpf(0)
    for k in range(1, 61):
        mu = mpmath.sqrt(k) * 10
        chance = mpmath.binomial(60, k) * mpmath.mpf("0.01") ** k * mpmath.mpf("0.99") ** (60 - k)
        exact += chance * mpmath.ncdf(mu / 2 - epsilon / mu)
    assert exact <= curve.delta(epsilon).upper <= exact * (1 + 1e-6)


@pytest.mark.parametrize(
    "leaf",
    [
        PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=0.25),
        PoissonSubsampledGaussian(
            sampling_probability=0.02, noise_multiplier=0.5, pair="replace_one"
        ),
        WithoutReplacementGaussian(dataset_size=1000, sample_size=10, noise_multiplier=0.4),
    ],
)
def test_where_the_fourier_accountant_reaches_both_ends_hold_its_bracket(leaf: object) -> None:
    event = Repeated(event=leaf, count=100)  # type: ignore[arg-type]
    near = accountant("fourier").curve(event).epsilon(1e-6)
    upper = ParticipationAccountant().curve(event).epsilon(1e-6).upper
    assert Counted(leaf, 100).epsilon(1e-6).lower <= near.upper  # type: ignore[arg-type]
    assert near.lower <= upper


def test_releases_beside_it_add_to_every_number_of_participations() -> None:
    beside = Repeated(event=Gaussian(noise_multiplier=0.05), count=1)
    alone = accountant("gaussian").curve(beside).epsilon(1e-5)
    both = ParticipationAccountant().curve(affidavit.plan.Composed(events=(beside, POISSON)))
    assert alone.lower <= both.epsilon(1e-5).upper < alone.upper + 150


def test_little_noise_is_bracketed_and_solved_for() -> None:
    plan = affidavit.Plan.dp_sgd(
        adjacency="add_remove",
        sampling="poisson",
        size=60_000,
        lot_size=600,
        steps=1000,
        noise_multiplier=0.05,
        delta=1e-5,
    )
    bound = affidavit.epsilon(plan)
    assert 0.7 * bound < bound.lower < bound.upper < math.inf
    sigma = affidavit.noise_multiplier(plan, epsilon=2000)
    assert affidavit.epsilon(plan, noise_multiplier=sigma) <= 2000


@pytest.mark.parametrize("delta", [1e-5, 1e-90, 1e-200])
@pytest.mark.parametrize("rate", [1e-3, 0.999])
def test_no_sampled_run_is_bounded_above_the_run_of_a_record_that_is_always_drawn(
    rate: float, delta: float
) -> None:
    step = PoissonSubsampledGaussian(sampling_probability=rate, noise_multiplier=0.05)
    whole = Repeated(event=Gaussian(noise_multiplier=0.05), count=20)
    sampled = ParticipationAccountant().curve(Repeated(event=step, count=20))
    always = accountant("gaussian").curve(whole)
    assert sampled.epsilon(delta).upper <= always.epsilon(delta).upper * (1 + 1e-6)
    assert sampled.delta(5000.0).upper <= always.delta(5000.0).upper * (1 + 1e-4)
