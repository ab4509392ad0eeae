"""Groups and other relations: bounds that hold, and are exact where a run can be accounted anew."""

from __future__ import annotations

import math

import numpy as np
import pytest

import affidavit
from affidavit.accountants import GaussianCurve
from affidavit.library.group_privacy import chained_epsilon, group_epsilon

FIXED = affidavit.Plan.dp_sgd(
    adjacency="replace_one",
    sampling="fixed_size",
    size=50_000,
    lot_size=500,
    steps=200,
    noise_multiplier=4.0,
    delta=1e-6,
)
POISSON = affidavit.Plan.dp_sgd(
    adjacency="add_remove",
    sampling="poisson",
    size=50_000,
    lot_size=500,
    steps=200,
    noise_multiplier=1.0,
    delta=1e-6,
)


@pytest.mark.parametrize("links", [2, 3, 5])
def test_a_chain_is_little_above_the_gaussian_mechanism_of_the_group(links: int) -> None:
    one = GaussianCurve(mu=0.7)
    bound = chained_epsilon(lambda delta: one.epsilon(delta).upper, 1e-6, links)
    exact = GaussianCurve(mu=0.7 * links).epsilon(1e-6).lower
    assert exact <= bound <= 1.02 * exact


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_bounds_laws_that_are_enumerated(seed: int) -> None:
    draw = np.random.default_rng(seed)
    laws = draw.dirichlet(np.full(6, 0.5 + draw.random()), size=4)

    def divergence(epsilon: float, first: int, last: int) -> float:
        return float(np.maximum(laws[first] - math.exp(epsilon) * laws[last], 0).sum())

    def neighbours(delta: float) -> float:
        """The least ε of all pairs in a row, from above."""
        low, high = 0.0, 700.0
        for _ in range(60):
            middle = (low + high) / 2
            worst = max(
                divergence(middle, *pair) for i in range(3) for pair in ((i, i + 1), (i + 1, i))
            )
            low, high = (middle, high) if worst > delta else (low, middle)
        return high

    for delta in (0.3, 0.03):
        epsilon = chained_epsilon(neighbours, delta, 3)
        assert max(divergence(epsilon, 0, 3), divergence(epsilon, 3, 0)) <= delta


def test_groups_that_are_accounted_anew_are_exact() -> None:
    two = group_epsilon(POISSON, records=2)
    user = affidavit.epsilon(POISSON, unit="user", contributions_per_user=2)
    assert (two, two.lower) == (user, user.lower)
    assert group_epsilon(POISSON, relation="zero_out") == affidavit.epsilon(POISSON)
    replaced = group_epsilon(POISSON, relation="replace_one")
    assert replaced == affidavit.epsilon(POISSON, adjacency="replace_one")


def test_a_chain_bounds_what_cannot_be_accounted_anew() -> None:
    one, two = affidavit.epsilon(FIXED), group_epsilon(FIXED, records=2)
    with pytest.raises(affidavit.NotCertified):
        affidavit.epsilon(FIXED, unit="user", contributions_per_user=2)
    assert one.lower <= two.lower <= two <= 3 * one
    # A record that is replaced by one that contributes nothing.
    assert group_epsilon(FIXED, relation="zero_out") <= one * (1 + 1e-9)


def test_what_no_chain_reaches_is_refused() -> None:
    with pytest.raises(affidavit.NotCertified, match="fixed_size_needs_replace_one"):
        group_epsilon(FIXED, relation="add_remove")
    with pytest.raises(ValueError, match="records"):
        group_epsilon(FIXED, records=0)


def test_noise_that_is_open_is_solved_for_the_plans_own_neighbours() -> None:
    plan = affidavit.load(POISSON, noise_multiplier=None, epsilon=2.0)
    one, two = group_epsilon(plan), group_epsilon(plan, records=2)
    assert one <= 2.0 < two
