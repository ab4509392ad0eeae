"""Sampled rounds of correlated noise, by quadrature over every set of steps a record is in.

With unit contributions of either sign on one line the run is a pair of mixtures of normals, one for
each set of steps. It is integrated in the span of the strategy's columns; no code is shared with
the bound, which is that of rounds with independent noise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.mechanisms.lowering import lower
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal, NormalizedBidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.moves_along_direction import independent_draws_mixture
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.mechanisms.strategies.toeplitz import Toeplitz, banded_inverse_root, square_root
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.strategies.white_noise import (
    max_stretch,
    min_stretch,
    project_columns,
)
from affidavit.plan import (
    Plan,
    events,
)
from affidavit.plan.parse import plan_from

Array = NDArray[np.float64]
Side = Literal["remove", "add", "replace"]
SIDES: tuple[Side, Side] = ("remove", "add")
EPSILONS = (0.1, 0.5, 1.0, 2.0)
POINTS = {1: 2001, 2: 301, 3: 81}


def deltas(columns: Array, rate: float, side: Side) -> Array:
    """δ at ``EPSILONS`` of the record that adds ±``columns`` in rounds drawn at ``rate``."""
    count = columns.shape[1]
    means = np.linalg.qr(columns)[1]
    reach = 7.0 + np.abs(means).sum()
    line = np.linspace(-reach, reach, POINTS[count])
    scale = (line[1] - line[0]) / np.sqrt(2 * np.pi)

    def mixture(sign: float) -> Array:
        total = np.zeros((len(line),) * count)
        for drawn in product((0, 1), repeat=count):
            weight = rate ** sum(drawn) * (1 - rate) ** (count - sum(drawn))
            centre = sign * means @ np.array(drawn)
            along = [scale * np.exp(-((line - place) ** 2) / 2) for place in centre]
            total += weight * functools.reduce(np.multiply.outer, along)
        return total

    first, second = mixture(1.0), mixture(-1.0 if side == "replace" else 0.0)
    if side == "add":
        first, second = second, first
    return np.array([np.maximum(first - np.exp(e) * second, 0).sum() for e in EPSILONS])


def worst(columns: Array, rate: float, side: Side) -> Array:
    """The largest δ over signs of the contributions, and over rounds left out."""
    count = columns.shape[1]
    result = np.zeros(len(EPSILONS))
    for signs in product((1, -1, 0), repeat=count):
        taken = [place for place in range(count) if signs[place]]
        if taken and signs[taken[0]] == 1:
            chosen = columns[:, taken] * np.array(signs)[taken]
            result = np.maximum(result, deltas(chosen, rate, side))
    return result


def plan(strategy: Array, sigma: float, adjacency: str, sampling: dict[str, Any]) -> Plan:
    rows = np.linalg.inv(strategy)
    return plan_from(
        {
            "version": 1,
            "adjacency": adjacency,
            "dataset": {"size": 1000},
            "sampling": sampling,
            "steps": len(strategy),
            "noise": {"kind": "matrix", "rows": np.tril(rows).tolist()},
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}],
            "target": {"delta": 1e-5},
        }
    )


def bounds(event: events.Event, *, above: bool) -> Array:
    curve = FourierAccountant().curve(event)
    brackets = [curve.delta(epsilon) for epsilon in EPSILONS]
    return np.array([bracket.upper if above else bracket.lower for bracket in brackets])


def strategies() -> Iterator[Array]:
    rng = np.random.default_rng(7)
    for steps in (2, 2, 3):
        yield np.tril(rng.uniform(0.0, 1.0, (steps, steps))) + np.eye(steps) / 2
    yield np.tril(rng.uniform(-1.0, 1.0, (3, 3))) + np.eye(3)


@pytest.mark.ordinary("0.1-2.0-replace_one")
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 2.0), (0.3, 4.0)])
def test_fresh_lots_cost_no_more_than_certified_and_no_less_than_attained(
    adjacency: str, rate: float, sigma: float
) -> None:
    for strategy in strategies():
        sampling = {"scheme": "poisson", "probability": rate}
        lowered = lower(plan(strategy, sigma, adjacency, sampling))
        sides: tuple[Side, ...] = ("replace",) if adjacency == "replace_one" else SIDES
        truth = np.max([worst(strategy / sigma, rate, side) for side in sides], axis=0)
        assert np.all(truth <= bounds(lowered.event(), above=True) + 1e-5)
        for event in events.alternatives(lowered.attained()):
            assert np.all(truth + 1e-5 >= bounds(event, above=False))


def test_of_few_steps_it_counts_that_a_record_is_seldom_drawn() -> None:
    """One step of any strategy is one Poisson sample."""
    document = {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 100_000},
        "sampling": {"scheme": "poisson", "lot_size": 1_000},
        "steps": 1,
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 5.0}],
        "target": {"delta": 1e-6},
    }
    correlated = lower(plan_from({**document, "noise": {"kind": "sqrt"}})).event()
    alone = lower(plan_from(document)).event()
    upper, tight = (FourierAccountant().curve(e).epsilon(1e-6).upper for e in (correlated, alone))
    assert tight <= upper < 1.1 * tight


def test_rounds_of_a_group_cost_no_more_than_certified() -> None:
    rng = np.random.default_rng(3)
    strategy = np.tril(rng.uniform(0.0, 0.4, (6, 6))) + np.eye(6)
    sampling = {"scheme": "cyclic_poisson", "lot_size": 1, "groups": 2}
    lowered = lower(plan(strategy, 2.0, "zero_out", sampling))
    assert lowered.phases[0].correlation.at(6).route == "white_noise"
    for group, side in product(range(2), SIDES):
        columns = strategy[:, group::2]
        alone = deltas(np.eye(3) * np.linalg.norm(columns, 2) / 2, 0.05, side)
        assert np.all(worst(columns / 2, 0.05, side) <= alone + 1e-5)


def test_the_norm_of_a_column_would_claim_too_little() -> None:
    strategy = np.array([[1.0, 0.0], [1.0, 1.0]]) / np.sqrt(2)
    truth = worst(strategy / 2, 0.2, "remove")
    column = deltas(np.eye(2) / 2, 0.2, "remove")
    assert np.all(truth > 1.2 * column)


STRATEGIES: tuple[Strategy, ...] = (
    square_root(60),
    banded_inverse_root(60, bands=4),
    Toeplitz.from_strategy([1.0, -0.5, 0.25], steps=60),
    Bidiagonal.of(-0.7, 60),
    NormalizedBidiagonal.of(0.7, 60),
    Blt.of([0.9, 0.5], [0.2, 0.3], 60),
    Tree.of(60, period=16),
    Tree.of(64),
    Scheduled.of(square_root(60), [1.0 + step % 3 for step in range(60)]),
)


@pytest.mark.parametrize("turn", [1, 7, 16, 60])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
def test_stretches_enclose_the_singular_values_of_the_columns_of_a_group(
    strategy: Strategy, turn: int
) -> None:
    matrix = strategy.strategy_matrix()
    groups = [matrix[:, group::turn] for group in range(min(turn, 60))]
    most, of_sizes = (
        max(np.linalg.norm(columns, 2) for columns in all_columns)
        for all_columns in (groups, map(np.abs, groups))
    )
    loose = 1.7 if isinstance(strategy, Tree) else 1.02
    assert most <= max_stretch(strategy, turn) <= loose * of_sizes
    bound, count = min_stretch(strategy, turn)
    columns = [matrix[:, :: turn << power][:, :count] for power in range(7)]
    least = [
        np.linalg.svd(chosen, compute_uv=False).min()
        for chosen in columns
        if chosen.shape[1] == count > 1
    ]
    norm = np.linalg.norm(matrix, axis=0).max()
    assert 0.6 * norm < bound <= max(least, default=norm)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
@pytest.mark.parametrize("turn", [1, 7])
def test_some_direction_shows_as_much_of_all_columns(strategy: Strategy, turn: int) -> None:
    """Along v: no sum of columns, with signs of their own, is shorter than what it shows."""
    shown = project_columns(strategy, turn)
    columns = strategy.visible_matrix()[:, ::turn]
    for signs in (np.ones(len(shown)), (-1.0) ** np.arange(len(shown))):
        along = columns @ signs / np.linalg.norm(columns @ signs)
        if np.all(shown <= np.abs(columns.T @ along) * (1 + 1e-15)):
            break
    else:
        pytest.fail("neither direction shows as much")
    assert shown.sum() >= 0.99 * np.abs(columns.T @ along).sum()


@pytest.mark.parametrize("farthest", [math.inf, 2.5])
@pytest.mark.parametrize("records", [1, 2])
def test_no_move_is_shown_more_often_than_it_is_reached(records: int, farthest: float) -> None:
    """Every set of draws of six steps, whose moves may be equal, small or zero."""
    rng = np.random.default_rng(records)
    for rate in (0.02, 0.3):
        moves = np.append(rng.uniform(0.0, 2.0, 4), [1.0, 0.0])
        law = independent_draws_mixture(moves, probability=rate, records=records, farthest=farthest)
        assert law is not None
        counts = np.array(list(product(range(records + 1), repeat=6)))
        chances = binom.pmf(counts, records, rate).prod(axis=1)
        reached = counts @ moves
        above = np.cumsum(law.weights[::-1])[::-1]
        for place in range(1, len(law.weights)):
            assert above[place] <= chances[reached >= place * law.spacing * (1 - 1e-12)].sum()
        assert (len(law.weights) - 1) * law.spacing <= farthest
        mean = float(np.arange(len(law.weights)) @ law.weights) * law.spacing
        assert mean >= 0.97 * float(chances @ np.minimum(reached, farthest))


def test_moves_that_are_never_made_show_nothing_and_many_are_counted() -> None:
    assert (
        independent_draws_mixture(np.zeros(3), probability=0.999, records=1, farthest=math.inf)
        is None
    )
    law = independent_draws_mixture(np.ones(2000), probability=0.999, records=1, farthest=math.inf)
    assert law is not None
    assert 0.97 * 1998 <= float(np.arange(len(law.weights)) @ law.weights) * law.spacing <= 1998


@pytest.mark.ordinary("1.0-0.05", "3.0-0.4")
@pytest.mark.parametrize("rate", [0.05, 0.4])
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_what_one_direction_shows_is_attained_and_more_than_single_steps(
    rate: float, sigma: float
) -> None:
    strategy = square_root(3)
    law = independent_draws_mixture(
        project_columns(strategy, 1), probability=rate, records=1, farthest=math.inf
    )
    assert law is not None
    event = events.GaussianMixture(weights=law.weights, noise_multiplier=sigma / law.spacing)
    curve = FourierAccountant().curve(event)
    columns = strategy.strategy_matrix() / sigma
    truth = np.max([deltas(columns, rate, side) for side in SIDES], axis=0)
    lower = np.array([curve.delta(epsilon).lower for epsilon in EPSILONS])
    assert np.all(lower <= truth * (1 + 2e-3) + 1e-9)
    assert lower[0] > 0.9 * truth[0]


def test_the_lower_end_of_noise_on_fresh_lots_is_that_of_all_steps() -> None:
    document = {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 500_000},
        "sampling": {"scheme": "poisson", "lot_size": 5_000},
        "steps": 1000,
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 5.0}],
        "target": {"delta": 1e-6},
        "noise": {"kind": "sqrt"},
    }
    lowered = lower(plan_from(document))
    bracket = FourierAccountant().curve(events.alternatives(lowered.attained())[0]).epsilon(1e-6)
    # Ten participations in the mean, whose columns point about one way.
    assert bracket.lower > 11
