"""How far participations at random move a run with the noise of a tree: enumerated."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.checker import Unproved, participation
from affidavit.mechanisms.strategies import tree_moves
from affidavit.mechanisms.strategies.participation_mixture import ParticipationMixture
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.strategies.tree_moves import tree_mixture
from affidavit.plan import events

Array = NDArray[np.float64]


def patterns(steps: int, rate: float, separation: int, wait: int) -> dict[tuple[int, ...], float]:
    """Return the chance of each set of steps of a record that waits for ``wait`` steps at first."""
    result: dict[tuple[int, ...], float] = {}
    for drawn in product((0, 1), repeat=steps):
        waiting, chance = wait, 1.0
        for here in drawn:
            free = waiting == 0
            chance *= (rate if here else 1 - rate) if free else 1.0 - here
            waiting = separation - 1 if free and here else max(0, waiting - 1)
        if chance:
            result[drawn] = chance
    return result


def check(mixture: ParticipationMixture, squares: Array, chances: Array) -> None:
    """Check that no distance is exceeded with more than its probability."""
    above = np.append(np.cumsum(mixture.weights[::-1])[::-1][1:], 0.0) + mixture.conceded
    for place, bound in enumerate(above):
        exceeded = np.sqrt(squares) > place * mixture.spacing * (1 + 1e-12)
        assert chances[exceeded].sum() <= bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("steps", "period", "separation", "rate", "work"),
    [(11, 11, 3, 0.2, 1), (11, 11, 3, 0.2, 0), (12, 12, 2, 0.7, 0), (9, 4, 2, 0.4, 1)],
)
def test_records_that_wait(
    steps: int,
    period: int,
    separation: int,
    rate: float,
    work: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waits are told apart in the whole run, or in blocks of few steps."""
    if not work:
        monkeypatch.setattr(tree_moves, "_MAX_WORK", 0)
        monkeypatch.setattr(tree_moves, "_DOUBLINGS", 0)
    tree = Tree.of(steps, period=period)
    mixture = tree_mixture.__wrapped__(tree, turn=1, probability=rate, separation=separation)
    for wait in range(separation):
        chances = patterns(steps, rate, separation, wait)
        moves = np.array(list(chances)) @ tree.visible_matrix().T
        check(mixture, np.square(moves).sum(axis=1), np.array(list(chances.values())))


@pytest.mark.parametrize("separation", [1, 2])
def test_records_of_one_user_add_up(separation: int) -> None:
    tree, rate = Tree.of(5), 0.2
    mixture = tree_mixture(tree, turn=1, probability=rate, records=2, separation=separation)
    chances = patterns(5, rate, separation, 0)
    moves = np.array(list(chances)) @ tree.visible_matrix().T
    both = np.square(moves[:, None] + moves[None, :]).sum(axis=2)
    of_one = np.array(list(chances.values()))
    check(mixture, both.ravel(), np.outer(of_one, of_one).ravel())


@pytest.mark.parametrize(
    ("period", "turn", "numbers"), [(13, 1, 512), (13, 3, 512), (13, 2, 3), (6, 2, 512), (5, 3, 3)]
)
def test_independent_draws_of_any_group(
    period: int, turn: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of participations are all told apart, or only few of them."""
    monkeypatch.setattr(tree_moves, "_MAX_NUMBERS", numbers)
    steps, rate = 13, 0.3
    tree = Tree.of(steps, period=period)
    mixture = tree_mixture.__wrapped__(tree, turn=turn, probability=rate)
    for group in range(turn):
        columns = tree.visible_matrix()[:, group::turn]
        sets = np.array(list(product((0, 1), repeat=columns.shape[1])))
        chances = np.where(sets, rate, 1 - rate).prod(axis=1)
        check(mixture, np.square(sets @ columns.T).sum(axis=1), chances)


def test_long_trees_are_near_sampled_participations() -> None:
    steps, rate, separation = 300, 0.03, 9
    tree, draw = Tree.of(steps), np.random.default_rng(0)
    mixture = tree_mixture(tree, turn=1, probability=rate, separation=separation)
    places = np.arange(len(mixture.weights)) * mixture.spacing
    sampled, waits = np.zeros((200, steps)), np.zeros(200)
    for step in range(steps):
        sampled[:, step] = (waits <= 0) & (draw.random(200) < rate)
        waits = np.where(sampled[:, step] > 0, separation - 1, waits - 1)
    squares = [np.square(tree.visible_sums(one)).sum() for one in sampled]
    assert np.mean(squares) <= np.square(places) @ mixture.weights <= 2 * np.mean(squares)


@pytest.mark.parametrize(("steps", "turn", "records"), [(30, 2, 2)])
def test_the_checker_covers_this_law_and_none_below(steps: int, turn: int, records: int) -> None:
    rate, noise = Fraction(1, 16), 8.0
    mixture = tree_mixture(Tree.of(steps), turn=turn, probability=float(rate), records=records)

    def covered(scale: float) -> bool:
        leaf = events.GaussianMixture(
            weights=mixture.weights,
            noise_multiplier=noise / (scale * mixture.spacing) * (1 - 2.0**-50),
            conceded=mixture.conceded,
        )
        nodes = participation.Nodes(steps=steps, period=steps, turn=turn, records=records)
        draws = participation.Draws(max_draws=-(-steps // turn) * records, probability=rate)
        return participation.is_participation_covered(leaf, [(1, Fraction(noise))], nodes, draws)

    assert covered(1.0)
    assert not covered(0.999)


def test_the_checker_refuses_trees_that_take_too_long() -> None:
    nodes = participation.Nodes(steps=20_000, period=20_000, turn=100, records=1)
    draws = participation.Draws(max_draws=200, probability=Fraction(1, 2))
    with pytest.raises(Unproved, match="participations of one record in a tree"):
        nodes.tails([], draws, 1e-35)
