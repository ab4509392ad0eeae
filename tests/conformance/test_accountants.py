"""The laws of an accountant, for every engine of the registry."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants import (
    ENGINE_NAMES,
    PrivacyCurve,
    Unsupported,
    accountant,
    engine_versions,
)
from affidavit.plan import events
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


def gaussian(sigma: float, count: int = 1) -> events.Event:
    return events.Repeated(event=events.Gaussian(noise_multiplier=sigma), count=count)


def poisson(q: float, sigma: float, count: int) -> events.Event:
    step = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return events.Repeated(event=step, count=count)


@functools.cache
def curve(name: str, event: events.Event) -> PrivacyCurve:
    """One for each question: what several laws ask of an engine costs most of this file's time."""
    return accountant(name).curve(event)


def upper(name: str, event: events.Event, delta: float = DELTA) -> float:
    return curve(name, event).epsilon(delta).upper


EVENTS = {
    "gaussian": gaussian(2.0, 3),
    "poisson": poisson(0.02, 1.0, 300),
    "truncated": events.Repeated(
        event=events.TruncatedPoissonGaussian(
            dataset_size=1000, sampling_probability=0.02, max_lot_size=40, noise_multiplier=2.0
        ),
        count=20,
    ),
    "allocation": events.RandomAllocationGaussian(bins=40, noise_multiplier=1.0),
    "mixed": events.Composed(events=(gaussian(4.0), poisson(0.05, 1.5, 100))),
}
LESS = {
    "noise": ("poisson", poisson(0.02, 1.0, 300), poisson(0.02, 1.1, 300)),
    "rate": ("poisson", poisson(0.02, 1.0, 300), poisson(0.018, 1.0, 300)),
    "steps": ("poisson", poisson(0.02, 1.0, 300), poisson(0.02, 1.0, 250)),
    "gaussian noise": ("gaussian", gaussian(1.0), gaussian(1.05)),
}
"""Of what less is released: the kind of event, one that costs more, and one that costs less."""
SAMPLED = ("gaussian", "poisson", "mixed")
THEOREMS = {
    "gaussian": ("gaussian",),
    "fourier": (*SAMPLED, "truncated"),
    "allocation": ("allocation",),
    "allocation_rdp": ("allocation",),
    "monte_carlo": (),
    "largest_bin": (),
    "analytic_gaussian": ("gaussian",),
    "pld": (*SAMPLED, "truncated"),
    "participations": (*SAMPLED, "truncated", "allocation"),
    "selection": (),
    "rdp": SAMPLED,
    "prv": SAMPLED,
}
"""The events, of those here, that each engine has a theorem for."""


def cases(parts: str, of: Iterable[tuple[str, ...]]) -> pytest.MarkDecorator:
    """A case for each; those of the slowest engines, which are other people's, are soak."""
    return pytest.mark.parametrize(
        parts,
        [
            pytest.param(*item, marks=[pytest.mark.soak] * (item[0] in {"prv", "pld"}))
            for item in of
        ],
    )


everywhere = cases("name", ((name,) for name in THEOREMS))
of_sampled = cases("name", ((name,) for name, kinds in THEOREMS.items() if {*SAMPLED} <= {*kinds}))
of_its_events = cases(
    "name, kind", ((name, kind) for name, kinds in THEOREMS.items() for kind in kinds)
)


def test_the_registry_names_engines_as_they_name_themselves() -> None:
    assert set(THEOREMS) == set(ENGINE_NAMES)
    named = [{"name": accountant(n).name, "version": accountant(n).version} for n in ENGINE_NAMES]
    assert named == engine_versions()


@pytest.mark.parametrize("name", THEOREMS)
def test_an_engine_takes_the_events_that_it_has_a_theorem_for_and_no_others(name: str) -> None:
    taken = set()
    for kind, event in EVENTS.items():
        with suppress(Unsupported):
            curve(name, event)
            taken.add(kind)
    assert taken == {*THEOREMS[name]}


@of_its_events
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_lower_is_at_most_upper_and_both_are_finite(name: str, kind: str, delta: float) -> None:
    bracket = curve(name, EVENTS[kind]).epsilon(delta)
    assert 0 <= bracket.lower <= bracket.upper < float("inf")


@everywhere
def test_the_empty_composition_costs_nothing(name: str) -> None:
    for nothing in (events.Composed(events=()), gaussian(1.0, 0), poisson(0.1, 1.0, 0)):
        result = accountant(name).curve(nothing)
        assert result.epsilon(DELTA).upper == 0
        assert result.delta(1.0).upper == 0


@of_its_events
def test_composing_n_times_is_composing_with_n(name: str, kind: str) -> None:
    event = EVENTS[kind]
    twice = upper(name, events.Composed(events=(event, event)))
    with_two = upper(name, events.Repeated(event=event, count=2))
    assert twice == with_two


@of_sampled
def test_the_order_of_releases_is_irrelevant(name: str) -> None:
    first, second = poisson(0.02, 1.0, 50), poisson(0.05, 2.0, 20)
    assert upper(name, events.Composed(events=(first, second))) == upper(
        name, events.Composed(events=(second, first))
    )


@of_its_events
def test_a_further_release_never_lowers_epsilon(name: str, kind: str) -> None:
    event = EVENTS[kind]
    more = events.Composed(events=(event, gaussian(50.0)))
    assert upper(name, more) >= upper(name, event) * (1 - WOBBLE.get(name, 1e-6))


@cases(
    "name, less",
    (
        (name, less)
        for name, kinds in THEOREMS.items()
        for less, (kind, *_) in LESS.items()
        if kind in kinds
    ),
)
def test_more_noise_lower_rate_and_fewer_steps_cost_less(name: str, less: str) -> None:
    _, weaker, stronger = LESS[less]
    assert upper(name, stronger) < upper(name, weaker)


@pytest.mark.by_turns
@of_its_events
def test_epsilon_does_not_increase_in_delta(name: str, kind: str) -> None:
    result = curve(name, EVENTS[kind])
    ends = [result.epsilon(delta).upper for delta in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert all(a >= b * (1 - WOBBLE.get(name, 1e-6)) for a, b in itertools.pairwise(ends))
    assert ends[0] > ends[-1]


@of_its_events
def test_delta_at_the_epsilon_of_delta_is_delta(name: str, kind: str) -> None:
    result = curve(name, EVENTS[kind])
    back = result.delta(result.epsilon(DELTA).upper)
    assert back.lower <= DELTA * (1 + 10 * WOBBLE.get(name, 1e-6))
    assert back.upper <= DELTA * (1 + 20 * WOBBLE.get(name, 1e-6))


@of_its_events
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_a_delta_that_is_no_probability_is_refused(name: str, kind: str, delta: float) -> None:
    result = curve(name, EVENTS[kind])
    with pytest.raises(ValueError, match="delta"):
        result.epsilon(delta)


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
