"""The rule's laws: what it admits, what it reads, and that rounding never helps anybody."""

from __future__ import annotations

import functools
import math
import random

import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given
from hypothesis import strategies as st

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant, GaussianCurve, joint_mu
from affidavit.accountants.privacy_filter.cost import DELTA_UNIT, UNIT, Coordinate, Cost
from affidavit.accountants.privacy_filter.privacy_filter import (
    GAUSSIAN_SHARE,
    MAX_FORECAST,
    Budget,
    Filter,
    admits_alone,
)
from affidavit.accountants.privacy_filter.renyi_divergences import ORDERS, divergences
from affidavit.accountants.protocol import AccountantError
from affidavit.plan import events
from tests.accountants.events import poisson
from tests.support.random_seeds import seeded

DELTA = 1e-5


RUNS: dict[str, events.Event] = {
    "gaussian": events.Repeated(event=events.Gaussian(noise_multiplier=6.0), count=4),
    "small": poisson(0.004, 1.1, 1000),
    "rare": poisson(0.001, 0.7, 500),
    "large": poisson(0.05, 3.0, 300),
}


def cost_of(event: events.Event, epsilon: float = 1.0, delta: float = 1e-6) -> Cost:
    try:
        mu_squared = joint_mu(event) ** 2 * (1 + 1e-15)
    except AccountantError:
        mu_squared = math.inf
    return Cost.of(renyi=divergences(event), mu_squared=mu_squared, epsilon=epsilon, delta=delta)


COSTS = {name: cost_of(event) for name, event in RUNS.items()}


def budget(epsilon: float = 8.0, delta: float = DELTA) -> Budget:
    return Budget(epsilon=epsilon, delta=delta, filter=Filter.start(epsilon, delta))


@functools.cache
def composed_and_read(seed: int | str) -> tuple[Bracket, float]:
    """Of a random composition: its tight ε, and what the filter reads."""
    draw = random.Random(seed)
    names = [name for name in RUNS if draw.random() < 0.7] or ["gaussian"]
    counts = {name: draw.randint(1, 4) for name in names}
    total = Cost.zero(len(ORDERS))
    for name, count in counts.items():
        total += COSTS[name].times(count)
    members = tuple(
        events.Repeated(event=RUNS[name], count=count) for name, count in counts.items()
    )
    event = events.Composed(events=members)
    engine = GaussianAccountant() if names == ["gaussian"] else FourierAccountant()
    tight = engine.curve(event).epsilon(DELTA)
    return tight, budget().spent(total)


@pytest.mark.parametrize("seed", range(5))
def test_the_reading_is_never_below_the_tight_composition(seed: int) -> None:
    """A filter holds for plans fixed in advance too, so it cannot beat their composition."""
    tight, spent = composed_and_read(seeded(seed))
    assert tight.lower <= spent


@pytest.mark.parametrize("seed", range(5))
def test_the_reading_of_these_draws_is_not_far_above(seed: int) -> None:
    """No law: the soak drew one that is read at 2.8 times its ε."""
    tight, spent = composed_and_read(seed)
    assert spent <= 1.6 * tight.upper


def test_of_gaussians_alone_the_reading_is_that_of_their_exact_curve() -> None:
    """At the exact filter's share of δ."""
    total = COSTS["gaussian"].times(3)
    exact = GaussianCurve(mu=math.sqrt(3 * 4 / 36)).epsilon(DELTA * GAUSSIAN_SHARE).upper
    assert budget().spent(total) == pytest.approx(exact, rel=1e-5)


def test_one_order_is_the_conversion_of_canonne_kamath_and_steinke() -> None:
    for order in (1.5, 4.0, 32.0):
        only = Filter(
            orders=ORDERS,
            weights=tuple(float(item == order) for item in ORDERS),
            gaussian_share=0.0,
        )
        one = Budget(epsilon=8.0, delta=DELTA, filter=only)
        total = COSTS["small"].times(2)
        at = total.renyi[ORDERS.index(order)].value(UNIT)
        known, _ = compute_epsilon([order], [at], DELTA)
        assert one.spent(total) == pytest.approx(known, rel=3e-6)
        assert one.spent(total) >= known * (1 - 1e-9)


def test_several_orders_never_read_below_the_best_of_them_alone() -> None:
    for total in (COSTS["small"], COSTS["rare"].times(3), COSTS["large"]):
        at = [item.value(UNIT) for item in total.renyi]
        best, _ = compute_epsilon(list(ORDERS), at, DELTA)
        assert budget().spent(total) >= best


