"""The laws of an accountant, for every engine of the registry."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants import (
    ENGINE_NAMES,
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    accountant,
    engine_versions,
)
from affidavit.plan import (
    Composed,
    Event,
    Gaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    Repeated,
    TruncatedPoissonGaussian,
)
from tests.support.random_seeds import examples

DELTA = 1e-5
WOBBLE = {
    "gaussian": 1e-9,
    "fourier": 2e-4,
    "allocation": 2e-4,
    "allocation_rdp": 1e-6,
    "analytic_gaussian": 1e-8,
    "pld": 2e-3,
    "prv": 1e-2,
    "rdp": 1e-6,
}
"""How far two answers of one engine to one question may differ: the width it works at."""


def gaussian(sigma: float, count: int = 1) -> Event:
    return Repeated(event=Gaussian(noise_multiplier=sigma), count=count)


def poisson(q: float, sigma: float, count: int) -> Event:
    step = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return Repeated(event=step, count=count)


@functools.cache
def curve(name: str, event: Event) -> PrivacyCurve:
    """One for each question: what several laws ask of an engine costs most of this file's time."""
    try:
        return accountant(name).curve(event)
    except Unsupported:
        pytest.skip(f"{name} has no theorem for this event")


def upper(name: str, event: Event, delta: float = DELTA) -> float:
    return curve(name, event).epsilon(delta).upper


EVENTS = {
    "gaussian": gaussian(2.0, 3),
    "poisson": poisson(0.02, 1.0, 300),
    "truncated": Repeated(
        event=TruncatedPoissonGaussian(
            dataset_size=1000, sampling_probability=0.02, max_lot_size=40, noise_multiplier=2.0
        ),
        count=20,
    ),
    "allocation": RandomAllocationGaussian(bins=40, noise_multiplier=1.0),
    "mixed": Composed(events=(gaussian(4.0), poisson(0.05, 1.5, 100))),
}
everywhere = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak) if name in {"prv", "pld"} else name
        for name in ENGINE_NAMES
    ],
)
"""Every engine; the slowest, which are other people's, in ``make soak``."""
events = pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS.keys())


def test_the_registry_names_engines_as_they_name_themselves() -> None:
    named = [{"name": accountant(n).name, "version": accountant(n).version} for n in ENGINE_NAMES]
    assert named == engine_versions()


@everywhere
@events
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_lower_is_at_most_upper_and_both_are_finite(name: str, event: Event, delta: float) -> None:
    bracket = curve(name, event).epsilon(delta)
    assert 0 <= bracket.lower <= bracket.upper < float("inf")


@everywhere
def test_the_empty_composition_costs_nothing(name: str) -> None:
    for nothing in (Composed(events=()), gaussian(1.0, 0), poisson(0.1, 1.0, 0)):
        result = accountant(name).curve(nothing)
        assert result.epsilon(DELTA).upper == 0
        assert result.delta(1.0).upper == 0


@everywhere
@events
def test_composing_n_times_is_composing_with_n(name: str, event: Event) -> None:
    twice = upper(name, Composed(events=(event, event)))
    with_two = upper(name, Repeated(event=event, count=2))
    assert twice == with_two


@everywhere
def test_the_order_of_releases_is_irrelevant(name: str) -> None:
    first, second = poisson(0.02, 1.0, 50), poisson(0.05, 2.0, 20)
    assert upper(name, Composed(events=(first, second))) == upper(
        name, Composed(events=(second, first))
    )


@everywhere
@events
def test_a_further_release_never_lowers_epsilon(name: str, event: Event) -> None:
    more = Composed(events=(event, gaussian(50.0)))
    assert upper(name, more) >= upper(name, event) * (1 - WOBBLE.get(name, 1e-6))


@everywhere
@pytest.mark.parametrize(
    ("weaker", "stronger"),
    [
        (poisson(0.02, 1.0, 300), poisson(0.02, 1.1, 300)),
        (poisson(0.02, 1.0, 300), poisson(0.018, 1.0, 300)),
        (poisson(0.02, 1.0, 300), poisson(0.02, 1.0, 250)),
        (gaussian(1.0), gaussian(1.05)),
    ],
    ids=["noise", "rate", "steps", "gaussian noise"],
)
def test_more_noise_lower_rate_and_fewer_steps_cost_less(
    name: str, weaker: Event, stronger: Event
) -> None:
    assert upper(name, stronger) < upper(name, weaker)


@everywhere
@events
def test_epsilon_does_not_increase_in_delta(name: str, event: Event) -> None:
    result = curve(name, event)
    ends = [result.epsilon(delta).upper for delta in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert all(a >= b * (1 - WOBBLE.get(name, 1e-6)) for a, b in itertools.pairwise(ends))
    assert ends[0] > ends[-1]


@everywhere
@events
def test_delta_at_the_epsilon_of_delta_is_delta(name: str, event: Event) -> None:
    result = curve(name, event)
    try:
        back = result.delta(result.epsilon(DELTA).upper)
    except OutOfReach:
        pytest.skip(f"{name} does not invert here")
    assert back.lower <= DELTA * (1 + 10 * WOBBLE.get(name, 1e-6))
    assert back.upper <= DELTA * (1 + 20 * WOBBLE.get(name, 1e-6))


@everywhere
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_a_delta_that_is_no_probability_is_refused(name: str, delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        curve(name, gaussian(1.0) if name != "fourier" else poisson(0.1, 1.0, 1)).epsilon(delta)


@settings(max_examples=examples(6))
@given(
    q=st.floats(1e-3, 0.3),
    sigma=st.floats(0.6, 4.0),
    steps=st.integers(1, 2000),
    delta=st.sampled_from([1e-4, 1e-6, 1e-8]),
)
def test_independent_engines_meet(q: float, sigma: float, steps: int, delta: float) -> None:
    event = poisson(q, sigma, steps)
    ours = accountant("fourier").curve(event).epsilon(delta)
    pld = accountant("pld").curve(event).epsilon(delta)
    rdp = accountant("rdp").curve(event).epsilon(delta)
    assert ours.meets(pld, 1e-3)
    assert ours.lower <= rdp.upper * (1 + 1e-9)


@pytest.mark.ordinary("0.2-3.0-200")
@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.024, 0.72, 400), (0.004, 1.1, 2000), (0.2, 3.0, 200)]
)
def test_prv_meets_ours_inside_its_reach(q: float, sigma: float, steps: int) -> None:
    event = poisson(q, sigma, steps)
    ours = accountant("fourier").curve(event).epsilon(DELTA)
    assert ours.meets(accountant("prv").curve(event).epsilon(DELTA), 1e-3)
