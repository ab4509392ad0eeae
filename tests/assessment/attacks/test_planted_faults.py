"""The execution refutes lower ends that no attack attains: faults of each kind, planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from affidavit.accountants.fourier import truncated_poisson
from affidavit.mechanisms import LoweredPhase
from affidavit.plan import (
    Plan,
    events,
)
from tests.assessment.attacks import plans as given
from tests.assessment.attacks.plans import execute, phase, small, strongest_attack
from tests.support.random_seeds import seeded

Fault = Callable[[events.Event], events.Event]


def less_noise(factor: float) -> Fault:
    """Each release at ``factor`` times its noise."""

    def of(event: events.Event) -> events.Event:
        match event:
            case events.Composed(events=members):
                return events.Composed(events=tuple(map(of, members)))
            case events.EitherBound(events=members):
                return events.EitherBound(events=tuple(map(of, members)))
            case events.Repeated(event=inner):
                return replace(event, event=of(inner))
            case _:
                leaf: Any = event
                changed: events.Leaf = replace(
                    leaf, noise_multiplier=leaf.noise_multiplier * factor
                )
                return changed

    return of


def instead(*members: events.Event) -> Fault:
    """Other releases than those of the phase."""
    return lambda _: events.Composed(events=members)


ATTAINED: dict[str, tuple[Plan, Fault]] = {
    "a sensitivity that is a tenth too large": (
        small(given.CYCLIC, 3.0, 8, noise=given.BIDIAGONAL),
        less_noise(1 / 1.1),
    ),
    "a distance of two for a record that contributes nothing": (
        small(given.POISSON, 1.0, 4),
        less_noise(1 / 2),
    ),
    "all records of a user in a lot that holds fewer": (
        small({"scheme": "cyclic", "lot_size": 2}, 6.0, 14, records=5),
        instead(events.Repeated(event=events.Gaussian(noise_multiplier=6.0 / 5), count=2)),
    ),
    "records in bins that all move the run half as far again": (
        small(given.BINS, 5.0, 8, records=3, noise=given.BIDIAGONAL),
        less_noise(1 / 1.5),
    ),
    "records in a random order that all move the run half as far again": (
        small(given.SHUFFLED, 4.0, 6, records=3, noise=given.TREE),
        less_noise(1 / 1.5),
    ),
    "three epochs for two": (
        small(given.CYCLIC, 1.5, 8),
        instead(events.Repeated(event=events.Gaussian(noise_multiplier=1.5), count=3)),
    ),
    "a pattern that the sampler never draws": (
        small(given.APART, 2.0, 6, noise=given.BANDED),
        instead(events.Repeated(event=events.Gaussian(noise_multiplier=2.0), count=6)),
    ),
    "one phase of two, twice": (
        small(phases=[phase(given.POISSON, 2.0, 2), phase(given.POISSON, 3.0, 2)]),
        lambda event: events.Composed(events=(event, event)),
    ),
    "opposite others whose number is random": (
        small(given.POISSON, 2.0, 4, adjacency="replace_one"),
        instead(
            events.Repeated(
                event=events.WithoutReplacementGaussian(
                    dataset_size=20, sample_size=6, noise_multiplier=1.0
                ),
                count=4,
            )
        ),
    ),
    "bins that are kept, for fresh ones": (
        small(given.FRESH_BINS, 1.0, 16),
        instead(events.RandomAllocationGaussian(bins=4, noise_multiplier=0.5)),
    ),
    "each group in every step": (
        small(given.GROUPS, 1.5, 8),
        instead(
            events.Repeated(
                event=events.PoissonSubsampledGaussian(
                    sampling_probability=0.8, noise_multiplier=1.5
                ),
                count=8,
            )
        ),
    ),
}


@pytest.mark.by_turns
@pytest.mark.ordinary("not records in a random order*", "not bins that are *")
@pytest.mark.parametrize("name", ATTAINED)
def test_what_no_record_attains_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, fault = ATTAINED[name]
    attained = LoweredPhase.attained
    monkeypatch.setattr(LoweredPhase, "attained", lambda *args: fault(attained(*args)))
    assert refutes_its_attack(plan, name)


def test_the_rate_of_the_sample_is_not_that_of_a_cut_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small({**given.TRUNCATED, "max_lot_size": 4}, 1.5, 4, adjacency="add_remove")
    assert not refutes_its_attack(plan, "rate")
    monkeypatch.setattr(truncated_poisson, "attained_rate", lambda leaf: leaf.sampling_probability)
    assert refutes_its_attack(plan, "rate")


def test_a_largest_sum_that_moves_too_far_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small(given.SHUFFLED, 1.0, 8, delta=0.15)
    attack = LoweredPhase.attack.fget  # type: ignore[attr-defined]

    def too_far(phase: LoweredPhase) -> tuple[events.ShuffledEpoch, int]:
        epoch, number = attack(phase)
        return replace(epoch, without=0.0), number

    monkeypatch.setattr(LoweredPhase, "attack", property(too_far))
    assert refutes_its_attack(plan, "sums")


def refutes_its_attack(plan: Plan, name: str) -> bool:
    """Whether the strongest attack on ``plan`` shows less than its ε says."""
    _, attack, epsilon = strongest_attack(plan)
    assert plan.target.delta is not None
    return execute(plan, attack, seeded(name)).most(epsilon) < plan.target.delta
