"""Adversaries that choose what comes next in view of what came out, played to the end.

``worst`` plays every strategy over a menu of mechanisms by backward induction, with exact
probabilities, and returns the largest δ(ε) that any reaches. Pairs are binary, (p, 1-p) against
(q, 1-q): given what one order allows, the worst pair has two outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm

from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.privacy_filter.cost import Cost
from affidavit.accountants.privacy_filter.privacy_filter import GAUSSIAN_SHARE, Budget, Filter
from affidavit.accountants.privacy_filter.renyi_divergences import ORDERS

EPSILON, DELTA = 8.0, 1e-5


@dataclass(frozen=True)
class Binary:
    """P = (p, 1-p) against Q = (q, 1-q); or the other way round for the reverse."""

    p: float
    q: float

    @property
    def outcomes(self) -> tuple[tuple[float, float], ...]:
        """Probability under P and loss of each outcome."""
        return (
            (self.p, math.log(self.p / self.q)),
            (1 - self.p, math.log1p(-self.p) - math.log1p(-self.q)),
        )

    def divergence(self, order: float) -> float:
        """The larger of both directions, since a filter must hold for both."""
        there = self._log_moment(order)
        back = Binary(self.q, self.p)._log_moment(order)
        return max(there, back) / (order - 1)

    def _log_moment(self, order: float) -> float:
        terms = [math.log(chance) + (order - 1) * loss for chance, loss in self.outcomes]
        return float(np.logaddexp(*terms))

    @property
    def cost(self) -> Cost:
        return Cost.of(
            renyi=[self.divergence(order) * (1 + 1e-12) for order in ORDERS],
            mu_squared=math.inf,
            epsilon=0.0,
            delta=0.0,
        )


Admits = Callable[[Sequence[Binary]], bool]


def worst(menu: Sequence[Binary], admits: Admits, loss: float, past: tuple[Binary, ...]) -> float:
    """The largest δ(ε) from here on: stop, or the best of what is admitted next."""
    best = max(0.0, -math.expm1(EPSILON - loss))
    for item in menu:
        if admits((*past, item)):
            value = math.fsum(
                chance * worst(menu, admits, loss + more, (*past, item))
                for chance, more in item.outcomes
            )
            best = max(best, value)
    return best


def alone(order: float) -> float:
    """The Rényi budget of one order at (EPSILON, DELTA)."""
    rate = order - 1
    return EPSILON + (math.log(DELTA) + math.log(order) - rate * math.log1p(-1 / order)) / rate


def tight(order: float, room: float, ends: float, loss: float) -> Binary:
    """The pair of divergence ``room`` (at ``order``, forwards) whose likelier-under-P end is
    the total loss ``ends``."""
    rise = ends - loss
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        pair = Binary(middle, middle * math.exp(-rise)) if 0 < middle < 1 else None
        fits = pair is None or pair._log_moment(order) <= room * (order - 1)
        low, high = (middle, high) if fits else (low, middle)
    return Binary(low, low * math.exp(-rise))


def test_some_order_within_its_own_budget_would_spend_more_than_delta() -> None:
    """The rule that this filter does not use: the counterexample of the theorem's page."""
    chance = 1 / (1 + math.exp(-0.5))
    first = Binary(chance, 1 - chance)
    total = 0.0
    for probability, loss in first.outcomes:
        result = []
        for order, steps in product((3.0, 7.0), range(1, 200)):
            room = alone(order) - first.divergence(order)
            ends = EPSILON + 0.01 * steps
            second = tight(order, room, ends, loss)
            assert second._log_moment(order) / (order - 1) + first.divergence(order) <= alone(
                order
            ) * (1 + 1e-12)
            result.append(second.p * -math.expm1(EPSILON - ends))
        total += probability * max(result)
    assert total == pytest.approx(1.074 * DELTA, rel=1e-3)