@given(
    st.lists(st.sampled_from(sorted(COSTS)), max_size=12),
    st.sampled_from(sorted(COSTS)),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_and_more_is_never_admitted_where_less_was_not(
    names: list[str], another: str, draw: random.Random
) -> None:
    total = Cost.zero(len(ORDERS))
    for name in names:
        total += COSTS[name]
    shuffled = list(names)
    draw.shuffle(shuffled)
    again = Cost.zero(len(ORDERS))
    for name in shuffled:
        again += COSTS[name]
    assert total == again
    more = total + COSTS[another]
    small, large = budget(2.0), Budget(epsilon=4.0, delta=2e-5, filter=budget(2.0).filter)
    assert total.within(more)
    assert small.admits(total) >= small.admits(more)
    assert large.admits(total) >= small.admits(total)
    assert more - COSTS[another] == total


@pytest.mark.parametrize("name", sorted(COSTS))
def test_the_forecast_is_the_last_run_that_fits(name: str) -> None:
    one, cost = budget(2.0), COSTS[name]
    fits = one.forecast(COSTS["small"], cost)
    assert one.admits(COSTS["small"] + cost.times(fits))
    assert not one.admits(COSTS["small"] + cost.times(fits + 1))
    assert one.forecast(COSTS["small"], Cost.zero(len(ORDERS))) == MAX_FORECAST


def test_the_reading_is_where_admission_begins() -> None:
    little = cost_of(events.Gaussian(noise_multiplier=100.0))
    for total in (*COSTS.values(), little):
        one = budget()
        spent = one.spent(total)
        weights = one.filter
        assert spent > 0
        assert (spent < 0.2) is (total == little)
        assert Budget(epsilon=spent, delta=DELTA, filter=weights).admits(total)
        assert not Budget(epsilon=spent * (1 - 1e-5), delta=DELTA, filter=weights).admits(total)


def test_nothing_spent_reads_nothing_and_what_nothing_bounds_reads_infinity() -> None:
    one = budget()
    empty = Cost.zero(len(ORDERS))
    assert one.spent(empty) == 0.0
    assert one.admits(empty)
    endless = Cost.of(renyi=[math.inf] * len(ORDERS), mu_squared=math.inf, epsilon=1.0, delta=1e-6)
    assert not one.admits(endless)
    assert one.spent(endless) == math.inf
    huge = Cost.of(renyi=[1e12] * len(ORDERS), mu_squared=1e13, epsilon=1.0, delta=1e-6)
    assert not one.admits(huge)


def test_delta_that_a_run_alone_took_is_gone() -> None:
    one, cost = budget(2.0), COSTS["gaussian"]
    weights = one.filter
    assert one.admits(cost)
    assert not Budget(epsilon=2.0, delta=DELTA, filter=weights, delta_taken=DELTA).admits(cost)
    half = Budget(epsilon=2.0, delta=DELTA, filter=weights, delta_taken=DELTA / 2)
    assert one.spent(cost) < half.spent(cost)


def test_a_run_alone_is_held_to_the_very_decimals() -> None:
    exactly = Cost.of(renyi=[1.0] * len(ORDERS), mu_squared=1.0, epsilon=0.3, delta=1e-5)
    one = budget(0.3)
    assert admits_alone(one, exactly)
    assert not admits_alone(budget(math.nextafter(0.3, 0)), exactly)
    assert not admits_alone(budget(0.3, math.nextafter(1e-5, 0)), exactly)


@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 1.0, 60.0, 1e5])
@pytest.mark.parametrize("delta", [1e-15, 1e-5, 0.9])
def test_a_filter_begins_at_every_budget_and_is_read_back_as_it_was(
    epsilon: float, delta: float
) -> None:
    begun = Filter.start(epsilon, delta)
    assert Filter.read(begun.as_document()) == begun
    assert 1 - 1e-9 < math.fsum(begun.weights) <= 1


# ---- costs -------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1e9) | st.just(math.inf), min_size=2, max_size=2),
    st.floats(0, 1e6) | st.just(math.inf),
    st.integers(1, 50),
)
def test_costs_add_and_subtract_exactly_and_are_read_back_as_they_were(
    renyi: list[float], mu_squared: float, times: int
) -> None:
    one = Cost.of(renyi=renyi, mu_squared=mu_squared, epsilon=0.5, delta=1e-7)
    other = Cost.of(renyi=[0.1, math.inf], mu_squared=math.inf, epsilon=0.25, delta=1e-9)
    assert one + other - other == one
    assert one.times(times) - one.times(times - 1) == one
    for item in (one, one + other, other.times(times)):
        assert Cost.read(item.as_document()) == item
    assert one.least(other).within(one)
    assert one.least(other).within(other)


@given(st.floats(0, 1e9))
def test_a_cost_is_rounded_up_and_by_less_than_a_unit(value: float) -> None:
    result = Coordinate.up(value, UNIT)
    assert result.value(UNIT) >= value * (1 - 1e-15)
    assert result.units - 1 < value / float(UNIT) * (1 + 1e-15)
    assert Coordinate.up(1e-5, DELTA_UNIT).written(DELTA_UNIT) == "0.00001"


def test_what_is_no_cost_is_refused() -> None:
    for value in (math.nan, -1.0):
        with pytest.raises(ValueError, match="at least zero"):
            Coordinate.up(value, UNIT)
    with pytest.raises(ValueError, match="whole number"):
        Coordinate.read("0.0000000000001", UNIT)
    for epsilon, delta in ((0.0, 1e-5), (math.inf, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="budget"):
            Budget(epsilon=epsilon, delta=delta, filter=Filter.start(1.0, 1e-5))
    with pytest.raises(ValueError, match="weight"):
        Filter(orders=(2.0,), weights=(1.1,), gaussian_share=0.5)
