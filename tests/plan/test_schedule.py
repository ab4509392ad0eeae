"""Steps, probabilities and participations are exact; no step and no record is rounded away."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.plan import Plan, schedule

Make = Callable[..., Plan]
SIZES = st.integers(1, 10**7)
LOST = (3920, 4, 2)
"""Records, lot and epochs for which int(epochs / q) of doubles is one step short."""


def planned(plan_of: Make, scheme: str, size: int, lot: int, epochs: float) -> Plan:
    """A plan of so many epochs."""
    return plan_of(
        sampling={"scheme": scheme, "lot_size": lot},
        dataset={"size": size},
        steps=...,
        epochs=epochs,
    )


def steps(plan: Plan) -> int | None:
    """Steps of the only phase."""
    return schedule.steps(plan, plan.phases[0])


def test_a_step_that_doubles_lose_is_kept(plan_of: Make) -> None:
    size, lot, epochs = LOST
    assert int(epochs / (lot / size)) == 1959
    assert steps(planned(plan_of, "poisson", size, lot, epochs)) == 1960


@given(st.data())
def test_steps_of_sampled_epochs_are_epochs_over_q_rounded_up(
    plan_of: Make, data: st.DataObject
) -> None:
    size = data.draw(SIZES)
    lot = data.draw(st.integers(1, size))
    tenths = data.draw(st.integers(1, 10**4))
    result = steps(planned(plan_of, "poisson", size, lot, tenths / 10))
    assert result == -(-tenths * size // (10 * lot))


@given(st.data(), st.sampled_from(["shuffled", "cyclic"]))
def test_steps_of_ordered_epochs_are_full_lots_and_one_record_takes_part_once_an_epoch(
    plan_of: Make, data: st.DataObject, scheme: str
) -> None:
    size = data.draw(SIZES)
    lot = data.draw(st.integers(1, size))
    epochs = data.draw(st.integers(1, 1000))
    plan = planned(plan_of, scheme, size, lot, epochs)
    result = steps(plan)
    assert result == epochs * (size // lot)
    assert schedule.participations(plan, plan.phases[0], result) == epochs
    assert schedule.participations(plan, plan.phases[0], result + 1) == epochs + 1


@pytest.mark.parametrize(
    ("size", "steps", "lots", "participations"),
    [(42043, 410, 41, 10), (60591, 885, 59, 15), (42043, 411, 41, 11), (42043, 1, 41, 1)],
)
def test_the_shuffled_runs_of_the_paper(
    plan_of: Make, size: int, steps: int, lots: int, participations: int
) -> None:
    plan = plan_of(
        sampling={"scheme": "shuffled", "lot_size": 1024}, dataset={"size": size}, steps=steps
    )
    assert schedule.lots_per_epoch(size, 1024) == lots
    assert schedule.participations(plan, plan.phases[0], steps) == participations


def test_ten_shuffled_epochs_of_e2e_are_410_steps(plan_of: Make) -> None:
    assert steps(planned(plan_of, "shuffled", 42043, 1024, 10)) == 410
    assert steps(planned(plan_of, "shuffled", 42043, 1024, 0.5)) == 21


def test_steps_that_are_given_or_asked_for_stay(plan_of: Make) -> None:
    assert steps(plan_of(steps=7)) == 7
    assert steps(plan_of(steps=None)) is None
    assert steps(plan_of(steps=..., epochs=2.5)) == 3


def test_the_probability_is_the_decimal_that_was_written(plan_of: Make) -> None:
    given_ = plan_of(sampling={"scheme": "poisson", "probability": 0.1})
    assert schedule.sampling_probability(given_, given_.phases[0]) == Fraction(1, 10)
    by_lot = plan_of(sampling={"scheme": "poisson", "lot_size": 3})
    assert schedule.sampling_probability(by_lot, by_lot.phases[0]) == Fraction(3, 1000)
    whole = plan_of()
    assert schedule.sampling_probability(whole, whole.phases[0]) == 1


@given(st.fractions(min_value=Fraction(1, 10**9), max_value=10**9))
def test_rounding_up_gives_the_least_double_that_is_not_below(value: Fraction) -> None:
    up = schedule.double_up(value)
    assert Fraction(math.nextafter(up, 0)) < value <= Fraction(up)


@given(st.floats(1e-300, 1e300))
def test_a_double_is_read_as_its_shortest_decimal(value: float) -> None:
    exact = schedule.exact_fraction(value)
    assert float(exact) == value
    assert exact == Fraction(repr(value))
