"""How far participations at random move a run: enumerated, sampled and played against."""

from __future__ import annotations

import itertools
import math
from itertools import permutations, product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from affidavit.accountants import FourierAccountant
from affidavit.mechanisms.strategies import participation_mixture as module
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.moves_along_direction import independent_draws_mixture
from affidavit.mechanisms.strategies.participation_mixture import (
    participation_mixture,
    placed_mixture,
    reordered_mixture,
)
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.mechanisms.strategies.toeplitz import Toeplitz, identity, square_root
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.plan import events

Array = NDArray[np.float64]
EPSILONS = (0.0, 0.2, 1.0, 3.0)
STEPS = 10
STRATEGIES: tuple[Strategy, ...] = (
    square_root(STEPS),
    Toeplitz.from_strategy([1.0, -0.5, 0.25], steps=STEPS),
    Bidiagonal.of(-0.7, STEPS),
    Blt.of([0.9, 0.5], [0.2, 0.3], STEPS),
    Tree.of(STEPS, period=4),
    Scheduled.of(square_root(STEPS), [1.0 + step % 3 for step in range(STEPS)]),
)


def moves(matrix: Array, turn: int, group: int) -> tuple[Array, Array]:
    """‖ |C| b ‖ of every set of steps of a group, and how many steps are in it."""
    columns = np.abs(matrix[:, group::turn])
    sets = np.array(list(product((0, 1), repeat=columns.shape[1])))
    return np.linalg.norm(sets @ columns.T, axis=1), sets.sum(axis=1)


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
def test_no_distance_is_exceeded_with_more_than_its_probability(
    strategy: Strategy, turn: int, rate: float
) -> None:
    _check_no_distance_is_exceeded(strategy, turn, rate)


