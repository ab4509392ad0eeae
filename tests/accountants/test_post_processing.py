"""Lower ends of what a run contains: never above the truth, nor 0 where an attack gives more."""

from __future__ import annotations

import math

import pytest

from affidavit.accountants import GaussianCurve, PostProcessedCurve, accountant
from affidavit.accountants.bracketing_curves import attained_event
from affidavit.plan import events
from tests.accountants.events import poisson


def one_release(q: float, sigma: float, delta: float) -> float:
    """ε of one Poisson-subsampled release in closed form: δ is q times a Gaussian's."""
    inner = GaussianCurve(mu=1 / sigma).epsilon(delta / q).upper
    return math.log(1 - q) if inner == 0 else inner + math.log(q + (1 - q) * math.exp(-inner))


@pytest.mark.parametrize(("q", "sigma"), [(0.3, 0.05), (0.01, 0.15), (0.5, 0.2), (1e-3, 3.0)])
@pytest.mark.parametrize("delta", [1e-4, 1e-12, 1e-30])
def test_one_release_is_bounded_from_below(q: float, sigma: float, delta: float) -> None:
    lower = PostProcessedCurve(event=poisson(q, sigma)).epsilon(delta).lower
    assert lower <= one_release(q, sigma, delta) * (1 + 1e-9)
    assert lower > 0


def test_many_releases_are_attacked_at_the_delta_that_is_asked_for() -> None:
    run = poisson(0.01, 1.0, 1000)
    lower = PostProcessedCurve(event=run).epsilon(1e-30).lower
    assert 1.2 * PostProcessedCurve(event=run).epsilon(1e-20).lower < lower
    assert lower <= accountant("participations").curve(run).epsilon(1e-30).upper


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_a_selection_costs_more_than_a_run_and_at_most_its_bound(shape: float) -> None:
    run = poisson(0.01, 1.0, 1000)
    event = events.RepeatAndSelect(event=run, mean=10.0, shape=shape)
    lower = PostProcessedCurve(event=event).epsilon(1e-6).lower
    once = accountant("fourier").curve(run).epsilon(1e-6)
    assert once.upper < lower <= accountant("selection").curve(event).epsilon(1e-6).upper


def test_a_poisson_number_of_runs_can_be_none() -> None:
    """With a mean of 1 a third of the selections release nothing: what is left is at most that."""
    run = events.Gaussian(noise_multiplier=0.05)
    selection = events.RepeatAndSelect(event=run, mean=1.0, shape=math.inf)
    result = PostProcessedCurve(event=selection).delta(1.0).lower
    assert result == pytest.approx(-math.expm1(-1.0), rel=1e-6)
    assert result <= -math.expm1(-1.0)


@pytest.mark.ordinary("10")
@pytest.mark.parametrize("bins", [1, 10, 300])
def test_one_bin_of_many_is_below_the_bracket_of_all(bins: int) -> None:
    event = events.RandomAllocationGaussian(bins=bins, noise_multiplier=1.0)
    lower = PostProcessedCurve(event=event).epsilon(1e-6).lower
    assert 0 < lower <= accountant("allocation").curve(event).epsilon(1e-6).upper


def test_what_is_not_known_costs_at_least_nothing() -> None:
    for event in (events.Composed(events=()), poisson(1e-9, 1.0), poisson(0.1, 1e-9)):
        assert PostProcessedCurve(event=event).epsilon(1e-6).lower >= 0
    assert PostProcessedCurve(event=poisson(0.1, 1.0)).epsilon(1 - 1e-9).lower == 0


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_a_laplace_release_is_seen_by_the_outputs_of_its_largest_loss(scale: float) -> None:
    lower = PostProcessedCurve(event=events.Laplace(noise_multiplier=scale)).epsilon(1e-6).lower
    truth = 1 / scale + 2 * math.log1p(-1e-6)
    assert truth * (1 - 1e-4) < lower <= truth


def test_many_laplace_releases_are_counted() -> None:
    """The largest loss of all is seen at more than δ."""
    event = events.Repeated(event=events.Laplace(noise_multiplier=0.5), count=20)
    lower = PostProcessedCurve(event=event).epsilon(1e-7).lower
    assert 40 + math.log1p(-(2**20) * 1e-7) - 1e-6 <= lower <= 40


def test_rare_samples_are_attacked() -> None:
    """δ is far below the chance that the record is ever drawn."""
    lower = PostProcessedCurve(event=poisson(1e-7, 0.2, 10_000)).epsilon(1e-9).lower
    assert lower > 1
    assert (
        lower <= accountant("participations").curve(poisson(1e-7, 0.2, 10_000)).epsilon(1e-9).upper
    )


def test_much_noise_hides_nothing_of_another_release() -> None:
    alone = poisson(0.1, 1.0, 10)
    event = events.Composed(events=(alone, poisson(0.1, 5000.0)))
    assert PostProcessedCurve(event=event).epsilon(1e-6) == PostProcessedCurve(event=alone).epsilon(
        1e-6
    )


def test_a_laplace_release_is_seen_beside_samples() -> None:
    run = events.Composed(events=(poisson(0.05, 8.5, 1000), events.Laplace(noise_multiplier=3.2)))
    bracket = accountant("fourier").curve(run).epsilon(1e-6)
    assert bracket.lower > accountant("fourier").curve(run.events[0]).epsilon(1e-6).upper + 0.1
    assert PostProcessedCurve(event=run).epsilon(1e-6).lower == pytest.approx(
        bracket.lower, rel=1e-6
    )


def test_bins_of_correlated_noise_are_seen_one_at_a_time() -> None:
    gram = events.Gram(((4.0, 1.0), (1.0, 2.0)))
    event = events.BallsInBinsGaussian(gram=gram, noise_multiplier=1.0)
    lower = PostProcessedCurve(event=event).epsilon(1e-6).lower
    assert lower <= accountant("largest_bin").curve(event).epsilon(1e-6).upper
    assert lower == pytest.approx(one_release(0.5, 0.5, 1e-6), rel=1e-4)


def test_runs_on_cut_lots_are_repeated_as_a_record_attains_them() -> None:
    leaf = events.TruncatedPoissonGaussian(
        dataset_size=100, sampling_probability=0.1, max_lot_size=12, noise_multiplier=1.0
    )
    event = events.RepeatAndSelect(event=leaf, mean=3.0, shape=1.0)
    once = PostProcessedCurve(event=attained_event(leaf)).epsilon(1e-6).lower
    assert 0 < once < PostProcessedCurve(event=attained_event(event)).epsilon(1e-6).lower