@pytest.mark.ordinary("0", "1")
@pytest.mark.parametrize("seed", range(4))
def test_no_strategy_over_a_menu_passes_delta(seed: int) -> None:
    """Menus of the tight second mechanisms above, and random ones, two and three rounds deep."""
    draw = np.random.default_rng(seed)
    budget = Budget(epsilon=EPSILON, delta=DELTA, filter=Filter.start(EPSILON, DELTA))
    chance = 1 / (1 + math.exp(-float(draw.uniform(0.2, 2.0))))
    menu = [Binary(chance, 1 - chance)]
    for order in (3.0, 4.0, 7.0):
        for _ in range(2):
            room = float(draw.uniform(0.3, 1.0)) * max(alone(order), 0.5)
            pair = tight(order, room, EPSILON + float(draw.uniform(0.02, 1.5)), 0.0)
            if 1e-300 < pair.q < pair.p < 1:
                menu.append(pair)
    costs = {item: item.cost for item in menu}
    known: dict[tuple[int, ...], bool] = {}

    def admits(runs: Sequence[Binary]) -> bool:
        times = tuple(runs.count(item) for item in menu)
        if times not in known:
            total = Cost.zero(len(ORDERS))
            for entry, count in zip(menu, times, strict=True):
                total += costs[entry].times(count)
            known[times] = len(runs) <= 3 and budget.admits(total)
        return known[times]

    result = worst(menu, admits, 0.0, ())
    assert 0 < result <= DELTA


def test_the_fixed_order_filter_is_reached_to_within_what_a_binary_pair_can() -> None:
    """One order of weight one: the tight pair spends nearly all of δ, so nothing is given away."""
    order = 7.0
    weights = tuple(1.0 if item == order else 0.0 for item in ORDERS)
    only = Filter(orders=ORDERS, weights=weights, gaussian_share=0.0)
    budget = Budget(epsilon=EPSILON, delta=DELTA, filter=only)
    pair = tight(order, alone(order) * (1 - 1e-7), EPSILON + math.log(order / (order - 1)), 0.0)
    assert budget.admits(pair.cost)
    assert 0.999 * DELTA < worst([pair], lambda runs: len(runs) == 1, 0.0, ()) <= DELTA


def test_an_adversary_with_exact_gaussians_stays_within_the_gaussian_filter() -> None:
    """Two rounds: after the first, the rest of the budget, part of it or nothing, whichever is
    worst at that loss. By the theorem every choice but 'all of it' can only lose."""
    mu = 1.2
    delta = GaussianCurve(mu=mu).delta(EPSILON / 4).upper
    budget = Budget(
        epsilon=EPSILON / 4,
        delta=delta / GAUSSIAN_SHARE * (1 + 1e-9),
        filter=Filter.start(EPSILON / 4, delta / GAUSSIAN_SHARE),
    )
    first = 0.7
    menu = [0.0, 0.3, 0.6, math.sqrt(mu**2 - first**2)]

    def gaussian(*mus: float) -> Cost:
        square = math.fsum(item**2 for item in mus)
        # At orders where Rényi says nothing, the Gaussian filter decides by itself.
        return Cost.of(renyi=[math.inf] * len(ORDERS), mu_squared=square, epsilon=0.0, delta=0.0)

    assert all(budget.admits(gaussian(first, item)) for item in menu)
    assert not budget.admits(gaussian(first, menu[-1] + 1e-3))

    def rest(loss: float, second: float) -> float:
        left = EPSILON / 4 - loss
        if second == 0:
            return max(0.0, -math.expm1(left))
        return float(
            norm.cdf(second / 2 - left / second)
            - math.exp(left) * norm.cdf(-second / 2 - left / second)
        )

    nodes, weights = np.polynomial.hermite_e.hermegauss(180)
    losses = first * nodes + first**2 / 2
    value = sum(
        weight * max(rest(float(loss), second) for second in menu)
        for loss, weight in zip(losses, weights / math.sqrt(2 * math.pi), strict=True)
    )
    assert value == pytest.approx(delta, rel=1e-9)
    assert value <= budget.delta * GAUSSIAN_SHARE
