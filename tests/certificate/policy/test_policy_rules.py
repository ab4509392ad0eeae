"""Rules only restrict: each allows one plan and refuses another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.accountants import Bracket
from affidavit.assessment import Assessment, certify
from affidavit.assessment.assessment import POLICY_CODE_PREFIX, Opinion
from affidavit.certificate.policy.document import BUILT_IN, Policy, policy_from
from affidavit.certificate.policy.evaluation import evaluate_policy
from affidavit.certificate.policy.rules import (
    RULES,
    WAIVABLE,
    PolicyFacts,
    at_least,
    violations,
)
from affidavit.certificate.requirements import is_incomplete, with_requirements
from affidavit.plan import Plan

MakePlan = Callable[..., Plan]


def policy(**changes: Any) -> Policy:
    least = {"schema_version": 1, "name": "toys", "version": 1, "datasets": "default"}
    return policy_from({**least, "allow_large_delta": True, **changes})


def facts(plan: Plan, **changes: Any) -> PolicyFacts:
    result = PolicyFacts(
        plan=plan,
        verdict="certified",
        epsilon=2.0,
        delta=1e-5,
        engines=(("gaussian", "0.1.0"), ("pld", "dp-accounting 0.6.0")),
        budget="fits",
        unproved="",
        groups=((2, "add_remove", 4.0),),
        mu=0.5,
    )
    return replace(result, **changes)


ALONE = (("gaussian", "0.1.0"),)
RATED = {"dataset": ..., "sampling": {"scheme": "poisson", "probability": 0.1}}
TWO_PHASES = {
    "sampling": ...,
    "steps": ...,
    "releases": ...,
    "phases": [
        {
            "sampling": {"scheme": scheme, **rate},
            "steps": 5,
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
        }
        for scheme, rate in (("full_batch", {}), ("poisson", {"lot_size": 10}))
    ],
}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # rule, policy, plan that violates, its facts, pointer; the quick plan itself passes
    ("policy_dataset", {"datasets": ["toy"]}, {"dataset": {"size": 1000}}, {}, "/dataset/name"),
    ("policy_dataset", {"datasets": []}, {}, {}, "/dataset/name"),
    ("policy_adjacency", {"adjacencies": ["zero_out"]}, {}, {}, "/adjacency"),
    ("policy_unit", {"units": ["user"]}, {}, {}, "/dataset/unit"),
    ("policy_sampler", {"samplers": ["poisson"]}, {}, {}, "/sampling/scheme"),
    ("policy_sampler", {"samplers": ["full_batch"]}, TWO_PHASES, {}, "/phases/1/sampling/scheme"),
    ("policy_engine", {"engines": ["pld", "fourier"]}, {}, {}, ""),
    ("policy_accountant_version", {"accountants": {"gaussian": "0.2"}}, {}, {}, ""),
    ("policy_accountant_version", {"accountants": {"pld": "0.10.0"}}, {}, {}, ""),
    ("policy_second_opinion", {"second_opinion": "required"}, {}, {"engines": ALONE}, ""),
    ("policy_proof", {"proof": "required"}, {}, {"unproved": "it has no proof"}, ""),
    ("policy_epsilon_cap", {"epsilon_cap": 1.999}, {}, {}, "/target/epsilon"),
    ("policy_epsilon_cap", {"caps": {"toy": {"epsilon": 1}}}, {}, {}, "/target/epsilon"),
    ("policy_group_cap", {"group_cap": {"records": 2, "epsilon": 3.9}}, {}, {}, "/target/epsilon"),
    (
        "policy_group_cap",
        {"group_cap": {"relation": "replace_one", "epsilon": 9}},
        {},
        {},
        "/adjacency",
    ),
    ("policy_delta_cap", {"delta_cap": 9.9e-6}, {}, {}, "/target/delta"),
    ("policy_mu_cap", {"mu_cap": 0.499}, {}, {}, "/target/epsilon"),
    ("policy_mu_cap", {"caps": {"toy": {"mu": 0.4}}}, {}, {}, "/target/epsilon"),
    ("policy_mu_cap", {"mu_cap": 9}, {}, {"mu": None}, ""),
    ("policy_large_delta", {"allow_large_delta": False}, {}, {"delta": 1e-3}, "/target/delta"),
    ("policy_large_delta", {"allow_large_delta": False}, RATED, {}, "/dataset/size"),
    ("policy_budget", {"budget": "required"}, {}, {"budget": "exceeded"}, "/dataset/name"),
    ("policy_budget", {"budget": "required"}, {}, {"budget": "none"}, "/dataset/name"),
    ("policy_budget", {"budget": "required"}, {}, {"budget": "unknown"}, "/dataset/name"),
]  # fmt: skip

LENIENT: dict[str, dict[str, Any]] = {
    "policy_dataset": {"datasets": ["toy"]},
    "policy_adjacency": {"adjacencies": ["zero_out", "add_remove"]},
    "policy_unit": {"units": ["example"]},
    "policy_sampler": {"samplers": ["full_batch"]},
    "policy_engine": {"engines": ["gaussian"]},
    "policy_accountant_version": {"accountants": {"gaussian": "0.1", "pld": "0.6.0", "prv": "9"}},
    "policy_second_opinion": {"second_opinion": "required"},
    "policy_proof": {"proof": "required"},
    "policy_epsilon_cap": {"epsilon_cap": 1, "caps": {"toy": {"epsilon": 2}}},
    "policy_group_cap": {"group_cap": {"records": 2, "epsilon": 4}},
    "policy_delta_cap": {"delta_cap": 1e-5},
    "policy_mu_cap": {"mu_cap": 0.1, "caps": {"toy": {"mu": 0.5}}},
    "policy_large_delta": {"allow_large_delta": False},
    "policy_budget": {"budget": "required"},
}


def test_every_rule_has_a_case_each_way() -> None:
    assert {rule for rule, *_ in CASES} == set(RULES) == set(LENIENT)
    assert all(code.startswith(POLICY_CODE_PREFIX) for code in RULES)
    assert set(RULES) - WAIVABLE == {"policy_dataset", "policy_budget"}


@pytest.mark.parametrize(("rule", "rules", "changes", "data", "pointer"), CASES)
def test_a_rule_tells_what_violates_it_and_where(
    plan_of: MakePlan,
    rule: str,
    rules: dict[str, Any],
    changes: dict[str, Any],
    data: dict[str, Any],
    pointer: str,
) -> None:
    result = violations(policy(**rules), facts(plan_of(**changes), **data))
    assert [(item.code, item.pointer) for item in result] == [(rule, pointer)]
    assert result[0].message.endswith(".")
    assert result[0].remedy.endswith(".")


SUBSAMPLED: dict[str, Any] = {
    "dataset": {"size": 1000},
    "sampling": {"scheme": "poisson", "lot_size": 50},
    "steps": 200,
    "releases": [
        {"name": "first", "clip_norm": 1, "noise_multiplier": 2},
        {"name": "second", "clip_norm": 2, "noise_multiplier": 3},
    ],
}
OPEN: dict[str, dict[str, Any]] = {
    "noise": {},
    "open noise": {
        "releases": [
            {"name": "first", "clip_norm": 1},
            {"name": "second", "clip_norm": 2},
        ],
        "target": {"epsilon": 3, "delta": 1e-5},
    },
    "steps": {"steps": None, "target": {"epsilon": 3, "delta": 1e-5}},
    "lots": {
        "sampling": {"scheme": "poisson", "lot_size": None},
        "target": {"epsilon": 3, "delta": 1e-5},
    },
}


@pytest.mark.parametrize("unknown", OPEN)
def test_the_cap_on_epsilon_says_what_it_needs(plan_of: MakePlan, unknown: str) -> None:
    """The numbers of the remedy certify the plan at the cap, and slightly less do not."""
    own, plan = policy(epsilon_cap=0.75), plan_of(**SUBSAMPLED | OPEN[unknown])
    assessment = with_requirements(certify(plan, second_opinion=False), own)
    (refusal,) = violations(own, PolicyFacts.of(plan, assessment))
    numbers = [float(text) for text in re.findall(r"[0-9.]*[0-9]", refusal.remedy)]
    assert numbers.pop(0) == 0.75

    def at(factor: float) -> Assessment:
        changed = {**SUBSAMPLED, "target": {"delta": 1e-5}}
        if unknown == "steps":
            changed["steps"] = math.ceil(numbers[0] * factor)
        elif unknown == "lots":
            changed["sampling"] = {"scheme": "poisson", "lot_size": math.ceil(numbers[0] * factor)}
        else:
            changed["releases"] = [
                {**release, "noise_multiplier": sigma / factor}
                for release, sigma in zip(SUBSAMPLED["releases"], numbers, strict=True)
            ]
        return certify(plan_of(**changed), second_opinion=False)

    enough, less = at(1.0).epsilon, at(1.02).epsilon
    assert enough is not None
    assert less is not None
    assert enough.upper <= 0.75 < less.upper


def test_a_target_within_the_cap_decides_alone(plan_of: MakePlan) -> None:
    plan = plan_of(**SUBSAMPLED | {"target": {"epsilon": 0.5, "delta": 1e-5}})
    assessment = certify(plan, second_opinion=False)
    assert assessment.verdict == "under_noised"
    assert not is_incomplete(assessment, policy(epsilon_cap=0.75))


@pytest.mark.parametrize("rule", sorted(LENIENT))
def test_a_rule_lets_through_what_keeps_it(plan_of: MakePlan, rule: str) -> None:
    assert violations(policy(**LENIENT[rule]), facts(plan_of())) == ()


def test_all_that_is_wrong_is_told_at_once(plan_of: MakePlan) -> None:
    harsh = policy(
        adjacencies=["zero_out"],
        samplers=["poisson"],
        units=["user"],
        epsilon_cap=1,
        delta_cap=1e-6,
    )
    assert len(violations(harsh, facts(plan_of()))) == 5


# ---- laws -----------------------------------------------------------------------------

LISTS = {
    "adjacencies": ["add_remove", "replace_one", "zero_out"],
    "samplers": ["full_batch", "poisson", "shuffled"],
    "units": ["example", "user"],
    "engines": ["gaussian", "fourier", "pld"],
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Policy, Policy]:
    """A policy and a stricter one: shorter lists, lower caps, newer versions, more demands."""
    lax: dict[str, Any] = {}
    strict: dict[str, Any] = {}
    for name, known in LISTS.items():
        allowed = draw(st.none() | st.lists(st.sampled_from(known), min_size=1, unique=True))
        fewer = draw(st.lists(st.sampled_from(allowed or known), min_size=1, unique=True))
        lax |= {} if allowed is None else {name: allowed}
        strict[name] = allowed if allowed is not None and draw(st.booleans()) else fewer
    for name, most in (("epsilon_cap", 10.0), ("delta_cap", 0.9)):
        cap = draw(st.none() | st.floats(1e-9, most))
        lower = draw(st.floats(1e-9, cap if cap is not None else most))
        lax |= {} if cap is None else {name: cap}
        strict[name] = lower
    for name, (lenient, demanding) in {
        "second_opinion": ("if_available", "required"),
        "budget": ("optional", "required"),
        "allow_large_delta": (True, False),
    }.items():
        lax[name] = draw(st.sampled_from([lenient, demanding]))
        strict[name] = draw(st.sampled_from([lax[name], demanding]))
    least = draw(st.integers(0, 3))
    lax["accountants"] = {"gaussian": f"0.{least}"}
    strict["accountants"] = {"gaussian": f"0.{least + draw(st.integers(0, 2))}"}
    return policy(**lax), policy(**strict)


SOME = st.builds(
    dict,
    epsilon=st.floats(0, 12),
    delta=st.floats(1e-12, 0.5),
    engines=st.sampled_from([ALONE, (("fourier", "0.1.0"), ("gaussian", "0.3")), (("pld", "x"),)]),
    budget=st.sampled_from(["fits", "exceeded", "none", "unknown"]),
)
SAMPLED: list[dict[str, Any]] = [
    {},
    {"adjacency": "zero_out"},
    {"sampling": {"scheme": "poisson", "lot_size": 10}},
    {"dataset": {"size": 1000}},
    RATED,
]


@given(pairs(), SOME, st.sampled_from(SAMPLED))
def test_what_a_laxer_policy_refuses_a_stricter_one_refuses(
    plan_of: MakePlan,
    both: tuple[Policy, Policy],
    data: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    lax, strict = both
    seen = facts(plan_of(**changes), **data)
    refused = {(violation.code, violation.pointer) for violation in violations(lax, seen)}
    assert refused <= {(item.code, item.pointer) for item in violations(strict, seen)}


BRACKET = Bracket(lower=1.0, upper=2.0)


@given(pairs(), st.sampled_from(["certified", "under_noised", "refused", "undecided"]))
def test_no_policy_makes_a_plan_pass_that_accountancy_does_not(
    plan_of: MakePlan, both: tuple[Policy, Policy], verdict: Any
) -> None:
    plan = plan_of()
    result = Assessment(
        verdict=verdict,
        plan_digest="sha256:0",
        plan={},
        adjacency="add_remove",
        unit="example",
        epsilon=BRACKET,
        delta=Bracket(lower=1e-5, upper=1e-5),
        accountants=(Opinion(name="gaussian", version="0.1.0", epsilon=BRACKET),),
    )
    for item in both:
        judged, judgement = evaluate_policy(plan, result, item, budget="fits")
        allowed = {verdict, "refused"} if verdict == "certified" else {verdict}
        assert judged.verdict in allowed
        assert (judged.verdict == "certified") == (
            verdict == "certified" and not violations(item, PolicyFacts.of(plan, result, "fits"))
        )
        assert judged.epsilon == result.epsilon
        assert judged.reasons[: len(result.reasons)] == result.reasons
        assert judgement.policy == item


@pytest.mark.parametrize("changes", [*SAMPLED, {"optimizer": {"name": "dp_dice"}}])
def test_the_built_in_policy_changes_nothing(plan_of: MakePlan, changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    result = certify(plan, second_opinion=False)
    assert evaluate_policy(plan, result, BUILT_IN)[0] == result


def test_a_policys_refusal_keeps_the_numbers(plan_of: MakePlan) -> None:
    plan = plan_of()
    result = certify(plan, second_opinion=False)
    judged, _ = evaluate_policy(plan, result, policy(epsilon_cap=0.5))
    assert (result.verdict, judged.verdict) == ("certified", "refused")
    assert replace(judged, verdict="certified", reasons=()) == result
    assert [reason.code for reason in judged.reasons] == ["policy_epsilon_cap"]


def test_a_cap_that_is_met_exactly_is_met(plan_of: MakePlan) -> None:
    plan = plan_of()
    result = certify(plan, second_opinion=False)
    assert result.epsilon is not None
    at = PolicyFacts.of(plan, result).epsilon
    assert at is not None
    assert at >= result.epsilon.upper
    assert evaluate_policy(plan, result, policy(epsilon_cap=at))[0].verdict == "certified"
    assert (
        evaluate_policy(plan, result, policy(epsilon_cap=at * (1 - 1e-11)))[0].verdict == "refused"
    )


def test_a_plan_that_asks_for_noise_is_judged_by_what_it_gets(plan_of: MakePlan) -> None:
    plan = plan_of(releases=[{"name": "all", "clip_norm": 1}])
    result = certify(plan, second_opinion=False)
    assert result.verdict == "certified"
    assert evaluate_policy(plan, result, policy(epsilon_cap=8))[0].verdict == "certified"
    assert evaluate_policy(plan, result, policy(epsilon_cap=4))[0].verdict == "refused"


@pytest.mark.parametrize(
    ("version", "least", "holds"),
    [
        ("0.6.0", "0.6", True),
        ("0.6", "0.6.0", True),
        ("dp-accounting 0.6.0", "0.6.0", True),
        ("dp-accounting 0.6.0", "0.6.0.1", False),
        ("dp-accounting 0.6.0.1", "0.6.0.1", True),
        ("dp-accounting 0.10.0", "0.9", True),
        ("0.9", "0.10", False),
        ("1", "0.99.99", True),
        ("0.6.0.post1", "0.6", True),
        ("0.6.0+local", "0.6", True),
        ("0.6.0rc1", "0.6", False),
        ("0.6.0.dev3", "0.6", False),
        ("0.7.0.dev3", "0.6", False),
        ("", "0", False),
        ("unknown", "0", False),
        ("9" * 4400, "0", False),
        ("0.0", "0", True),
    ],
)
def test_versions_count_by_their_numbers_and_what_is_unclear_is_too_old(
    version: str, least: str, holds: bool
) -> None:
    assert at_least(version, least) is holds
