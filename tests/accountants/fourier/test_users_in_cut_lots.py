"""Users of several records in Poisson lots that are cut: held to all lots of small data sets."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from scipy.stats import binom, norm

from affidavit.accountants import accountant
from affidavit.accountants.bracketing_curves import orders_of
from affidavit.accountants.chains import ChainedCurve, neighbour_event
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.group_sampling import binomial_weights
from affidavit.accountants.fourier.tilting import _log_moments
from affidavit.accountants.fourier.truncated_group_sampling import (
    attained_sample,
    crowd_probability,
)
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.plan import (
    Adjacency,
    events,
)

EPSILONS = 0.0, 1.0, 2.5
GRID = np.linspace(-14.0, 14.0, 4001)
QUADRATURE = 5e-5
Sums = dict[float, float]


def leaf(
    records: int,
    size: int,
    largest: int,
    neighbours: Adjacency,
    *,
    q: float = 0.3,
    sigma: float = 1,
) -> events.TruncatedPoissonGroupGaussian:
    return events.TruncatedPoissonGroupGaussian(
        records=records,
        dataset_size=size,
        sampling_probability=q,
        max_lot_size=largest,
        noise_multiplier=sigma,
        neighbours=neighbours,
    )


def sums(contributions: tuple[float, ...], largest: int, q: float) -> Sums:
    """The law of a lot's sum, by every sample and every part of it that may be used."""
    result: Sums = defaultdict(float)
    for drawn in itertools.product((False, True), repeat=len(contributions)):
        inside = [item for item, there in zip(contributions, drawn, strict=True) if there]
        chance = q ** len(inside) * (1 - q) ** (len(contributions) - len(inside))
        lots = list(itertools.combinations(inside, min(largest, len(inside))))
        for lot in lots:
            result[sum(lot)] += chance / len(lots)
    return result


def hockey_stick(first: Sums, second: Sums, sigma: float, epsilon: float) -> float:
    def density(law: Sums) -> np.ndarray:
        return sum(chance * norm.pdf(GRID, place, sigma) for place, chance in law.items())  # type: ignore[return-value]

    gap = np.maximum(density(first) - math.exp(epsilon) * density(second), 0.0)
    return float(np.trapezoid(gap, GRID))


def neighbouring(
    case: events.TruncatedPoissonGroupGaussian, others: tuple[float, ...], own: tuple[float, ...]
) -> list[tuple[Sums, Sums]]:
    """The laws with the user and without, or with one that contributes zero or the opposite."""
    other = {
        "add_remove": (),
        "zero_out": (0.0,) * len(own),
        "replace_one": tuple(-item for item in own),
    }[case.neighbours]
    q, largest = case.sampling_probability, case.max_lot_size
    there, not_there = (sums((*others, *part), largest, q) for part in (own, other))
    return [(there, not_there), (not_there, there)]


CASES = [
    leaf(2, 3, 1, "add_remove", q=0.4),
    leaf(2, 3, 2, "add_remove", q=0.4, sigma=0.9),
    leaf(3, 2, 4, "add_remove", q=0.5, sigma=1.3),
    leaf(2, 4, 2, "zero_out", q=0.6, sigma=0.8),
    leaf(2, 4, 3, "replace_one", q=0.4, sigma=1.5),
    leaf(2, 3, 1, "replace_one", q=0.2),
    leaf(2, 4, 4, "zero_out", q=0.1, sigma=0.5),
    leaf(2, 3, 2, "add_remove", q=0.2, sigma=0.45),
]


@pytest.mark.by_turns
@pytest.mark.ordinary("*_size=3, * max_lot_size=1, *")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_data_set_passes_the_bound_and_one_reaches_the_lower_end(
    case: events.TruncatedPoissonGroupGaussian,
) -> None:
    curve, sigma = FourierAccountant().curve(case), case.noise_multiplier
    bounds = [curve.delta(epsilon) for epsilon in EPSILONS]
    most = case.dataset_size - (0 if case.neighbours == "add_remove" else case.records)
    numbers = range(most + 1) if case.neighbours == "add_remove" else (most,)
    attained = [0.0] * len(EPSILONS)
    for number in numbers:
        for others in itertools.combinations_with_replacement((-1.0, 0.0), number):
            for own in {(1.0,) * case.records, (1.0, *(-1.0,) * (case.records - 1))}:
                for pair in neighbouring(case, others, own):
                    for place, epsilon in enumerate(EPSILONS):
                        exact = hockey_stick(*pair, sigma, epsilon)
                        assert exact <= bounds[place].upper * (1 + QUADRATURE), (others, own)
                        attained[place] = max(attained[place], exact)
    for bound, exact in zip(bounds, attained, strict=True):
        assert bound.lower <= exact * (1 + QUADRATURE)


