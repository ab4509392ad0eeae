"""A record in one of many lots that is told few of them: products and costs, by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from affidavit.accountants import FourierAccountant, parts
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.mechanisms import lower
from affidavit.mechanisms.correlation import _allocated_apart
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.lots_apart import (
    lots_apart,
    square_of_disclosed,
    squares_by_lag,
    squares_by_place,
    sum_of_products,
)
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.mechanisms.strategies.toeplitz import Toeplitz, square_root
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.plan import events, plan_from

STEPS = 23
HUGE = events.Gaussian(noise_multiplier=0.01)
"""A bound that says nothing; accountants of allocations answer where another one bounds the run."""
STRATEGIES: tuple[Strategy, ...] = (
    square_root(STEPS),
    Toeplitz.from_strategy([1.0, -0.5, 0.25], steps=STEPS),
    Bidiagonal.of(0.9, STEPS),
    Tree.of(STEPS),
    Tree.of(STEPS, period=8),
)


def means(strategy: Strategy, bins: int) -> np.ndarray:
    """What a record adds in each bin, shape (rows, bins)."""
    size = np.abs(strategy.strategy_matrix())
    return np.stack([size[:, place::bins].sum(axis=1) for place in range(bins)], axis=1)


@pytest.mark.parametrize("bins", [5, 8, 23, 30])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
def test_no_two_lots_have_a_larger_product(strategy: Strategy, bins: int) -> None:
    added = means(strategy, bins)
    gram, bounds = added.T @ added, squares_by_lag(strategy, bins)
    for lag in range(bins):
        assert np.diagonal(gram, lag).max() <= bounds[lag] * (1 + 1e-12) + 1e-12
    told = lots_apart(strategy, turn=bins, scale=0.2)
    assert told is not None
    assert told.lots <= bins
    for place in range(bins):
        # The lots that are left when the place is told, evenly far apart in the circle of lots.
        chosen = (place + bins // told.lots * np.arange(told.lots)) % bins
        part = gram[np.ix_(chosen, chosen)]
        assert np.all(part <= told.common + told.own * np.eye(told.lots) + 1e-9)
        if told.longer is not None:
            above = np.diagonal(part) > told.common + told.less + 1e-9
            assert np.count_nonzero(above) <= told.longer


@pytest.mark.parametrize(("turn", "width"), [(5, 1), (5, 2), (8, 2), (8, 4), (23, 4), (30, 8)])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
def test_steps_that_are_told_stretch_no_vector_further(
    strategy: Strategy, turn: int, width: int
) -> None:
    """Those of one place for each epoch, drawn at random, and the first and last of all."""
    draws, size = np.random.default_rng(turn), np.abs(strategy.strategy_matrix())
    bound = square_of_disclosed(strategy, turn, width)
    epochs = -(-STEPS // turn)
    lots = np.arange(turn // width) * width
    for trial in range(12):
        first = np.full(epochs, trial) if trial < 2 else draws.integers(turn, size=epochs)
        steps = np.concatenate([e * turn + (x + lots) % turn for e, x in enumerate(first)])
        assert np.linalg.norm(size[:, steps[steps < STEPS]], 2) ** 2 <= bound
        if len(set(first)) == 1:
            kept = square_of_disclosed(strategy, turn, width, is_repeated=True)
            assert np.linalg.norm(size[:, steps[steps < STEPS]], 2) ** 2 <= kept <= bound * 1.001


@pytest.mark.parametrize(("turn", "width"), [(5, 1), (8, 2), (23, 4), (30, 8)])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
def test_noise_of_another_size_for_each_told_step_stretches_no_vector(
    strategy: Strategy, turn: int, width: int
) -> None:
    """C_S with each column over its own bound is no longer than one, and the inner ones gain."""
    draws, size = np.random.default_rng(turn), np.abs(strategy.strategy_matrix())
    squares = squares_by_place(strategy, turn, width)
    epochs, lots = -(-STEPS // turn), np.arange(turn // width) * width
    assert squares.shape == lots.shape
    for trial in range(12):
        first = np.full(epochs, trial) if trial < 2 else draws.integers(turn, size=epochs)
        steps = np.concatenate([e * turn + np.sort((x + lots) % turn) for e, x in enumerate(first)])
        scaled = size[:, steps[steps < STEPS]] / np.sqrt(np.tile(squares, epochs)[steps < STEPS])
        assert np.linalg.norm(scaled, 2) <= 1 + 1e-12


@pytest.mark.by_turns
@pytest.mark.ordinary("*-6", "sqrt-60")
@pytest.mark.parametrize("bins", [6, 60])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
def test_the_releases_cost_no_less_than_the_bins_that_they_stand_for(
    strategy: Strategy, bins: int
) -> None:
    sigma, epsilon, draws = 2.5, 0.4, np.random.default_rng(5)
    told = lots_apart(strategy, turn=bins, scale=1 / sigma**2)
    assert told is not None
    event = _allocated_apart(told, sigma)
    bound = FourierAccountant().curve(events.EitherBound(events=(HUGE, event))).delta(epsilon).upper
    added = means(strategy, bins).T / sigma
    noise, norms = draws.standard_normal((20_000, added.shape[1])), (added**2).sum(axis=1) / 2

    def loss(outputs: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(np.exp(outputs @ added.T - norms).mean(axis=1)))

    taken = draws.integers(bins, size=len(noise))
    losses = loss(noise + added[taken]), -loss(noise)
    for loss_of_order in losses:
        shown = np.maximum(0, -np.expm1(epsilon - loss_of_order))
        error = 5 * float(shown.std()) / math.sqrt(len(shown)) + 1e-6
        assert float(shown.mean()) - error <= bound


def test_what_bins_of_two_kinds_show_is_no_more_than_the_run() -> None:
    plan = plan_from(
        {
            "version": 1,
            "adjacency": "zero_out",
            "dataset": {"size": 8, "unit": "user", "contributions_per_user": 2},
            "sampling": {"scheme": "balls_in_bins", "lot_size": 2},
            "steps": 9,
            "noise": {"kind": "bidiagonal", "lambda": 0.5},
            "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 2.0}],
            "target": {"delta": 1e-3},
        }
    )
    shown = events.alternatives(lower(plan).attained())
    (event,) = (e for bound in shown for e, _ in parts(bound) if getattr(e, "longer", None))
    assert event.longer == 1
    epsilon, draws = 0.5, np.random.default_rng(6)
    least = AllocationAccountant().curve(event).delta(epsilon).lower
    added = means(Bidiagonal.of(0.5, 9), 4).T / 2.0
    outputs = draws.standard_normal((40_000, 9)) + added[draws.integers(4, size=40_000)]
    losses = np.log(np.exp(outputs @ added.T - (added**2).sum(axis=1) / 2).mean(axis=1))
    paid = np.maximum(0, -np.expm1(epsilon - losses))
    error = 5 * float(paid.std()) / math.sqrt(len(paid))
    assert float(paid.mean()) + error >= least
    assert least >= 0.1 * float(paid.mean())


@pytest.mark.parametrize("case", range(20))
def test_products_of_a_step_with_all_others_add_up_to_no_more(case: int) -> None:
    rng = np.random.default_rng(case)
    steps = int(rng.integers(2, 40))
    matrix = np.tril(rng.uniform(-1, 1, (steps, steps))) * (rng.random((steps, steps)) < 0.6)
    np.fill_diagonal(matrix, rng.uniform(0.5, 1.5, steps))
    strategy = Dense.from_strategy(matrix)
    products = np.abs(matrix).T @ np.abs(matrix)
    truth = (products.sum(axis=0) - products.diagonal()).max()
    assert truth <= sum_of_products(strategy) <= truth * (1 + 1e-6)


def test_products_of_toeplitz_columns_add_up_on_both_sides() -> None:
    strategy = Toeplitz.from_strategy([1.0, -0.5, 0.25], steps=50)
    assert sum_of_products(strategy) == pytest.approx(2 * (0.5 + 0.125 + 0.25))
    # Each column of a tree is in all levels; the products are those of the lags.
    assert sum_of_products(Tree.of(4)) == pytest.approx(2 * (2 + 1 + 1))
