"""Bounds by how often a record takes part hold what exact and Fourier accounting give."""

from __future__ import annotations

import math
from typing import Literal

import mpmath
import pytest

import affidavit
from affidavit.accountants import accountant
from affidavit.accountants.participations import (
    THRESHOLD_DEVIATIONS,
    CountingAttack,
    ParticipationAccountant,
)
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import events

POISSON = events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=0.1)


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
    lower = CountingAttack(POISSON, 1).epsilon(delta).lower
    assert once(upper, 0.01, 0.1) <= delta <= once(lower, 0.01, 0.1)
    assert 0 < lower < upper < 2 * lower


@pytest.mark.parametrize("delta", [1e-20, 1e-30, 1e-60])
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.2, 3.0), (1e-4, 0.1)])
def test_one_release_is_attacked_where_its_loss_is_rare(
    q: float, sigma: float, delta: float
) -> None:
    leaf = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    lower = CountingAttack(leaf, 1).epsilon(delta).lower
    with mpmath.workdps(120):
        assert once(lower, q, sigma) >= delta
        assert once(lower * 1.1, q, sigma) < delta


@pytest.mark.soak
def test_an_attack_gains_what_is_claimed_of_it() -> None:
    """The best threshold and count, evaluated in 60 digits."""
    q, sigma, steps, delta = 0.3, 0.9, 40, 1e-10
    leaf = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    best = mpmath.mpf(0)
    with mpmath.workdps(60):
        for below in THRESHOLD_DEVIATIONS:
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
    claimed = CountingAttack(leaf, steps).epsilon(delta).lower
    assert best * (1 - 1e-7) <= claimed <= best


def test_the_mean_over_participations_is_that_of_the_sum() -> None:
    curve = ParticipationAccountant().curve(events.Repeated(event=POISSON, count=60))
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
        events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=0.25),
        events.PoissonSubsampledGaussian(
            sampling_probability=0.02, noise_multiplier=0.5, pair="replace_one"
        ),
        events.WithoutReplacementGaussian(dataset_size=1000, sample_size=10, noise_multiplier=0.4),
    ],
)
def test_where_the_fourier_accountant_reaches_both_ends_hold_its_bracket(leaf: object) -> None:
    event = events.Repeated(event=leaf, count=100)  # type: ignore[arg-type]
    near = accountant("fourier").curve(event).epsilon(1e-6)
    upper = ParticipationAccountant().curve(event).epsilon(1e-6).upper
    assert CountingAttack(leaf, 100).epsilon(1e-6).lower <= near.upper  # type: ignore[arg-type]
    assert near.lower <= upper


def test_releases_beside_it_add_to_every_number_of_participations() -> None:
    beside = events.Repeated(event=events.Gaussian(noise_multiplier=0.05), count=1)
    alone = accountant("gaussian").curve(beside).epsilon(1e-5)
    both = ParticipationAccountant().curve(events.Composed(events=(beside, POISSON)))
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
    step = events.PoissonSubsampledGaussian(sampling_probability=rate, noise_multiplier=0.05)
    whole = events.Repeated(event=events.Gaussian(noise_multiplier=0.05), count=20)
    sampled = ParticipationAccountant().curve(events.Repeated(event=step, count=20))
    always = accountant("gaussian").curve(whole)
    assert sampled.epsilon(delta).upper <= always.epsilon(delta).upper * (1 + 1e-6)
    assert sampled.delta(5000.0).upper <= always.delta(5000.0).upper * (1 + 1e-4)


BESIDE = (events.Gaussian(noise_multiplier=3.0), events.Laplace(noise_multiplier=20.0))


