"""Laws of how far a unit moves a run along a direction, by enumeration of what is drawn."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, hypergeom

from affidavit import epsilon, load
from affidavit.accountants import GaussianCurve
from affidavit.mechanisms.strategies import moves_along_direction
from affidavit.mechanisms.strategies.moves_along_direction import (
    kept_bins_mixture,
    separated_draws_mixture,
    shuffled_epochs_mixture,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.participation_mixture import ParticipationMixture
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.truncated_lots import at_least_left
from affidavit.plan import events

Array = NDArray[np.float64]


def assert_never_farther(
    law: ParticipationMixture | None, moves: Array, chances: Array, *, share: float
) -> None:
    """Hold a law to the enumerated one, whose mean it reaches up to a ``share``."""
    assert law is not None
    above = np.cumsum(law.weights[::-1])[::-1]
    for place in range(1, len(law.weights)):
        reached = chances[moves >= place * law.spacing * (1 - 1e-12)].sum()
        assert above[place] <= reached * (1 + 1e-12) + 1e-290
    mean = law.spacing * float(np.arange(len(law.weights)) @ law.weights)
    assert mean >= share * float(chances @ moves)


@pytest.mark.parametrize(
    ("steps", "bins", "records"), [(7, 3, 2), (9, 3, 3), (4, 6, 2), (12, 4, 2), (5, 5, 1)]
)
def test_records_that_keep_their_bins(steps: int, bins: int, records: int) -> None:
    shown = np.random.default_rng(steps).uniform(0.0, 1.0, steps)
    of_bin = np.array([shown[first::bins].sum() for first in range(bins)])
    moves = np.array(
        [of_bin[list(choice)].sum() for choice in product(range(bins), repeat=records)]
    )
    law = kept_bins_mixture(shown, turn=bins, records=records, farthest=math.inf)
    assert_never_farther(law, moves, np.full(len(moves), bins**-records), share=0.99)
    capped = kept_bins_mixture(shown, turn=bins, records=records, farthest=0.7)
    assert capped is not None
    assert capped.spacing * (len(capped.weights) - 1) <= 0.7


@pytest.mark.parametrize(
    ("size", "lot", "steps", "records", "share"),
    [
        (7, 2, 5, 2, 0.85),
        (6, 3, 5, 2, 0.9),
        (6, 2, 6, 3, 0.8),
        (9, 2, 8, 1, 0.9),
        (6, 2, 2, 4, 0.3),
    ],
)
def test_records_in_a_new_order_each_epoch(
    size: int, lot: int, steps: int, records: int, share: float
) -> None:
    turn = size // lot
    shown = np.random.default_rng(size + steps).uniform(0.5, 1.0, steps)
    moves = np.zeros(1)
    for first in range(0, steps, turn):
        places = np.zeros(size)
        released = np.repeat(shown[first : min(steps, first + turn)], lot)
        places[: len(released)] = released
        orders = permutations(range(size), records)
        moves = np.add.outer(moves, [places[list(order)].sum() for order in orders]).ravel()
    law = shuffled_epochs_mixture(
        shown, turn=turn, size=size, lot=lot, records=records, farthest=math.inf
    )
    assert_never_farther(law, moves, np.full(len(moves), 1 / len(moves)), share=share)


def separated_draws(shown: Array, p: float, separation: int) -> tuple[Array, Array]:
    """The moves of a record that has been drawn for long, and their chances, by its waits."""
    rate = p / (1 + (separation - 1) * p)
    law = {(wait, 0.0): rate for wait in range(1, separation)}
    law[0, 0.0] = 1 - (separation - 1) * rate
    for move in shown:
        after: dict[tuple[int, float], float] = {}
        for (wait, moved), chance in law.items():
            drawn = p if wait == 0 else 0.0
            for key, part in (
                ((separation - 1, moved + move), drawn),
                ((max(wait - 1, 0), moved), 1 - drawn),
            ):
                after[key] = after.get(key, 0.0) + chance * part
        law = after
    return np.array([moved for _, moved in law]), np.array(list(law.values()))


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize(
    ("steps", "p", "separation"),
    [(5, 0.3, 3), (2, 0.3, 5), (10, 0.1, 4), (12, 0.9, 3), (7, 0.2, 1)],
)
@pytest.mark.parametrize("followed", [True, False])
def test_records_that_wait(
    steps: int,
    p: float,
    separation: int,
    records: int,
    followed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = np.ones(steps)
    if followed:
        shown = np.random.default_rng(steps).uniform(0.2, 1.0, steps).round(1)
    else:
        monkeypatch.setattr(moves_along_direction, "MAX_FOLLOWED_STEPS", 0)
    one = separated_draws(shown, p, separation)
    moves, chances = np.zeros(1), np.ones(1)
    for _ in range(records):
        moves = np.add.outer(moves, one[0]).round(9).ravel()
        moves, places = np.unique(moves, return_inverse=True)
        chances = np.bincount(places, np.multiply.outer(chances, one[1]).ravel())
    law = separated_draws_mixture(
        shown,
        probability=Fraction(p),
        separation=separation,
        records=records,
        farthest=math.inf,
    )
    assert_never_farther(law, moves, chances, share=0.98)


@pytest.mark.parametrize(
    ("size", "q", "largest", "records", "share"),
    [(20, 0.3, 6, 2, 0.9), (20, 0.3, 2, 4, 0.3), (12, 0.9, 5, 3, 0.8), (50, 0.2, 49, 3, 0.999)],
)
def test_records_that_are_left_in_a_lot_that_is_cut(
    size: int, q: float, largest: int, records: int, share: float
) -> None:
    others, kept = size - records, np.arange(records + 1)
    law = np.zeros(records + 1)
    for crowd, drawn in product(range(others + 1), range(records + 1)):
        left = 1.0 * (kept == 0)
        if drawn:
            left = hypergeom.pmf(kept, crowd + drawn, drawn, min(largest, crowd + drawn))
        law += binom.pmf(crowd, others, q) * binom.pmf(drawn, records, q) * left
    draws = at_least_left(
        events.TruncatedPoissonGroupGaussian(
            dataset_size=size,
            sampling_probability=q,
            max_lot_size=largest,
            records=records,
            noise_multiplier=1.0,
            neighbours="zero_out",
        )
    )
    assert draws is not None
    number = getattr(draws, "records", 1)
    for least in range(1, number + 1):
        chance = binom.sf(least - 1, number, draws.sampling_probability)
        assert chance <= law[least:].sum()
    assert number * draws.sampling_probability >= share * float(law @ kept)


@pytest.mark.parametrize(
    ("steps", "period"), [(1, 1), (13, 13), (20, 6), (23, 4), (30, 16), (100, 37)]
)
def test_a_tree_multiplies_as_its_matrix(steps: int, period: int) -> None:
    tree = Tree.of(steps, period=period)
    matrix, values = tree.visible_matrix(), np.random.default_rng(steps).normal(size=steps)
    sums = tree.visible_sums(values)
    assert np.sort(sums[sums != 0]) == pytest.approx(np.sort(matrix @ values))
    assert tree.spread_sums(sums) == pytest.approx(matrix.T @ (matrix @ values))
    assert tree.visible_squares() == pytest.approx((matrix**2).sum(axis=0))


def test_a_long_tree_shows_every_step_at_once() -> None:
    in_all = Participation.min_separation(participations=17_901, separation=1)
    sensitivity = Tree.of(17_901).sensitivity(in_all)
    # Of the levels with 2^l steps the left children alone: about Σ 2^l · 17901 / 2.
    assert 20_000 < sensitivity.attained <= sensitivity.value < 24_000


@pytest.mark.parametrize("scheme", ["shuffled", "balls_in_bins"])
def test_records_that_are_surely_drawn_show_their_sum(scheme: str) -> None:
    """Each of five records is in four of 80 steps; C adds up to 1.5 in each column but the last."""
    size, lot, steps, sigma = 2000, 100, 80, 4.0
    plan = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": size, "unit": "user", "contributions_per_user": 5},
        "sampling": {"scheme": scheme, "lot_size": lot},
        "steps": steps,
        "noise": {"kind": "toeplitz", "coefficients": [1.0, 0.5]},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": sigma}],
        "target": {"delta": 1e-6},
    }
    total = np.full(steps, 1.5)
    total[0] = 1.0
    shown = total + 0.5 * np.append(total[1:], 0.0)  # Cᵀ C 1
    least = 5 * np.sort(shown.reshape(4, 20), axis=1)[:, 0].sum() / np.linalg.norm(total)
    known = GaussianCurve(mu=float(least) / sigma).epsilon(1e-6).lower
    assert epsilon(load(plan)).lower >= 0.99 * known
