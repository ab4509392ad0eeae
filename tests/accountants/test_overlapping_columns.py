"""Runs that may draw a record in every step, by enumeration of its draws and by quadrature."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from affidavit.accountants import columns_of_nodes
from affidavit.accountants.columns_of_nodes import ColumnsOfNodesCurve
from affidavit.accountants.overlapping_columns import (
    OverlappingColumnsCurve,
    both_orders,
    kinds_of_steps,
    ratios_of_joining,
)
from affidavit.accountants.protocol import PrivacyCurve
from affidavit.assessment import certify
from affidavit.plan import events, plan_from

Array = NDArray[np.float64]
EDGE = np.linspace(-8.0, 8.0, 97)
GRID = np.stack(np.meshgrid(EDGE, EDGE, indexing="ij"), axis=-1).reshape(-1, 2)
CELL = (EDGE[1] - EDGE[0]) ** 2
EPSILONS = 0.02, 0.1, 0.4, 1.0, 2.0
COLUMNS = np.array([[0.7, 0.0], [0.4, 0.6]])
"""Columns of two steps over the noise; the second one is shorter."""


def density(draws: int, q: float, moves: Array) -> Array:
    """The density of two steps on the grid, if a draw moves it by its column of ``moves``."""
    result = np.zeros(len(GRID))
    for drawn in product(range(draws + 1), repeat=2):
        chance = float(np.prod(binom.pmf(drawn, draws, q)))
        result += chance * np.exp(-((GRID - moves @ drawn) ** 2).sum(axis=1) / 2)
    return result / (2 * math.pi)


def one_way(one: Array, other: Array, epsilon: float) -> float:
    """Return δ of the first density against the other one."""
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * CELL)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("neighbours", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize(("draws", "q", "crowded"), [(1, 0.3, 0.0), (2, 0.05, 1.0), (1, 0.2, 0.25)])
def test_two_steps_cost_no_more_than_the_bound(
    draws: int, q: float, crowded: float, neighbours: Any, is_tree: bool
) -> None:
    sigma = 2.0
    columns, nodes = COLUMNS, (1, 2) if is_tree else ()
    if is_tree:
        columns = np.linalg.cholesky(np.array([[2.0, 1.0], [1.0, 2.0]])).T / sigma
    products = columns.T @ columns * sigma**2
    run = events.OverlappingColumns(
        own=float(products.max()),
        others=float(products[0, 1]),
        largest_other=float(products[0, 1]),
        draws=draws,
        sampling_probability=q,
        steps=2,
        noise_multiplier=sigma,
        neighbours=neighbours,
        crowded=crowded,
        nodes=nodes,
    )
    # What a record takes the place of moves the sum against it, and what replaces it likewise.
    moves = {"add_remove": (0.0, 0.0), "zero_out": (0.0, 1.0), "replace_one": (1.0, 2.0)}
    moved = [
        (
            crowded ** sum(full) * (1 - crowded) ** (2 - sum(full)),
            density(draws, q, columns * (1 + np.array(full))),
            density(draws, q, -columns * np.take(moves[neighbours], full)),
        )
        for full in product((0, 1), repeat=2)
    ]
    curve: PrivacyCurve = ColumnsOfNodesCurve(run) if is_tree else OverlappingColumnsCurve(run)
    for epsilon in EPSILONS:
        # Which lots are full is told, and the same with both data sets.
        truth = max(
            sum(chance * one_way(there, replaced, epsilon) for chance, there, replaced in moved),
            sum(chance * one_way(replaced, there, epsilon) for chance, there, replaced in moved),
        )
        bound = curve.delta(epsilon).upper
        assert bound >= truth * (1 - 1e-6)
        if truth > 1e-9:
            assert curve.epsilon(truth).upper >= epsilon * (1 - 1e-6)
            assert is_tree or curve.epsilon(bound).upper == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "cases", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.soak)], ids=["few", "all"]
)
def test_a_record_that_joins_costs_no_more_than_its_mean_pattern(cases: range) -> None:
    for case in cases:
        rng = np.random.default_rng(case)
        draws, q = int(rng.integers(1, 3)), float(rng.uniform(0.02, 0.6))
        crowded = float(rng.choice([0.0, rng.uniform(0.05, 0.9), 1.0]))
        columns = np.array([[rng.uniform(0.2, 0.9), 0.0], rng.uniform(0.1, 0.9, 2)])
        products = columns.T @ columns
        run = events.OverlappingColumns(
            own=float(products.diagonal().max()),
            others=float(products[0, 1]),
            largest_other=float(products[0, 1]),
            draws=draws,
            sampling_probability=q,
            steps=2,
            noise_multiplier=1.0,
            neighbours="add_remove",
            crowded=crowded,
        )
        _, joining = both_orders(run)
        bounds = ratios_of_joining(run, joining)
        absent = density(draws, 0.0, columns)
        moved = [
            (
                crowded ** sum(full) * (1 - crowded) ** (2 - sum(full)),
                density(draws, q, columns * (1 + np.array(full))),
            )
            for full in product((0, 1), repeat=2)
        ]
        for epsilon in EPSILONS:
            truth = sum(chance * one_way(absent, there, epsilon) for chance, there in moved)
            for ratio, conceded in bounds:
                assert ratio.delta(epsilon) + conceded >= truth * (1 - 1e-6)
                if truth > 1e-6:
                    assert ratio.epsilon(truth - conceded) >= epsilon * (1 - 1e-6)


def test_rare_draws_of_a_record_that_joins_cost_little_more_than_their_mean() -> None:
    # One Gaussian release of the mean pattern is no worse; few of these steps are crowded.
    run = events.OverlappingColumns(
        own=2.1,
        others=45.8,
        largest_other=1.5,
        draws=3,
        sampling_probability=0.0004,
        steps=4457,
        noise_multiplier=2.94,
        crowded=0.1,
    )
    joins = both_orders(run)[1]
    costs = [
        ratio.epsilon(1e-7 - conceded) for ratio, conceded in ratios_of_joining(run, joins)[1:]
    ]
    assert 1.5 < min(costs) < 2.2
    # A run in which no step is crowded costs less, and one of crowded steps alone more.
    near, far = (
        ratios_of_joining(other, both_orders(other)[1])[0][0].epsilon(1e-7)
        for other in (replace(run, crowded=0.0), replace(run, crowded=1.0))
    )
    assert near < min(costs) < far


@pytest.mark.parametrize("neighbours", ["add_remove", "zero_out", "replace_one"])
def test_more_crowded_steps_cost_no_less(neighbours: Any) -> None:
    # Columns that overlap with many others, at which large orders overflow.
    runs = [
        events.OverlappingColumns(
            own=2.3,
            others=81.6,
            largest_other=1.7,
            draws=1,
            sampling_probability=0.022,
            steps=107,
            noise_multiplier=6.9,
            neighbours=neighbours,
            crowded=crowded,
        )
        for crowded in (0.0, 1e-12, 1e-6, 1e-3, 0.3, 1.0)
    ]
    curves = [OverlappingColumnsCurve(run) for run in runs]
    costs = [curve.epsilon(1e-6).upper for curve in curves]
    assert all(more >= less * (1 - 1e-6) for less, more in pairwise(costs))
    assert costs[1] == pytest.approx(costs[0], rel=1e-3)
    # Of a ten thousandth of the runs, which have a crowded step, all may be lost.
    assert costs[2] <= 1.2 * costs[0]
    assert all(c.delta(cost).upper <= 1.1e-6 for c, cost in zip(curves, costs, strict=True))


@pytest.mark.parametrize("neighbours", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("q", "shown"), [(0.3, 0.5), (0.05, 2.0)])
def test_steps_whose_draws_are_shown_cost_no_more_than_the_bound(
    q: float, shown: float, neighbours: Any
) -> None:
    products, sigma = COLUMNS.T @ COLUMNS, 2.0
    run = events.OverlappingColumns(
        own=float(products.max()) * sigma**2,
        others=float(products[0, 1]) * sigma**2,
        largest_other=float(products[0, 1]) * sigma**2,
        draws=1,
        sampling_probability=q,
        steps=2,
        noise_multiplier=sigma,
        neighbours=neighbours,
        shown=shown,
    )
    places, weights = np.polynomial.hermite_e.hermegauss(14)
    weights = weights / weights.sum()
    # Under the law without a draw, what is shown multiplies the odds of one.
    odds = q * np.exp(math.sqrt(shown) * places - shown / 2)
    masses, rates = weights * (1 - q + odds), odds / (1 - q + odds)
    opposite = -1.0 if neighbours == "replace_one" else 0.0
    given = [
        (masses[i] * masses[j], *(chosen_density(pair, sign) for sign in (1.0, opposite)))
        for i, j in product(range(len(rates)), repeat=2)
        for pair in [(rates[i], rates[j])]
    ]
    assert sum(mass for mass, *_ in given) == pytest.approx(1)
    curve = OverlappingColumnsCurve(run)
    for epsilon in EPSILONS:
        truth = max(
            sum(mass * one_way(there, other, epsilon) for mass, there, other in given),
            sum(mass * one_way(other, there, epsilon) for mass, there, other in given),
        )
        assert curve.delta(epsilon).upper >= truth * (1 - 1e-6)


def chosen_density(rates: tuple[float, float], sign: float) -> Array:
    """The density of two steps on the grid, each drawn with a probability of its own."""
    result = np.zeros(len(GRID))
    for drawn in product(range(2), repeat=2):
        chance = math.prod(r if b else 1 - r for r, b in zip(rates, drawn, strict=True))
        moved = sign * COLUMNS @ drawn
        result += chance * np.exp(-((GRID - moved) ** 2).sum(axis=1) / 2)
    return result / (2 * math.pi)


@pytest.mark.parametrize("shown", [0.3, 2.0, 8.0])
def test_what_is_shown_of_a_draw_is_spread_to_probabilities_of_the_same_mean(shown: float) -> None:
    q = 0.01
    run = events.OverlappingColumns(
        own=1.0,
        others=0.0,
        largest_other=0.0,
        draws=1,
        sampling_probability=q,
        steps=1,
        noise_multiplier=9.0,
        shown=shown,
    )
    kinds = kinds_of_steps(run, run.moves)
    chances, rates = np.array([(chance, law[1]) for chance, law, *_ in kinds]).T
    assert 1 <= chances.sum() <= 1 + 1e-10
    assert chances @ rates == pytest.approx(q, rel=1e-9)
    # What is shown has the second moment E e^{2κw - κ²} over the squared mean of the odds.
    places, weights = np.polynomial.hermite_e.hermegauss(100)
    odds = q * np.exp(math.sqrt(shown) * places - shown / 2)
    second = weights @ (odds**2 / (1 - q + odds)) / weights.sum()
    assert second <= chances @ rates**2 <= 1.1 * second


def test_powers_of_overlapping_products_have_no_larger_mean_than_the_bound_says() -> None:
    # The mean of a power of Λ over three steps, by enumeration: for whole orders it is a sum of
    # exponentials of covariances.
    g, near, far, q, order = 0.5, 0.3, 0.1, 0.05, 3
    covariances = np.array([[g, near, far], [near, g, near], [far, near, g]])
    p = 1 + 2 * near / g
    truth = 0.0
    for drawn in product(range(order + 1), repeat=3):
        chance = float(np.prod(binom.pmf(drawn, order, q)))
        truth += chance * math.exp(drawn @ covariances @ np.array(drawn) / 2 - g / 2 * sum(drawn))
    places, weights = np.polynomial.hermite_e.hermegauss(120)
    ratios = 1 + q * np.expm1(math.sqrt(g) * places - g / 2)
    alone = float(weights @ ratios ** (p * order)) / math.sqrt(2 * math.pi)
    assert truth <= alone ** (3 / p)
    assert math.log(truth) > 3 * math.log(1 + q**2 * 3 * math.expm1(g))


@pytest.mark.soak
def test_a_rarely_drawn_record_has_ends_less_than_twice_apart() -> None:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": 2_505_587},
        "sampling": {"scheme": "poisson", "lot_size": 2348},
        "steps": 1404,
        "noise": {"kind": "bisr", "bands": 2},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 1.35}],
        "target": {"delta": 9.1e-8},
    }
    epsilon = certify(plan_from(document), second_opinion=False).epsilon
    assert epsilon is not None
    assert 1.2 < epsilon.upper / epsilon.lower < 2


def test_a_moment_below_every_double_bounds_nothing_by_itself() -> None:
    run = events.OverlappingColumns(
        own=1.5,
        others=180.0,
        largest_other=0.17,
        draws=1,
        sampling_probability=0.006,
        steps=5,
        noise_multiplier=0.5,
    )
    assert OverlappingColumnsCurve(run).delta(0.1).upper == 1.0


def test_a_moment_of_a_tree_is_that_of_its_enumerated_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, q, sigma = 3, 0.05, 4.0
    shared = np.array([[3, 2, 1, 1], [2, 3, 1, 1], [1, 1, 3, 2], [1, 1, 2, 3]]) / sigma**2
    for draws, far in ((1, {1: 0.9, 2: 0.1}), (2, {1: 1.0})):
        run = events.OverlappingColumns(
            own=3.0,
            others=4.0,
            largest_other=2.0,
            draws=draws,
            sampling_probability=q,
            steps=4,
            noise_multiplier=sigma,
            nodes=(1, 2, 4),
            crowded=far.get(2, 0.0),
        )
        # What all α records do in one step: the sum of their moves, and of its squares.
        law: dict[tuple[int, int], float] = defaultdict(float)
        for taken in product(range(draws + 1), repeat=order):
            chance = float(np.prod(binom.pmf(taken, draws, q)))
            for times, share in far.items():
                law[times * sum(taken), times**2 * sum(k * k for k in taken)] += share * chance
        truth = 0.0
        for steps in product(law, repeat=4):
            moves = np.array([move for move, _ in steps])
            own = 3 / sigma**2 * sum(square for _, square in steps)
            truth += math.prod(law[one] for one in steps) * math.exp(
                (moves @ shared @ moves - own) / 2
            )
        monkeypatch.setattr(columns_of_nodes, "_ORDERS", np.array([float(order)]))
        (bound,) = columns_of_nodes.log_moments(run, run.moves, 1e-25)
        assert math.log(truth) <= bound <= 1.05 * math.log(truth)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sampling", "steps", "sigma", "delta"),
    [
        ({"scheme": "poisson", "lot_size": 644}, 701, 9.57, 8.2e-7),
        ({"scheme": "truncated_poisson", "lot_size": 644, "max_lot_size": 800}, 701, 9.57, 8.2e-7),
    ],
)
def test_noise_of_a_tree_has_ends_less_than_twice_apart(
    sampling: dict[str, Any], steps: int, sigma: float, delta: float
) -> None:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 341_137},
        "sampling": sampling,
        "steps": steps,
        "noise": {"kind": "tree"},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": sigma}],
        "target": {"delta": delta},
    }
    epsilon = certify(plan_from(document), second_opinion=False).epsilon
    assert epsilon is not None
    assert 1.2 < epsilon.upper / epsilon.lower < 2
