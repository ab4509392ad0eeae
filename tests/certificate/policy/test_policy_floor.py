"""A verifier's policy is the floor for a signed certificate."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate.issuance import issue
from affidavit.certificate.policy.document import BUILT_IN, Policy, policy_from
from affidavit.certificate.policy.evaluation import evaluate_policy, policy_floor
from affidavit.certificate.policy.rules import PolicyFacts
from affidavit.certificate.policy.waiver import Waiver
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.plan import Plan, plan_from
from affidavit.trust import SigningKey, read_public_keys
from tests.support.trust import trusting

MakePlan = Callable[..., Plan]
NOW = datetime(2027, 1, 10, tzinfo=UTC)
VECTORS = Path(__file__).parents[2] / "vectors" / "policies"


def policy(**changes: Any) -> Policy:
    least = {"schema_version": 1, "name": "toys", "version": 1, "datasets": "default"}
    return policy_from({**least, "allow_large_delta": True, **changes})


def predicate(
    plan: Plan, key: SigningKey, under: Policy = BUILT_IN, waivers: tuple[Waiver, ...] = ()
) -> dict[str, Any]:
    """What a certificate of ``plan``, issued under that policy, says."""
    result, judgement = evaluate_policy(plan, certify(plan, second_opinion=False), under, waivers)
    stated = issue(result, key, requester="carol", issued_at=NOW, evaluation=judgement).statement
    read: dict[str, Any] = json.loads(json.dumps(stated))["predicate"]
    return read


def codes(said: dict[str, Any], floor: Policy) -> list[str]:
    return [reason.code for reason in policy_floor(said, floor)]


def test_a_certificate_satisfies_the_policy_that_it_was_issued_under(
    plan_of: MakePlan, key: SigningKey
) -> None:
    own = policy(epsilon_cap=3, delta_cap=1e-5, samplers=["full_batch"], valid_days=30)
    assert codes(predicate(plan_of(), key, own), own) == []


@pytest.mark.parametrize(
    ("floor", "code"),
    [
        ({"epsilon_cap": 0.5}, "policy_epsilon_cap"),
        ({"delta_cap": 1e-6}, "policy_delta_cap"),
        ({"mu_cap": 0.01}, "policy_mu_cap"),
        ({"adjacencies": ["zero_out"]}, "policy_adjacency"),
        ({"samplers": ["poisson"]}, "policy_sampler"),
        ({"engines": ["fourier"]}, "policy_engine"),
        ({"accountants": {"gaussian": "99"}}, "policy_accountant_version"),
        ({"second_opinion": "required"}, "policy_second_opinion"),
        ({"proof": "required"}, "policy_proof"),
        ({"group_cap": {"records": 2, "epsilon": 9}}, "policy_group_cap"),
        ({"datasets": ["other"]}, "policy_dataset"),
        ({"valid_days": 364}, "policy_validity"),
        ({"approvals": 1}, "policy_approvals"),
    ],
)
def test_a_certificate_issued_under_a_laxer_policy_is_below_the_floor(
    plan_of: MakePlan, key: SigningKey, floor: dict[str, Any], code: str
) -> None:
    assert codes(predicate(plan_of(), key), policy(**floor)) == [code]


def test_another_version_whose_rules_are_kept_is_satisfied(
    plan_of: MakePlan, key: SigningKey
) -> None:
    stated = predicate(plan_of(), key, policy(version=1, epsilon_cap=3))
    assert codes(stated, policy(version=2, epsilon_cap=4)) == []


def test_a_waiver_counts_under_the_policy_that_it_was_granted_against_alone(
    plan_of: MakePlan, key: SigningKey
) -> None:
    own = policy(epsilon_cap=0.5)
    granted = Waiver(
        rule="policy_epsilon_cap",
        policy=own.digest(),
        dataset="toy",
        owner="alice",
        reason="a pilot",
        created_by="bob",
        created_at="2027-01-01T00:00:00Z",
        expires_at="2027-02-01T00:00:00Z",
    )
    stated = predicate(plan_of(), key, own, (granted,))
    assert stated["verdict"] == "certified"
    assert codes(stated, own) == []
    assert codes(stated, policy(epsilon_cap=0.5, version=2)) == ["policy_epsilon_cap"]


def test_a_reservation_is_not_asked_of_a_certificate(plan_of: MakePlan, key: SigningKey) -> None:
    assert codes(predicate(plan_of(), key), policy(budget="required")) == []


def test_what_claims_nothing_cannot_claim_too_much(plan_of: MakePlan, key: SigningKey) -> None:
    harsh = policy(epsilon_cap=1e-6, approvals=3)
    refused = predicate(plan_of(optimizer={"name": "dp_dice"}), key)
    under_noised = predicate(plan_of(target={"epsilon": 0.01, "delta": 1e-5}), key)
    assert (codes(refused, harsh), codes(under_noised, harsh)) == ([], [])


@pytest.mark.parametrize("missing", ["plan", "guarantee", "accountants", "policy", "validity"])
def test_a_statement_that_does_not_say_enough_is_below_any_floor(
    plan_of: MakePlan, key: SigningKey, missing: str
) -> None:
    stated = predicate(plan_of(), key)
    del stated[missing]
    assert codes(stated, policy()) == ["policy_unreadable"]
    assert codes({**stated, missing: "nonsense"}, policy()) == ["policy_unreadable"]


def test_facts_read_from_a_statement_are_those_it_was_judged_by(
    plan_of: MakePlan, key: SigningKey
) -> None:
    """So that issuing, verifying and simulating never differ by a rounding."""
    for changes in ({}, {"adjacency": "replace_one"}, {"steps": 7, "target": {"epsilon": 2.5}}):
        plan = plan_of(**changes)
        result = certify(plan, second_opinion=False)
        for own in (BUILT_IN, policy(epsilon_cap=1e-3)):
            stated = predicate(plan, key, own)
            assert PolicyFacts.from_predicate(stated) == PolicyFacts.of(plan, result)


# ---- bundles of before ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["certified", "under-noised", "refused"])
def test_bundles_of_the_first_built_in_policy_still_verify(name: str) -> None:
    """Made before policies were documents, with a policy of name and digest alone."""
    bundle = (VECTORS / f"default-1-{name}.bundle.json").read_bytes()
    keys = read_public_keys(VECTORS / "default-1.keys.json")
    result = verify(bundle, trusting(keys, at=keys[0].not_before))
    assert result.predicate["verdict"] == name.replace("-", "_")
    assert result.predicate["policy"]["name"] == "default"
    assert policy_floor(result.predicate, policy(epsilon_cap=3)) == ()
    assert plan_from(result.predicate["plan"]).name == "quick"
    below = policy_floor(result.predicate, policy(epsilon_cap=0.5))
    assert [item.code for item in below] == (["policy_epsilon_cap"] if name == "certified" else [])