@pytest.mark.parametrize("case", [*CASES, leaf(4, 9, 3, "zero_out", q=0.7)], ids=str)
def test_records_left_in_a_lot_are_counted_from_below(
    case: events.TruncatedPoissonGroupGaussian,
) -> None:
    others = max(0, case.dataset_size - case.records)
    law = sums(
        (*(0.0,) * others, *(1.0,) * case.records), case.max_lot_size, case.sampling_probability
    )
    sample = attained_sample(case)
    most = getattr(sample, "records", 1)
    for number in range(1, most + 1):
        exact = math.fsum(chance for place, chance in law.items() if place >= number)
        counted = binom.sf(number - 1, most, sample.sampling_probability)
        assert counted <= exact * (1 + 1e-12)
    left = math.fsum(place * chance for place, chance in law.items()) / case.records
    assert sample.sampling_probability > 0.5 * left


def test_many_records_that_are_hardly_ever_drawn_are_counted_too() -> None:
    case = leaf(200, 22_778_609, 188, "add_remove", q=6.4e-6, sigma=109)
    sample = attained_sample(case)
    assert getattr(sample, "records", 1) * sample.sampling_probability > 60 * 6.4e-6


def test_lots_far_below_the_largest_cost_what_poisson_samples_of_users_do() -> None:
    run = events.Repeated(event=leaf(3, 60_000, 900, "add_remove", q=0.01, sigma=2.0), count=1000)
    never = events.PoissonSampledGroupGaussian(
        records=3, sampling_probability=0.01, noise_multiplier=2.0
    )
    engine = FourierAccountant()
    cut, plain = (
        engine.curve(event).epsilon(1e-6)
        for event in (run, events.Repeated(event=never, count=1000))
    )
    assert cut.upper == pytest.approx(plain.upper, rel=2e-3)
    assert plain.lower * (1 - 1e-6) <= cut.lower <= cut.upper
    assert accountant("fourier").curve(run).epsilon(1e-6).lower <= plain.upper


def test_lots_that_are_always_crowded_are_samples_at_half_the_noise() -> None:
    case = leaf(5, 1000, 4, "add_remove", q=0.02, sigma=1.05)
    half = events.GaussianMixture(weights=binomial_weights(5, 0.02), noise_multiplier=0.525)
    engine = FourierAccountant()
    cut, mixture = (
        engine.curve(events.Repeated(event=event, count=20)).epsilon(1e-6) for event in (case, half)
    )
    assert cut.upper == pytest.approx(mixture.upper, rel=1e-4)


@pytest.mark.soak
@pytest.mark.ordinary("zero_out")
@pytest.mark.parametrize("neighbours", ["add_remove", "zero_out"])
def test_a_chain_of_neighbours_bounds_users_where_lots_are_often_full(
    neighbours: Adjacency,
) -> None:
    """Where a lot is often full: that it may be is revealed for users, and not for records."""
    run = events.Repeated(event=leaf(2, 50_000, 580, neighbours, q=0.01, sigma=2.0), count=200)
    curve = FourierAccountant().curve(run)
    assert isinstance(curve, ChainedCurve)
    bound = curve.epsilon(1e-6)
    assert bound.width <= 0.003 * bound.upper
    assert bound.upper < 0.99 * min(own.epsilon(1e-6).upper for own in curve.above)
    assert 0.9e-6 <= curve.delta(bound.upper).upper <= 1.01e-6


@pytest.mark.parametrize("epsilon", [10.0, 15.0])
def test_delta_of_a_chain_is_above_the_truth_and_where_its_epsilon_is(epsilon: float) -> None:
    chain = ChainedCurve(above=(), below=(), neighbours=GaussianCurve(mu=1.0), links=4)
    delta = chain.delta(epsilon).upper
    assert GaussianCurve(mu=4.0).delta(epsilon).lower <= delta
    assert chain.epsilon(delta).upper == pytest.approx(epsilon, rel=2e-3)


