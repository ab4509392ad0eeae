"""Two shuffled lots cost at most what the theorems say, by enumeration of orders."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.accountants import FourierAccountant
from affidavit.assessment import certify
from affidavit.mechanisms.correlation import _allocated_apart, _placed_in_disclosed
from affidavit.mechanisms.sampling_schemes import Place
from affidavit.mechanisms.strategies.lots_apart import (
    DisclosedLots,
    lots_apart,
    square_of_disclosed,
    squares_by_place,
)
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.plan import (
    events,
    plan_from,
)
from tests.support.random_seeds import examples, seeded

Array = NDArray[np.float64]
POINTS, REACH = 241, 7.0
HUGE = events.Gaussian(noise_multiplier=0.01)
"""A bound that says nothing; accountants of allocations answer where another one bounds the run."""
FACTORS = np.exp(np.linspace(0, 3, 13))


def normal(at: Array, mean: float, sigma: float) -> Array:
    return np.exp(-(((at - mean) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))


def density(records: list[float], lot: int, sigma: float, at: Array, carry: float = 0) -> Array:
    """The joint density of what the first two lots of a uniform order show, shape (n, n).

    The second output adds ``carry`` times the first lot's sum: C has the rows (1, 0), (carry, 1).
    """
    result = np.zeros((len(at), len(at)))
    places = range(len(records))
    for first in itertools.combinations(places, lot):
        for second in itertools.combinations(set(places) - set(first), lot):
            sums = [sum(records[place] for place in chosen) for chosen in (first, second)]
            sums[1] += carry * sums[0]
            result += np.multiply.outer(*(normal(at, mean, sigma) for mean in sums))
    others = math.comb(len(records) - lot, lot)
    return result / (math.comb(len(records), lot) * others)


def deltas(one: Array, other: Array, step: float) -> Array:
    """The larger δ of both orders at each of ``FACTORS``, by quadrature."""
    orders = (one, other), (other, one)
    return np.array(
        [max(float(np.maximum(p - a * q, 0).sum()) for p, q in orders) * step for a in FACTORS]
    )


@pytest.mark.parametrize(("lot", "carry"), [(1, 0.0), (2, 0.0), (1, 0.8), (2, -0.6)])
def test_two_lots_of_an_order_cost_at_most_a_sample_of_both(lot: int, carry: float) -> None:
    draw, longest = random.Random(seeded(f"shuffled lots of {lot}")), math.hypot(1, carry)
    for _ in range(examples(60 if not carry else 25)):
        size, sigma = draw.randint(2 * lot + 1, 5 + lot), draw.choice([0.5, 1.0, 2.5])
        reach = REACH * sigma + lot * (1 + abs(carry))
        at = np.linspace(-reach, reach, POINTS)
        step = at[1] - at[0]
        others = [draw.choice([-1.0, 0.0, 1.0, draw.uniform(-1, 1)]) for _ in range(size - 1)]
        if draw.random() < 0.5:
            others = [-1.0] * (size - 1)
        here, there = (
            density([record, *others], lot, sigma, at, carry)
            for record in (1.0, draw.choice([-1.0, 0.0]))
        )
        rate = 2 * lot / size
        line = np.linspace(-12 * sigma, 12 * sigma + 3, 20_001)
        without = normal(line, 0, sigma)
        sampled = (1 - rate) * without + rate * normal(line, 2 * longest, sigma)
        bound = np.array([np.maximum(sampled - a * without, 0).sum() for a in FACTORS])
        most = bound * (line[1] - line[0])
        assert np.all(deltas(here, there, step**2) <= most * (1 + 1e-3) + 1e-9), (size, sigma)


def test_a_sample_without_the_last_lot_costs_too_little() -> None:
    """The law can fail: a rate of one lot in place of two is refuted."""
    at = np.linspace(-9.0, 9.0, POINTS)
    here, there = (density([x, -1.0, -1.0, -1.0], 1, 1.0, at) for x in (1.0, -1.0))
    line = np.linspace(-12.0, 14.0, 20_001)
    sampled = 0.75 * normal(line, 0, 1.0) + 0.25 * normal(line, 2, 1.0)
    bound = np.array([np.maximum(sampled - a * normal(line, 0, 1.0), 0).sum() for a in FACTORS])
    shown = deltas(here, there, (at[1] - at[0]) ** 2)
    assert np.any(shown > bound * (line[1] - line[0]) * 1.01)


def adaptive_density(
    first: list[float], later: tuple[list[float], list[float]], lot: int, sigma: float, at: Array
) -> Array:
    """As ``density``, but what a record adds to the second lot depends on the first output."""
    result = np.zeros((len(at), len(at)))
    places = range(len(first))
    for one in itertools.combinations(places, lot):
        shown = normal(at, sum(first[place] for place in one), sigma)
        for two in itertools.combinations(set(places) - set(one), lot):
            low, high = (sum(records[place] for place in two) for records in later)
            means = np.where(at > 0, high, low)
            result += shown[:, None] * normal(at[None, :], means[:, None], sigma)
    others = math.comb(len(first) - lot, lot)
    return result / (math.comb(len(first), lot) * others)


def upper_ends(event: events.Event, epsilons: tuple[float, ...]) -> list[float]:
    curve = FourierAccountant().curve(events.EitherBound(events=(HUGE, event)))
    return [curve.delta(epsilon).upper for epsilon in epsilons]


@pytest.mark.by_turns
@pytest.mark.ordinary("not 1-0.7-*")
@pytest.mark.parametrize("place", ["replace_one", "zero_out"])
@pytest.mark.parametrize(("lot", "carry"), [(1, 0.0), (2, 0.0), (1, 0.7), (2, -0.5)])
def test_a_record_that_others_can_stand_in_for_is_in_a_random_lot(
    lot: int, carry: float, place: Place
) -> None:
    """Others fill both lots, so that a record and its replacement take the place of one of them."""
    draw, sigma = random.Random(seeded(f"random lots of {lot}, {place}")), 1.5
    strategy = Toeplitz.from_strategy([1.0, carry], steps=2)
    told = lots_apart(strategy, turn=2, scale=1 / sigma**2)
    assert told is not None
    epsilons = (0.2, 1.5)
    chain = events.ChainOfNeighbours(event=_allocated_apart(told, sigma / 2), links=2)
    linked = upper_ends(chain, epsilons)
    longest = float(np.linalg.norm(strategy.strategy_matrix(), 2))
    at = np.linspace(-REACH * sigma - 2 * lot, REACH * sigma + 2 * lot, POINTS)
    step, closest = (at[1] - at[0]) ** 2, 0.0
    replacement = -1.0 if place == "replace_one" else 0.0
    for trial in range(examples(4)):
        size = 2 * lot + 1 + draw.randint(0, 1)
        placed = events.ReplacedAllocationGaussian(
            bins=2, noise_multiplier=sigma / longest, drawn=2 * lot / size, place=place
        )
        limits = [*map(min, linked, upper_ends(placed, epsilons))]
        if carry or trial % 2:
            others = [draw.choice([-1.0, 1.0, draw.uniform(-1, 1)]) for _ in range(size - 1)]
            others = [-1.0] * (size - 1) if trial < 2 else others
            one, other = (
                density([record, *others], lot, sigma, at, carry) for record in (1.0, replacement)
            )
        else:
            rest = [[draw.choice([-1.0, 1.0]) for _ in range(size - 1)] for _ in "abc"]
            instead = replacement * draw.choice([0.0, 1.0])
            one, other = (
                adaptive_density([x, *rest[0]], ([y, *rest[1]], [z, *rest[2]]), lot, sigma, at)
                for x, y, z in ((1.0, 1.0, -1.0), (replacement, instead, -replacement))
            )
        for epsilon, most in zip(epsilons, limits, strict=True):
            for p, q in ((one, other), (other, one)):
                shown = float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) * step
                assert shown <= most * (1 + 1e-3) + 1e-9
                closest = max(closest, shown / most)
    assert closest > (0.05 if carry else 0.6)


@pytest.mark.ordinary("zero_out")
@pytest.mark.parametrize("place", ["replace_one", "zero_out"])
def test_lots_of_two_epochs_that_are_told_cost_no_less(place: Place) -> None:
    """Simulated runs of four lots of one of five records, the ratios over all pairs of orders."""
    sigma, turn, steps = 2.0, 4, 8
    strategy = Toeplitz.from_strategy([1.0, 0.6], steps=steps)
    square = square_of_disclosed(strategy, turn, 2)
    told = DisclosedLots(lots=2, width=2, stretch=math.sqrt(square), log_divergence=0.0)
    cost = _placed_in_disclosed(told, sigma, place, turn=turn, steps=steps)
    others, draws = [-1.0, -1.0, -1.0, 1.0], np.random.default_rng(3)
    matrix = strategy.strategy_matrix().T

    def sums(record: float) -> Array:
        orders = np.unique(list(itertools.permutations([record, *others], turn)), axis=0)
        places = np.arange(len(orders))
        both = np.stack(np.meshgrid(places, places), axis=-1).reshape(-1, 2)
        return np.asarray(orders[both].reshape(-1, steps) @ matrix / sigma)

    def log_density(at: Array, means: Array) -> Array:
        # Each distinct order is that of as many permutations.
        return np.asarray(np.log(np.exp(at @ means.T - (means**2).sum(axis=1) / 2).mean(axis=1)))

    with_record, without = sums(1.0), sums(-1.0 if place == "replace_one" else 0.0)
    closest = 0.0
    for epsilon, most in zip((0.1, 0.6), upper_ends(cost, (0.1, 0.6)), strict=True):
        for means, instead in ((with_record, without), (without, with_record)):
            at = means[draws.integers(len(means), size=4000)]
            at = at + draws.standard_normal(at.shape)
            ratio = log_density(at, instead) - log_density(at, means)
            shown = np.maximum(0, -np.expm1(epsilon + ratio))
            error = 5 * float(shown.std()) / math.sqrt(len(shown))
            assert float(shown.mean()) - error <= most
            closest = max(closest, float(shown.mean()) / most)
    assert closest > 0.2


@pytest.mark.by_turns
@pytest.mark.parametrize("place", ["replace_one", "zero_out"])
@pytest.mark.parametrize("carry", [(0.7,), (0.6, 0.4)])
def test_lots_at_the_ends_of_told_epochs_alone_meet_those_of_other_epochs(
    place: Place, carry: tuple[float, ...]
) -> None:
    """Simulated runs of two epochs of lots of one record, all others at -1, at other places."""
    sigma, width, lots = 1.6, len(carry) + 1, 3
    turn = width * lots
    strategy = Toeplitz.from_strategy([1.0, *carry], steps=2 * turn)
    squares = squares_by_place(strategy, turn, width)
    most, inner = float(squares.max()), float(squares[1])
    assert inner < most * 0.9
    told = DisclosedLots(
        lots=lots,
        width=width,
        stretch=math.sqrt(most),
        log_divergence=0.0,
        ends=1,
        inner=math.sqrt(inner),
    )
    cost = _placed_in_disclosed(told, sigma, place, turn=turn, steps=2 * turn)
    draws, matrix = np.random.default_rng(4), strategy.strategy_matrix().T

    def sums(record: float) -> Array:
        orders = np.full((turn, turn), -1.0) + (record + 1) * np.eye(turn)
        both = [np.append(one, other) for one in orders for other in orders]
        return np.asarray(np.array(both) @ matrix / sigma)

    def log_density(at: Array, means: Array) -> Array:
        exponents = at @ means.T - (means**2).sum(axis=1) / 2
        most_of = exponents.max(axis=1, keepdims=True)
        return np.asarray(most_of[:, 0] + np.log(np.exp(exponents - most_of).mean(axis=1)))

    with_record, without = sums(1.0), sums(-1.0 if place == "replace_one" else 0.0)
    closest = 0.0
    for epsilon, limit in zip((0.1, 0.8), upper_ends(cost, (0.1, 0.8)), strict=True):
        for means, instead in ((with_record, without), (without, with_record)):
            at = means[draws.integers(len(means), size=4000)]
            at = at + draws.standard_normal(at.shape)
            shown = np.maximum(
                0, -np.expm1(epsilon + log_density(at, instead) - log_density(at, means))
            )
            error = 5 * float(shown.std()) / math.sqrt(len(shown))
            assert float(shown.mean()) - error <= limit
            closest = max(closest, float(shown.mean()) / limit)
    assert closest > 0.3


def test_a_record_that_is_there_or_not_does_not_bound_one_that_is_zero() -> None:
    """The law can fail: others at -1 show more than a presence in one of two lots at this noise."""
    sigma, at = 1.5, np.linspace(-13.0, 13.0, POINTS)
    one, other = (density([x, *[-1.0] * 4], 2, sigma, at) for x in (1.0, 0.0))
    presence = events.RandomAllocationGaussian(bins=2, noise_multiplier=sigma)
    shown = deltas(one, other, (at[1] - at[0]) ** 2)
    places = np.flatnonzero(shown > 1e-6)
    bounds = upper_ends(presence, tuple(np.log(FACTORS[places])))
    assert np.any(shown[places] > 1.05 * np.array(bounds))


def test_one_record_that_is_left_out_hides_the_lots_of_all() -> None:
    """With lots of 250 the same run has nothing that others could stand in for."""
    plan: dict[str, Any] = {
        "version": 1,
        "adjacency": "replace_one",
        "dataset": {"size": 60_000},
        "sampling": {"scheme": "shuffled", "lot_size": 256},
        "epochs": 10,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 6}],
        "target": {"delta": 1e-6},
    }
    hidden = certify(plan_from(plan), second_opinion=False).epsilon
    known = certify(
        plan_from({**plan, "sampling": {"scheme": "shuffled", "lot_size": 250}}),
        second_opinion=False,
    ).epsilon
    assert hidden is not None
    assert known is not None
    assert hidden.lower <= hidden.upper < known.upper / 2


@pytest.mark.ordinary("100-*-zero_out", "65-*-replace_one")
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("size", "lot", "steps"), [(60_000, 256, 2350), (100, 60, 3), (65, 4, 9)])
def test_an_epoch_with_a_smaller_last_lot_amplifies_nothing(
    adjacency: str, size: int, lot: int, steps: int
) -> None:
    """Each record is in one lot of each epoch, of which the attacks see the full ones."""
    document = {
        "version": 1,
        "dataset": {"size": size},
        "adjacency": adjacency,
        "sampling": {"scheme": "shuffled", "lot_size": lot, "drop_last": False},
        "steps": steps,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 8}],
        "target": {"delta": 1e-6},
    }
    kept = certify(plan_from(document)).epsilon
    epochs = math.ceil(steps / math.ceil(size / lot))
    known = document | {"sampling": {"scheme": "cyclic", "lot_size": size}, "steps": epochs}
    in_order = certify(plan_from(known)).epsilon
    assert kept is not None
    assert in_order is not None
    assert math.isclose(kept.upper, in_order.upper, rel_tol=1e-9)
    whole = steps // math.ceil(size / lot)
    left_out = document | {
        "sampling": {"scheme": "shuffled", "lot_size": lot},
        "steps": max(1, whole) * (size // lot),
    }
    fewer = certify(plan_from(left_out)).epsilon
    assert fewer is not None
    assert kept.lower <= in_order.lower
    assert whole == 0 or kept.lower >= fewer.lower * (1 - 1e-6)
