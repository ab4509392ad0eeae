"""Bounds of groups and other relations hold, and are exact if the run can be accounted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import affidavit
from affidavit import group_epsilon
from affidavit.accountants import GaussianCurve
from affidavit.accountants.chains import chained_epsilon
from affidavit.assessment import Assessment, certify
from affidavit.certificate.policy import (
    PolicyFacts,
    evaluate_policy,
    policy_from,
    violations,
)
from affidavit.certificate.requirements import with_requirements
from affidavit.plan import Plan

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
CUT = affidavit.Plan.dp_sgd(
    adjacency="zero_out",
    sampling="truncated_poisson",
    size=50_000,
    lot_size=500,
    max_lot_size=580,
    steps=200,
    noise_multiplier=2.0,
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
    # A chain may be less than the bound of a user in lots of fixed size, which is not attained.
    two = group_epsilon(FIXED, records=2)
    user = affidavit.epsilon(FIXED, unit="user", contributions_per_user=2)
    assert user.lower == two.lower <= two <= user <= 1.02 * two
    assert group_epsilon(POISSON, relation="zero_out") == affidavit.epsilon(POISSON)
    replaced = group_epsilon(POISSON, relation="replace_one")
    assert replaced == affidavit.epsilon(POISSON, adjacency="replace_one")


@pytest.mark.soak
def test_a_group_in_cut_lots_costs_what_its_users_do() -> None:
    one, two = affidavit.epsilon(CUT), group_epsilon(CUT, records=2)
    user = affidavit.epsilon(CUT, unit="user", contributions_per_user=2)
    assert one.lower <= user.lower == two.lower <= two == user <= 3 * one


def test_a_record_may_be_replaced_by_one_that_contributes_nothing() -> None:
    assert group_epsilon(FIXED, relation="zero_out") <= affidavit.epsilon(FIXED) * (1 + 1e-9)


def test_what_no_chain_reaches_is_refused() -> None:
    with pytest.raises(affidavit.NotCertified, match="fixed_size_needs_replace_one"):
        group_epsilon(FIXED, relation="add_remove")
    with pytest.raises(ValueError, match="records"):
        group_epsilon(FIXED, records=0)


def test_noise_that_is_open_is_solved_for_the_plans_own_neighbours() -> None:
    plan = affidavit.load(POISSON, noise_multiplier=None, epsilon=2.0)
    one, two = group_epsilon(plan), group_epsilon(plan, records=2)
    assert one <= 2.0 < two


def gaussian(**changes: Any) -> Plan:
    """One Gaussian release of noise 2, at δ = 1e-6."""
    document = {
        "version": 1,
        "adjacency": "zero_out",
        "sampling": {"scheme": "full_batch"},
        "steps": 1,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
        "target": {"delta": 1e-6},
    }
    return affidavit.load(document | changes)


def judged(plan: Plan, **cap: Any) -> Assessment:
    policy = policy_from(
        {
            "schema_version": 1,
            "name": "groups",
            "version": 1,
            "datasets": "default",
            "allow_large_delta": True,
            "group_cap": cap,
        }
    )
    result = with_requirements(certify(plan, second_opinion=False), policy)
    return evaluate_policy(plan, result, policy)[0]


@pytest.mark.parametrize("records", [1, 2, 3, 7])
def test_records_of_a_group_multiply_the_distance_of_gaussian_noise(records: int) -> None:
    bound = group_epsilon(gaussian(), records=records)
    exact = GaussianCurve(mu=records / 2).epsilon(1e-6)
    assert exact.lower * (1 - 1e-9) <= bound <= exact.upper * (1 + 1e-9)
    assert bound.lower <= exact.upper


def test_larger_groups_cost_more() -> None:
    bounds = [group_epsilon(FIXED, records=records) for records in (1, 2, 3)]
    assert bounds == sorted(bounds)
    assert [bound.lower for bound in bounds] == sorted(bound.lower for bound in bounds)


def test_a_policy_stops_a_plan_by_the_bound_of_a_group() -> None:
    at = GaussianCurve(mu=1.5).epsilon(1e-6).upper
    assert judged(gaussian(), records=3, epsilon=at * (1 + 1e-6)).verdict == "certified"
    stopped = judged(gaussian(), records=3, epsilon=at * (1 - 1e-6))
    assert stopped.verdict == "refused"
    assert [reason.code for reason in stopped.reasons] == ["policy_group_cap"]
    # A record that is replaced is as far as two that are zeroed.
    at = GaussianCurve(mu=1.0).epsilon(1e-6).upper
    assert judged(gaussian(), relation="replace_one", epsilon=1.001 * at).verdict == "certified"
    assert judged(gaussian(), relation="replace_one", epsilon=0.999 * at).verdict == "refused"


def test_a_policy_stops_what_has_no_bound_under_its_relation() -> None:
    stopped = judged(affidavit.load(FIXED), relation="add_remove", epsilon=1e6)
    assert [reason.code for reason in stopped.reasons] == ["policy_group_cap"]
    assert "fixed_size_needs_replace_one" in stopped.reasons[0].message
    (bound,) = stopped.groups
    assert (bound.epsilon, bound.reasons[0].code) == (None, "fixed_size_needs_replace_one")


def test_the_bound_of_a_larger_group_satisfies_a_policy_about_a_smaller_one() -> None:
    policy = policy_from(
        {
            "schema_version": 1,
            "name": "groups",
            "version": 1,
            "datasets": "default",
            "group_cap": {"records": 2, "epsilon": 8},
        }
    )
    plan = gaussian(dataset={"size": 1000})
    facts = PolicyFacts.of(plan, certify(plan, second_opinion=False))
    stated = {
        (3, "zero_out", 8.0): [],
        (2, "zero_out", 8.1): ["policy_group_cap"],
        (1, "zero_out", 1.0): ["policy_group_cap"],
        (2, "add_remove", 1.0): ["policy_group_cap"],
    }
    for group, codes in stated.items():
        reasons = violations(policy, replace(facts, groups=(group,)))
        assert [reason.code for reason in reasons] == codes


@pytest.mark.soak
def test_a_group_that_no_finite_bound_covers_is_no_error() -> None:
    result = judged(affidavit.load(FIXED, noise_multiplier=0.2), records=150, epsilon=1.0)
    assert [reason.code for reason in result.reasons] == ["policy_group_cap"]