def test_a_chain_in_one_order_is_above_what_users_of_two_records_attain() -> None:
    one = events.PoissonSubsampledGaussian(sampling_probability=0.1, noise_multiplier=0.8)
    two = events.PoissonSampledGroupGaussian(
        records=2, sampling_probability=0.1, noise_multiplier=0.8
    )
    links, users = (FourierAccountant().curve(event) for event in (one, two))
    chain = ChainedCurve(above=(GaussianCurve(mu=9.0),), below=(), neighbours=links, links=2)
    for order, attained in zip(chain.orders, orders_of(users), strict=True):
        assert attained.epsilon(1e-3).lower <= order.epsilon(1e-3).upper
        assert attained.delta(0.05).lower <= order.delta(0.05).upper
    first, second = (order.epsilon(1e-3).upper for order in chain.orders)
    assert second < 0.5 * first == 0.5 * chain.epsilon(1e-3).upper


def test_neighbours_in_a_chain_have_all_records_but_one_of_the_largest_data_set() -> None:
    one, records = neighbour_event(leaf(3, 100, 20, "add_remove"))
    assert records == 3
    [(neighbours, _)] = leaves(one) if one is not None else ()
    assert isinstance(neighbours, events.TruncatedPoissonGaussian)
    assert neighbours.dataset_size == 102
    beside = events.Composed(
        events=(leaf(3, 100, 20, "add_remove"), events.Gaussian(noise_multiplier=9.0))
    )
    assert neighbour_event(beside)[0] is None
    two = events.Composed(events=(leaf(3, 100, 20, "add_remove"), leaf(2, 100, 20, "add_remove")))
    assert neighbour_event(two)[0] is None


@pytest.mark.soak
def test_displaced_records_are_no_two_samples_that_are_opposite() -> None:
    """Twice the move of a record, whoever takes its place, and not four times."""
    run = events.Repeated(event=leaf(3, 20_000, 300, "replace_one", q=0.015, sigma=12.0), count=500)
    curve = FourierAccountant().curve(run)
    assert isinstance(curve, ChainedCurve)
    opposite, displaced = (own.epsilon(1e-6).upper for own in curve.above)
    assert displaced < 0.75 * opposite
    assert curve.epsilon(1e-6).upper <= displaced


@pytest.mark.soak
def test_more_records_and_smaller_lots_cost_more() -> None:
    def upper(records: int, largest: int) -> float:
        case = leaf(records, 5000, largest, "add_remove", q=0.02, sigma=3.0)
        return FourierAccountant().curve(events.Repeated(event=case, count=200)).epsilon(1e-6).upper

    assert upper(2, 140) < upper(2, 120) < upper(2, 100) < upper(3, 100)


def test_the_chance_of_a_crowd_is_not_below_the_truth() -> None:
    case = leaf(5, 200, 30, "replace_one", q=0.1)
    exact = binom.sf(25, 195, 0.1)
    assert exact <= crowd_probability(case) <= exact * (1 + 1e-9)
    assert crowd_probability(leaf(5, 200, 4, "add_remove")) == 1.0


def test_lots_that_hold_everybody_are_never_cut() -> None:
    never = events.PoissonSampledGroupGaussian(
        records=3, sampling_probability=0.1, noise_multiplier=2.5, pair="replace_one"
    )
    cut, plain = (
        FourierAccountant().curve(event).delta(0.3)
        for event in (leaf(3, 3, 3, "replace_one", q=0.1, sigma=2.5), never)
    )
    assert cut.upper == pytest.approx(plain.upper, rel=1e-3)


@pytest.mark.soak
def test_users_of_whom_some_record_is_nearly_always_drawn_have_an_answer() -> None:
    case = leaf(3, 3, 1, "zero_out", q=0.7472414896981409, sigma=8.019528290142492)
    curve = FourierAccountant().curve(case)
    assert isinstance(curve, ChainedCurve)
    displaced = curve.above[-1].delta(0.34438181305301196)
    assert 0 <= displaced.upper <= curve.above[0].delta(0.34438181305301196).upper


def test_it_is_written_and_read() -> None:
    case = leaf(2, 50, 7, "zero_out")
    assert events.parse_event(events.event_document(case)) == case
    for wrong in ({"records": 1}, {"max_lot_size": 52}, {"neighbours": "zero_out", "records": 51}):
        with pytest.raises(ValueError, match="must"):
            events.parse_event({**events.event_document(case), **wrong})


def test_a_loss_that_no_double_gives_a_chance_hides_no_other() -> None:
    """Of lots that are hardly ever cut: a moment of minus infinity left the run unanswered."""
    moments = _log_moments(np.array([-24.0, 0.5]), np.array([0.0, 1.0]), np.array([-1e3, 1e3]))
    assert moments == pytest.approx([-500.0, 500.0])