@pytest.mark.ordinary("leaf0-*", "leaf2-*")
@pytest.mark.parametrize(
    ("leaf", "always"),
    [
        (events.PoissonSubsampledGaussian(sampling_probability=0.3, noise_multiplier=2.0), 2.0),
        (
            events.PoissonSampledGroupGaussian(
                records=3, sampling_probability=0.2, noise_multiplier=4.0, pair="replace_one"
            ),
            4.0 / 6,
        ),
        (
            events.WithoutReplacementGroupGaussian(
                records=2, dataset_size=50, sample_size=9, noise_multiplier=9.0
            ),
            9.0 / 4,
        ),
        (
            events.TruncatedPoissonGaussian(
                dataset_size=100, sampling_probability=0.1, max_lot_size=10, noise_multiplier=5.0
            ),
            5.0 / 2,
        ),
    ],
)
def test_several_kinds_of_release_lie_between_fourier_and_what_is_always_drawn(
    leaf: events.Leaf, always: float
) -> None:
    pair: Literal["add_remove", "replace_one"] = "replace_one"
    if not isinstance(
        leaf, events.PoissonSampledGroupGaussian | events.WithoutReplacementGroupGaussian
    ):
        pair = "add_remove"
    other = events.PoissonSubsampledGaussian(
        sampling_probability=0.1, noise_multiplier=3.0, pair=pair
    )
    event = events.Composed(events=(events.Repeated(event=leaf, count=4), other, *BESIDE))
    alone = 3.0 / 2 if pair == "replace_one" else 3.0
    unsampled = events.Composed(
        events=(
            events.Repeated(event=events.Gaussian(noise_multiplier=always), count=4),
            events.Gaussian(noise_multiplier=alone),
            BESIDE[0],
        )
    )
    curve = ParticipationAccountant().curve(event)
    for delta in (1e-3, 1e-8):
        upper = curve.epsilon(delta).upper
        assert accountant("fourier").curve(event).epsilon(delta).lower <= upper
        most = accountant("gaussian").curve(unsampled).epsilon(delta).upper + 1 / 20
        assert upper <= most * (1 + 1e-6)
        assert delta * (1 - 1e-4) <= curve.delta(upper).upper <= delta * (1 + 1e-6)


def test_a_pass_over_bins_is_at_most_what_its_loudest_bin_costs() -> None:
    for leaf in (
        events.RandomAllocationGaussian(bins=10, noise_multiplier=0.1),
        events.BallsInBinsGaussian(
            gram=events.Gram(((4.0, 1.0), (1.0, 9.0))), noise_multiplier=0.3
        ),
    ):
        curve = ParticipationAccountant().curve(leaf)
        loudest = accountant("gaussian").curve(events.Gaussian(noise_multiplier=0.1))
        assert curve.epsilon(1e-6).upper == pytest.approx(loudest.epsilon(1e-6).upper)


def test_what_no_grid_holds_has_a_bound() -> None:
    """Users beside much unsampled noise, which was refused, and rare losses of two kinds."""
    users = {"size": 10_000, "unit": "user", "contributions_per_user": 30}
    release = {"name": "all", "clip_norm": 1.0, "noise_multiplier": 2.0}
    independent = {"releases": [release], "noise": {"kind": "independent"}}
    plan = {
        "version": 1,
        "dataset": users,
        "adjacency": "add_remove",
        "target": {"delta": 1e-9},
        "phases": [
            {"sampling": {"scheme": "full_batch"}, "steps": 1, **independent},
            {"sampling": {"scheme": "poisson", "probability": 0.01}, "steps": 200, **independent},
        ],
    }
    bound = affidavit.epsilon(plan)
    assert 190 < bound.lower < bound < 800


def test_no_run_of_several_kinds_is_bounded_above_that_of_a_record_that_is_always_drawn() -> None:
    steps = [
        events.PoissonSubsampledGaussian(sampling_probability=0.9, noise_multiplier=sigma)
        for sigma in (0.08, 0.09)
    ]
    event = events.Composed(events=tuple(steps))
    always = events.Composed(
        events=tuple(events.Gaussian(noise_multiplier=x.noise_multiplier) for x in steps)
    )
    renyi = accountant("rdp").curve(event).epsilon(1e-40).upper
    result = ParticipationAccountant().curve(event).epsilon(1e-40).upper
    assert result <= accountant("gaussian").curve(always).epsilon(1e-40).upper * (1 + 1e-6)
    assert result < renyi


def test_a_loss_beyond_doubles_is_out_of_reach() -> None:
    event = events.RandomAllocationGaussian(bins=10, noise_multiplier=1e-10)
    with pytest.raises(OutOfReach):
        ParticipationAccountant().curve(event).epsilon(1e-6)
