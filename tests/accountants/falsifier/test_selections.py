"""The best of a random number of runs shows no more than docs/theorems/selection.md says.

A run has a few outcomes. Every order of them by score is tried, and what the selection releases is
enumerated with the law of the number of runs, "no run" included, at α below and above one. Only
the bound comes from the product, which is given the exact curves of one run.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import gammaln

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.selection.accountant import HingeBound
from affidavit.accountants.selection.pair_bounds import PairBounds
from affidavit.accountants.selection.repetitions import Repetitions
from affidavit.plan import events
from tests.accountants.falsifier.hockey_sticks import Array, cell_excess
from tests.accountants.falsifier.search import DATA_SETS
from tests.support.random_seeds import seeded

LONGEST = 4000
ALPHAS = np.exp(np.concatenate((-np.geomspace(4, 1e-3, 12), [0.0], np.geomspace(1e-3, 4, 12))))


@dataclass(frozen=True)
class NumberOfRuns:
    """P(K = k) for k = 0..: Poisson, or the truncated negative binomial of shape η."""

    shape: float
    chances: Array

    @classmethod
    def poisson(cls, mean: float) -> NumberOfRuns:
        k = np.arange(LONGEST)
        return cls(math.inf, np.exp(k * math.log(mean) - mean - gammaln(k + 1)))

    @classmethod
    def negative_binomial(cls, shape: float, stop: float) -> NumberOfRuns:
        k = np.arange(1, LONGEST)
        ways = gammaln(k + shape) - gammaln(k + 1)
        chances = np.exp(ways - ways.max() + k * math.log1p(-stop))
        return cls(shape, np.append(0.0, chances / chances.sum()))

    @property
    def mean(self) -> float:
        return float(np.arange(len(self.chances)) @ self.chances)

    def generating(self, s: float) -> float:
        """E s^K."""
        return float(self.chances @ s ** np.arange(len(self.chances)))


@dataclass(frozen=True)
class FiniteCurve:
    """δ(ε) of one law of finitely many outcomes against another."""

    over: Array
    under: Array

    def delta(self, epsilon: float) -> Bracket:
        stick = float(np.maximum(self.over - math.exp(epsilon) * self.under, 0.0).sum())
        return Bracket(lower=stick, upper=stick)

    def epsilon(self, delta: float) -> Bracket:
        low, high = 0.0, float(np.log(self.over / self.under).max()) + 1e-9
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle).upper <= delta else (middle, high)
        return Bracket(lower=low, upper=high)


def best(law: Array, order: tuple[int, ...], runs: NumberOfRuns) -> Array:
    """The law of the best outcome by ``order``, and last that of no run."""
    above = np.append(0.0, np.cumsum(law[[*order]]))
    left = np.array([runs.generating(max(0.0, 1 - mass)) for mass in above])
    result = np.empty(len(law) + 1)
    result[[*order]] = left[:-1] - left[1:]
    result[-1] = runs.generating(0.0)
    return result


def beside(law: Array, other: Array) -> Array:
    """The outcomes of two independent releases."""
    return np.outer(law, other).ravel()


def bound(run: tuple[Array, Array], whole: tuple[Array, Array], runs: NumberOfRuns) -> Array:
    """The product's bound of the excess at each α; ``whole`` is ``run`` and what is beside it."""
    pairs = []
    for one in (run, whole):
        pair = PairBounds(FiniteCurve(*one), FiniteCurve(*one[::-1]))
        pair.sample(1e-8)
        pairs.append(pair)
    hinges = HingeBound(*pairs, Repetitions(mean=runs.mean, shape=runs.shape))
    deltas = np.array([hinges.delta(math.log(alpha)) for alpha in ALPHAS])
    return deltas - np.maximum(1 - ALPHAS, 0.0)


def shown_above_bound(draw: random.Random, runs: NumberOfRuns) -> float:
    """The most by which a selection among random runs, with a release beside it, is above it."""

    def law(outcomes: int, spread: float) -> Array:
        weights = np.array([draw.random() ** spread + 1e-4 for _ in range(outcomes)])
        return weights / weights.sum()

    outcomes, spread = draw.choice((1, 2, 3, 4)), draw.choice((0.1, 1.0, 3.0))
    p, q = law(outcomes, spread), law(outcomes, spread)
    other = law(2, spread), law(2, spread)
    if draw.random() < 0.5:
        other = np.ones(1), np.ones(1)
    claim = bound((p, q), (beside(p, other[0]), beside(q, other[1])), runs)
    return max(
        float(np.max(cell_excess(one, two, ALPHAS) - claim))
        for order in itertools.permutations(range(outcomes))
        for one, two in [
            (beside(best(p, order, runs), other[0]), beside(best(q, order, runs), other[1]))
        ]
    )


def random_number_of_runs(draw: random.Random) -> NumberOfRuns:
    if draw.random() < 0.5:
        return NumberOfRuns.poisson(draw.choice((1.0, 1.0, 1.5, 4.0, 20.0)))
    return NumberOfRuns.negative_binomial(draw.choice((0.0, 0.5, 1.0, 3.0)), draw.uniform(0.05, 1))


def test_no_selection_shows_more_than_its_bound_at_any_alpha() -> None:
    draw = random.Random(seeded(52))
    for _ in range(DATA_SETS):
        runs = random_number_of_runs(draw)
        assert shown_above_bound(draw, runs) <= 1e-9, runs


def test_with_fewer_runs_than_one_the_bound_would_be_false_and_is_refused() -> None:
    assert shown_above_bound(random.Random(1), NumberOfRuns.poisson(0.8)) > 1e-3
    with pytest.raises(ValueError, match="mean"):
        events.RepeatAndSelect(
            event=events.Gaussian(noise_multiplier=1.0), mean=0.8, shape=math.inf
        )
