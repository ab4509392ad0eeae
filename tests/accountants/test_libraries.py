"""The engines of other people: their reach is respected and their words are ours."""

from __future__ import annotations

import logging
import math
import signal
import time

import pytest

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant, GaussianCurve
from affidavit.accountants.pld import (
    DEFAULT_INTERVAL,
    NEGLIGIBLE_SHARE,
    PldAccountant,
    PldCurve,
)
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.prv import PrvAccountant, time_limit
from affidavit.accountants.rdp import MIN_NOISE, RdpAccountant
from affidavit.plan import events
from tests.support.polling import TIMEOUT_SECONDS

POISSON = events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=1.0)
REPLACE = events.PoissonSubsampledGaussian(
    sampling_probability=0.02, noise_multiplier=1.0, pair="replace_one"
)
WITHOUT = events.WithoutReplacementGaussian(dataset_size=1000, sample_size=20, noise_multiplier=2.0)


@pytest.mark.soak
def test_the_round_off_of_a_long_run_is_allowed_for() -> None:
    """The library reads ε too small there, by 0.4 % at δ = 1e-9."""
    step = events.PoissonSubsampledGaussian(sampling_probability=1e-5, noise_multiplier=0.5)
    run = events.Repeated(event=step, count=999_999)
    with pytest.raises(OutOfReach, match="round-off"):
        PldAccountant().curve(run).epsilon(1e-9)
    result, ours = (
        item.curve(run).epsilon(2e-8) for item in (PldAccountant(), FourierAccountant())
    )
    assert result.upper >= ours.lower
    assert result.lower <= ours.upper


@pytest.mark.ordinary("prv")
@pytest.mark.parametrize("engine", [PldAccountant(), PrvAccountant()], ids=["pld", "prv"])
def test_below_1e_9_neither_says_anything(engine: PldAccountant | PrvAccountant) -> None:
    with pytest.raises(OutOfReach, match="1e-09"):
        engine.curve(POISSON).epsilon(1e-10)
    assert engine.curve(POISSON).epsilon(1e-9).upper > 0


@pytest.mark.ordinary("not pld")
@pytest.mark.parametrize(
    ("engine", "loose"),
    [(PldAccountant(), 1.01), (PrvAccountant(), 1.01), (RdpAccountant(), 1.25)],
    ids=["pld", "prv", "rdp"],
)
def test_repeated_gaussians_are_met(engine: PldAccountant, loose: float) -> None:
    """Against the closed form, for one kind of release and for two."""
    many = events.Repeated(event=events.Gaussian(noise_multiplier=16.0), count=100)
    few = events.Repeated(event=events.Gaussian(noise_multiplier=5.0), count=7)
    for event in (many, events.Composed(events=(many, few))):
        exact = GaussianAccountant().curve(event).epsilon(1e-6)
        result = engine.curve(event).epsilon(1e-6)
        assert result.lower <= exact.upper
        assert exact.lower <= result.upper <= loose * exact.upper


@pytest.mark.parametrize(
    "engine", [PldAccountant(), PrvAccountant(), RdpAccountant()], ids=["pld", "prv", "rdp"]
)
def test_the_replace_one_pair_is_never_read_as_add_remove(engine: RdpAccountant) -> None:
    with pytest.raises(Unsupported):
        engine.curve(REPLACE)


@pytest.mark.ordinary("prv")
@pytest.mark.parametrize("engine", [PldAccountant(), PrvAccountant()], ids=["pld", "prv"])
def test_only_renyi_knows_sampling_without_replacement(engine: PldAccountant) -> None:
    with pytest.raises(Unsupported):
        engine.curve(WITHOUT)
    assert RdpAccountant().curve(WITHOUT).epsilon(1e-5).upper > 0


def test_the_least_noise_of_the_renyi_engine_is_still_bounded() -> None:
    def at(sigma: float) -> events.Event:
        return events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=sigma)

    assert 0 < RdpAccountant().curve(at(MIN_NOISE)).epsilon(1e-5).upper < math.inf
    with pytest.raises(OutOfReach, match="below"):
        RdpAccountant().curve(at(math.nextafter(MIN_NOISE, 0)))


def test_without_replacement_at_full_rate_costs_at_least_the_whole_data_set() -> None:
    """With one record left out, the release is nearly N(2, σ²) against N(0, σ²)."""
    nearly_all = events.WithoutReplacementGaussian(
        dataset_size=1000, sample_size=999, noise_multiplier=2.0
    )
    whole = RdpAccountant().curve(events.Gaussian(noise_multiplier=1.0)).epsilon(1e-5).upper
    assert RdpAccountant().curve(nearly_all).epsilon(1e-5).upper >= 0.99 * whole