@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize(
    "strategy",
    [
        Tree.of(STEPS),
        Tree.of(STEPS, period=4),
        Scheduled.of(square_root(STEPS), [1.0 + step % 3 for step in range(STEPS)]),
        Scheduled.of(Tree.of(STEPS), [2.0 - step % 2 for step in range(STEPS)]),
    ],
    ids=["tree", "trees", "scheduled", "scheduled-tree"],
)
def test_nor_in_runs_too_long_for_a_matrix(
    strategy: Strategy, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_DENSE_STEPS", 0)
    _check_no_distance_is_exceeded(strategy, turn, 0.2)


def test_nor_where_some_numbers_of_participations_stand_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PARTICIPATIONS", 1)
    monkeypatch.setattr(module, "_MAX_COUNTS", 12)
    _check_no_distance_is_exceeded(Bidiagonal.of(0.6, STEPS), 1, 0.3)


def _check_no_distance_is_exceeded(strategy: Strategy, turn: int, rate: float) -> None:
    mixture = participation_mixture.__wrapped__(strategy, turn=turn, probability=rate)
    assert math.fsum(mixture.weights) == pytest.approx(1, abs=1e-15)
    assert mixture.conceded <= 1e-32
    distances = np.arange(len(mixture.weights)) * mixture.spacing
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    for group in range(turn):
        sizes, counts = moves(strategy.strategy_matrix(), turn, group)
        steps = int(counts.max())
        chances = binom.pmf(counts, steps, rate) / binom(steps, 0.5).pmf(counts) / 2.0**steps
        for distance, bound in zip(distances, above, strict=True):
            assert chances[sizes > distance].sum() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("records", [2, 3])
def test_records_of_one_user_add_up(records: int) -> None:
    steps, rate = 5, 0.15
    strategy = square_root(steps)
    mixture = participation_mixture(strategy, turn=1, probability=rate, records=records)
    distances = np.arange(len(mixture.weights)) * mixture.spacing
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    counts = np.array(list(product(range(records + 1), repeat=steps)))
    sizes = np.linalg.norm(counts @ strategy.strategy_matrix().T, axis=1)
    chances = binom.pmf(counts, records, rate).prod(axis=1)
    for distance, bound in zip(distances, above, strict=True):
        assert chances[sizes > distance].sum() <= bound * (1 + 1e-12)


@pytest.mark.ordinary("not 120000-*")
@pytest.mark.parametrize(("steps", "rate"), [(2, 1e-7), (50, 0.9), (3000, 0.1), (120_000, 1e-4)])
def test_weights_are_a_law_for_few_and_for_many_participations(steps: int, rate: float) -> None:
    mixture = participation_mixture(square_root(steps), turn=1, probability=rate)
    leaf = events.GaussianMixture(
        weights=mixture.weights, noise_multiplier=1.0, conceded=mixture.conceded
    )
    mean = float(np.arange(len(leaf.weights)) @ leaf.weights) * mixture.spacing
    # A record is drawn at least once with this chance, and then moves the run by a column.
    assert mean >= (1 - (1 - rate) ** steps) * 0.9


@pytest.mark.soak
def test_the_law_is_near_that_of_sampled_participations() -> None:
    steps, rate, sigma, delta = 400, 0.02, 5.0, 1e-4
    strategy, rng = square_root(steps), np.random.default_rng(11)
    mixture = participation_mixture(strategy, turn=1, probability=rate)
    proved = events.GaussianMixture(
        weights=mixture.weights,
        noise_multiplier=sigma / mixture.spacing,
        conceded=mixture.conceded,
    )
    drawn = rng.random((40_000, steps)) < rate
    sizes = np.linalg.norm(drawn @ strategy.strategy_matrix().T, axis=1)
    unit = sizes.max() / 200
    weights = np.bincount(np.ceil(sizes / unit).astype(int), minlength=201) + 1e-9
    sampled = events.GaussianMixture(
        weights=tuple(weights / weights.sum()), noise_multiplier=sigma / unit
    )
    upper, about = (
        FourierAccountant().curve(event).epsilon(delta).upper for event in (proved, sampled)
    )
    assert about < upper < 1.35 * about


def test_independent_noise_has_the_square_root_of_the_participations() -> None:
    """Orthogonal columns: s² = K, up to what matching repeated places adds."""
    mixture = participation_mixture(identity(1000), turn=1, probability=0.001)
    above = np.cumsum(mixture.weights[::-1])[::-1]
    for participations in (1, 2, 4):
        place = math.ceil(math.sqrt(participations) / mixture.spacing * (1 - 1e-12))
        assert binom.sf(participations - 1, 1000, 0.001) <= above[place]


@pytest.mark.by_turns
@pytest.mark.ordinary("0-0.1", "1-0.5", "2-0.1")
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_gradients_that_depend_on_releases_gain_nothing(seed: int, rate: float) -> None:
    """Two steps of one number each; the second gradient is chosen by the first release."""
    rng = np.random.default_rng(seed)
    matrix = np.array([[1.0, 0.0], [rng.uniform(-1, 1), 1.0]]) / rng.uniform(0.7, 2.0)
    mixture = participation_mixture(Dense.from_strategy(matrix), turn=1, probability=rate)
    event = events.GaussianMixture(
        weights=mixture.weights,
        noise_multiplier=1 / mixture.spacing,
        conceded=mixture.conceded,
    )
    curve = FourierAccountant().curve(event)
    line = np.linspace(-12, 12, 1201)
    first, second = np.meshgrid(line, line, indexing="ij")
    chosen = np.sign(first - rng.normal()) * rng.choice([1.0, -1.0])
    chosen *= np.where(np.abs(first) < rng.uniform(0, 2), rng.uniform(-1, 1), 1.0)
    base = np.exp(-(first**2 + second**2) / 2) / (2 * np.pi) * (line[1] - line[0]) ** 2
    ratio = np.zeros_like(base)
    for one, two in product((0, 1), repeat=2):
        chance = rate ** (one + two) * (1 - rate) ** (2 - one - two)
        m, n = matrix[0, 0] * one, matrix[1, 0] * one + matrix[1, 1] * two * chosen
        ratio += chance * np.exp(m * first - m**2 / 2 + n * second - n**2 / 2)
    for epsilon in EPSILONS:
        alpha = math.exp(epsilon)
        removed = float((base * np.maximum(ratio - alpha, 0)).sum())
        added = float((base * np.maximum(1 - alpha * ratio, 0)).sum())
        assert max(removed, added) <= curve.delta(epsilon).upper + 1e-6


@pytest.mark.parametrize(("steps", "rate"), [(10_000, 0.2), (100_000, 0.5)])
def test_thousands_of_participations_are_counted_in_groups(steps: int, rate: float) -> None:
    """Independent noise has s² = K."""
    mixture = participation_mixture(identity(steps), turn=1, probability=rate)
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    places = np.arange(len(above)) * mixture.spacing
    assert np.all(binom.sf(np.floor(places**2 * (1 + 1e-9)), steps, rate) <= above * (1 + 1e-9))


def test_a_record_that_is_often_drawn_moves_the_run_by_its_share() -> None:
    steps, rate = 10_000, 0.1
    mixture = participation_mixture(square_root(steps), turn=1, probability=rate)
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    farthest = mixture.spacing * int(np.argmax(above <= 1e-9))
    whole = np.linalg.norm(np.cumsum(square_root(steps).strategy_coefficients))
    assert rate * whole < farthest < 1.4 * rate * whole


@pytest.mark.parametrize(("steps", "records", "rate"), [(40, 1, 0.1), (2000, 5, 0.3)])
def test_what_many_draws_show_is_less_than_they_add_up_to(
    steps: int, records: int, rate: float
) -> None:
    """By the exact law of draws of three sizes, and not much less."""
    sizes = np.array([6, 8, 10])
    projections = np.repeat(sizes / 10, steps // 3 + 1)
    law = np.ones(1)
    for size in sizes:
        draws = (steps // 3 + 1) * records
        added = np.zeros(size * draws + 1)
        added[::size] = binom.pmf(np.arange(draws + 1), draws, rate)
        law = np.convolve(law, added)
    above = 1 - np.cumsum(law)
    mixture = independent_draws_mixture(
        projections, probability=rate, records=records, farthest=math.inf
    )
    assert mixture is not None
    weights = np.array(mixture.weights)
    places = np.arange(len(weights)) * mixture.spacing * 10
    tails = 1 - np.cumsum(weights)
    assert np.all(tails <= above[np.floor(places + 1e-6).astype(int)] + 1e-9)
    mean = float(weights @ places) / 10
    assert mean >= 0.7 * rate * records * float(projections.sum())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda item: item.kind)
@pytest.mark.parametrize(("lots", "drawn_anew"), [(5, False), (5, True), (10, True), (12, False)])
def test_records_that_have_a_lot_of_each_epoch(
    strategy: Strategy, lots: int, drawn_anew: bool
) -> None:
    """Two records in lots of two of all places but one, by enumeration of their places."""
    places = 2 * lots + 1 if drawn_anew else lots
    mixture = placed_mixture(
        strategy,
        turn=lots,
        records=2,
        drawn_anew=drawn_anew,
        distinct_of=places if drawn_anew else None,
    )
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    epochs = -(-STEPS // lots)
    matrix = np.zeros((len(strategy.strategy_matrix()), epochs * lots + 1))
    matrix[:, :STEPS] = np.abs(strategy.strategy_matrix())
    if drawn_anew:
        pairs = [*permutations(range(places), 2)]
        drawn = [
            [epoch * lots + place // 2 if place // 2 < lots else -1 for place in pair]
            for epoch in range(epochs)
            for pair in pairs
        ]
        moves = matrix[:, drawn].sum(axis=2).reshape(len(matrix), epochs, len(pairs))
        sums = moves[:, 0]
        for later in range(1, epochs):
            sums = (sums[:, :, None] + moves[:, later][:, None, :]).reshape(len(matrix), -1)
    else:
        kept = matrix[:, : epochs * lots].reshape(len(matrix), epochs, lots).sum(axis=1)
        sums = (kept[:, :, None] + kept[:, None, :]).reshape(len(matrix), -1)
    sizes = np.linalg.norm(sums, axis=0)
    for distance, bound in zip(np.arange(len(above)) * mixture.spacing, above, strict=True):
        assert np.mean(sizes > distance * (1 + 1e-12)) <= bound * (1 + 1e-9)


def test_records_in_lots_of_their_own_do_not_all_add_up() -> None:
    """Ten records in 4,000 lots move the run about √10 times as far as one, and not ten times."""
    strategy = Toeplitz.from_strategy([1.0, 0.5], steps=4000)
    mixture = placed_mixture(
        strategy, turn=4000, records=10, drawn_anew=True, distinct_of=1_000_000
    )
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    column = math.hypot(1.0, 0.5)
    farthest = mixture.spacing * int(np.argmax(above <= 1e-6))
    assert math.sqrt(10) * column <= farthest <= 7 * column


@pytest.mark.parametrize("seed", range(40))
def test_a_record_in_new_orders_moves_a_run_no_further_than_its_lots(seed: int) -> None:
    """All lots of few epochs, enumerated, of which the last one may end early."""
    draws = np.random.default_rng(seed)
    epochs = int(draws.integers(1, 5))
    turn = int(draws.integers(1, 9 if epochs < 4 else 6))
    steps = (epochs - 1) * turn + int(draws.integers(1, turn + 1))
    column = np.append(1.0, draws.uniform(-0.4, 1.0, min(int(draws.integers(0, 9)), steps - 1)))
    strategy = Toeplitz.from_strategy(column.tolist(), steps=steps)
    mixture = reordered_mixture(strategy, turn=turn)
    size = np.abs(strategy.strategy_matrix())
    size = np.append(size, np.zeros((steps, epochs * turn - steps)), axis=1)
    places = itertools.product(*(range(e * turn, (e + 1) * turn) for e in range(epochs)))
    moves = np.array([np.linalg.norm(size[:, list(lots)].sum(axis=1)) for lots in places])
    weights, nodes = np.array(mixture.weights), mixture.spacing * np.arange(len(mixture.weights))
    for node in (*nodes[:-1], *(moves * (1 - 1e-12))):
        above = weights[nodes > node].sum() + mixture.conceded
        assert np.mean(moves > node * (1 + 1e-12)) <= above * (1 + 1e-9)
    assert nodes @ weights <= 1.5 * moves.max()