def test_schemes_of_different_adjacency_are_not_mixed() -> None:
    with pytest.raises(Unsupported, match="mixes"):
        RdpAccountant().curve(events.Composed(events=(POISSON, WITHOUT)))


def test_a_plan_beyond_memory_is_refused_before_work() -> None:
    huge = events.Repeated(
        event=events.PoissonSubsampledGaussian(sampling_probability=0.5, noise_multiplier=0.1),
        count=10_000,
    )
    started = time.process_time()
    for engine in (PldAccountant(), PrvAccountant()):
        with pytest.raises(OutOfReach):
            engine.curve(huge).epsilon(1e-5)
    assert time.process_time() - started < 10


def test_more_steps_than_a_grid_can_hold_are_refused_before_work() -> None:
    endless = events.Repeated(
        event=events.PoissonSubsampledGaussian(sampling_probability=1e-9, noise_multiplier=1.0),
        count=10**12,
    )
    with pytest.raises(OutOfReach, match="1000000000000"):
        PldAccountant().curve(endless)


@pytest.mark.parametrize(("q", "sigma"), [(1.7e-9, 580.0), (1e-5, 5e4), (3e-8, 1.0)])
def test_divergences_below_rounding_are_not_zero(q: float, sigma: float) -> None:
    """Of a billion steps with such divergences the library says that ε is zero."""
    step = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    curve = RdpAccountant().curve(events.Repeated(event=step, count=10**9))
    of_two = dict(curve.divergences())[2]
    assert of_two >= 1e9 * math.log1p(q * q * math.expm1(sigma**-2))
    assert curve.epsilon(1e-9).upper > 0


def test_much_noise_and_no_replacement_do_not_cost_nothing() -> None:
    """Where the library's terms cancel, ε is that of less noise."""
    release = events.WithoutReplacementGaussian(dataset_size=9, sample_size=8, noise_multiplier=1e9)
    run = events.Repeated(event=release, count=10**17)
    mu = 2 / 1e9 * 8 / 9 * 10**8.5
    assert RdpAccountant().curve(run).epsilon(1e-9).upper > GaussianCurve(mu=mu).epsilon(1e-9).lower


def test_a_renyi_bound_that_underflows_is_not_zero() -> None:
    weak = events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1000.0)
    assert RdpAccountant().curve(weak).delta(1.0).upper > 0


def test_dropped_orders_do_not_litter_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    strong = events.PoissonSubsampledGaussian(sampling_probability=0.024, noise_multiplier=0.334)
    with caplog.at_level(logging.WARNING):
        RdpAccountant().curve(events.Repeated(event=strong, count=410)).epsilon(1e-5)
    assert not caplog.records


def test_the_time_limit_stops_work_and_restores_the_clock() -> None:
    with pytest.raises(OutOfReach, match=r"0\.05 s"), time_limit(0.05, "the sleeper"):
        time.sleep(TIMEOUT_SECONDS)
    with time_limit(TIMEOUT_SECONDS, "the quick one"):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_few_releases_of_a_large_loss_take_no_fine_grid() -> None:
    """A step costs a fine grid half a minute, of which ε has nothing."""
    loud = events.PoissonSubsampledGaussian(sampling_probability=0.05, noise_multiplier=0.1)
    two = PldAccountant().curve(events.Repeated(event=loud, count=2))
    many = PldAccountant().curve(events.Repeated(event=POISSON, count=50))
    assert isinstance(two, PldCurve)
    assert isinstance(many, PldCurve)
    assert many.interval <= DEFAULT_INTERVAL < 9 * DEFAULT_INTERVAL < two.interval
    assert 2 * two.interval <= NEGLIGIBLE_SHARE * RdpAccountant().curve(
        events.Repeated(event=loud, count=2)
    ).epsilon(1e-5).upper * (1 + 1e-9)


@pytest.mark.soak
@pytest.mark.ordinary("event0")
@pytest.mark.parametrize(
    "event", [POISSON, events.Composed(events=(POISSON, events.Gaussian(noise_multiplier=3)))]
)
def test_both_roundings_of_the_grid_enclose_a_finer_grid(event: events.Event) -> None:
    run = events.Repeated(event=event, count=50)
    coarse = PldAccountant(interval=1e-3).curve(run).epsilon(1e-5)
    fine = PldAccountant(interval=2.5e-4).curve(run).epsilon(1e-5)
    assert coarse.lower <= fine.upper
    assert fine.lower <= coarse.upper
    assert coarse.width > fine.width
