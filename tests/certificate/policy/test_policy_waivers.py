"""A waiver waives one reason, visibly, for a time, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from affidavit.assessment import certify
from affidavit.certificate.issuance import certificate_id, issue
from affidavit.certificate.policy.document import (
    BadSignedDocument,
    Policy,
    open_document,
    policy_from,
    sign_document,
)
from affidavit.certificate.policy.evaluation import evaluate_policy
from affidavit.certificate.policy.rules import RULES, WAIVABLE
from affidavit.certificate.policy.waiver import Waiver, waivers_in_force
from affidavit.plan import Plan, digest
from affidavit.trust import SigningKey, format_instant
from tests.support.trust import trusting

MakePlan = Callable[..., Plan]
NOW = datetime(2027, 1, 10, 12, tzinfo=UTC)
STRICT = policy_from(
    {
        "schema_version": 1,
        "name": "toys",
        "version": 1,
        "datasets": ["toy"],
        "epsilon_cap": 0.5,
        "adjacencies": ["zero_out"],
        "valid_days": 90,
    }
)


def waiver(**changes: Any) -> Waiver:
    provided: dict[str, Any] = {
        "rule": "policy_epsilon_cap",
        "policy": STRICT.digest(),
        "dataset": "toy",
        "owner": "alice",
        "reason": "a pilot, agreed with the privacy officer",
        "created_by": "bob",
        "created_at": "2027-01-01T00:00:00Z",
        "expires_at": "2027-02-01T00:00:00Z",
    }
    provided |= changes
    return Waiver.model_validate(
        {key: value for key, value in provided.items() if value is not ...}
    )


BOTH = (waiver(), waiver(rule="policy_adjacency", expires_at="2027-01-20T00:00:00Z"))


def helping(*granted: Waiver, plan: Plan, **changes: Any) -> tuple[Waiver, ...]:
    requested: dict[str, Any] = {
        "policy": STRICT.digest(),
        "plan_digest": digest(plan),
        "dataset": plan.dataset.name,
        "requester": "carol",
        "now": NOW,
    }
    return waivers_in_force(granted, **(requested | changes))


def test_waived_reasons_stay_visible_and_the_certificate_ends_with_the_first_waiver(
    plan_of: MakePlan, key: SigningKey
) -> None:
    plan = plan_of()
    result = certify(plan, second_opinion=False)
    granted = helping(*BOTH, plan=plan)
    judged, judgement = evaluate_policy(plan, result, STRICT, granted)
    assert (judged.verdict, judged.reasons) == ("certified", ())
    certificate = issue(judged, key, requester="carol", issued_at=NOW, evaluation=judgement)
    predicate = certificate.statement["predicate"]
    assert predicate["policy"] == STRICT.reference()
    assert predicate["validity"]["not_after"] == "2027-01-20T00:00:00Z"
    assert [item["code"] for item in predicate["waived"]] == [
        "policy_adjacency",
        "policy_epsilon_cap",
    ]
    assert predicate["waived"][1]["waiver"] == {
        "id": BOTH[0].id,
        "owner": "alice",
        "reason": "a pilot, agreed with the privacy officer",
        "granted_by": "bob",
        "expires": "2027-02-01T00:00:00Z",
    }
    assert certificate.as_result(judged)["waived"] == predicate["waived"]
    assert certificate.id == certificate_id(digest(plan), STRICT, granted)
    assert (
        len({certificate.id, certificate_id(digest(plan), STRICT), certificate_id(digest(plan))})
        == 3
    )


def test_what_is_not_waived_still_blocks(plan_of: MakePlan) -> None:
    plan = plan_of()
    result = certify(plan, second_opinion=False)
    judged, judgement = evaluate_policy(plan, result, STRICT, BOTH[:1])
    assert judged.verdict == "refused"
    assert [reason.code for reason in judged.reasons] == ["policy_adjacency"]
    assert [item.reason.code for item in judgement.waived] == ["policy_epsilon_cap"]


def test_a_waiver_of_the_same_rule_that_holds_longest_counts(plan_of: MakePlan) -> None:
    plan = plan_of()
    result = certify(plan, second_opinion=False)
    longer = waiver(expires_at="2027-03-01T00:00:00Z")
    _, judgement = evaluate_policy(plan, result, STRICT, (*BOTH, longer))
    assert judgement.waived[1].waiver == longer


@pytest.mark.parametrize("verdict", ["under_noised", "refused"])
def test_no_waiver_helps_against_accountancy(plan_of: MakePlan, verdict: str) -> None:
    changes = {"target": {"epsilon": 0.01, "delta": 1e-5}} if verdict == "under_noised" else {}
    plan = plan_of(**changes, **({"optimizer": {"name": "dp_dice"}} if not changes else {}))
    result = certify(plan, second_opinion=False)
    assert result.verdict == verdict
    judged, _ = evaluate_policy(plan, result, STRICT, BOTH)
    assert (judged.verdict, judged.reasons) == (verdict, result.reasons)


@pytest.mark.parametrize(
    "code",
    ["under_noised", "refused", "unsound", "large_delta", "engines_disagree", "policy_",
     "policy_dataset", "policy_budget", "POLICY_ADJACENCY", ""],
)  # fmt: skip
def test_only_rules_of_a_policy_can_be_waived(code: str) -> None:
    with pytest.raises(ValidationError):
        waiver(rule=code)
    assert code not in WAIVABLE


def test_every_rule_that_can_be_waived_is_a_rule() -> None:
    assert set(RULES) > WAIVABLE


PLAN = "sha256:" + "1" * 64


@pytest.mark.parametrize(
    ("changes", "circumstances"),
    [
        pytest.param({}, {"now": NOW + timedelta(days=30)}, id="expired"),
        pytest.param({}, {"now": datetime(2027, 2, 1, tzinfo=UTC)}, id="at its very end"),
        pytest.param({}, {"now": datetime(2026, 12, 31, tzinfo=UTC)}, id="not granted yet"),
        pytest.param({"dataset": "other"}, {}, id="other data set"),
        pytest.param({}, {"dataset": None}, id="data set without a name"),
        pytest.param({"dataset": ..., "plan_digest": PLAN}, {}, id="other plan"),
        pytest.param({"policy": PLAN}, {}, id="other policy, or version of it"),
        pytest.param({}, {"requester": "bob"}, id="granted by the requester"),
    ],
)
def test_a_waiver_that_is_not_meant_does_not_help(
    plan_of: MakePlan, changes: dict[str, Any], circumstances: dict[str, Any]
) -> None:
    plan = plan_of()
    assert helping(waiver(), plan=plan) == (waiver(),)
    assert helping(waiver(**changes), plan=plan, **circumstances) == ()


def test_a_waiver_for_a_plan_helps_with_that_plan_alone(plan_of: MakePlan) -> None:
    plan, other = plan_of(), plan_of(steps=11)
    granted = waiver(dataset=..., plan_digest=digest(plan))
    assert helping(granted, plan=plan) == (granted,)
    assert helping(granted, plan=other) == ()


def test_waivers_of_another_rule_do_not_help(plan_of: MakePlan) -> None:
    plan = plan_of(adjacency="zero_out")
    result = certify(plan, second_opinion=False)
    judged, _ = evaluate_policy(plan, result, STRICT, [waiver(rule="policy_sampler")])
    assert [reason.code for reason in judged.reasons] == ["policy_epsilon_cap"]


WRONG: list[dict[str, Any]] = [
    {"dataset": ...},
    {"plan_digest": PLAN},
    {"expires_at": "2027-01-01T00:00:00Z"},
    {"expires_at": "2027-02-30T00:00:00Z"},
    {"expires_at": "2027-02-01"},
    {"expires_at": "2027-2-1T0:0:0Z"},
    {"owner": ""},
    {"reason": ""},
    {"reason": 2001 * "x"},
    {"policy": "sha256:1"},
    {"created_by": 7},
    {"note": "x"},
]


@pytest.mark.parametrize("changes", WRONG)
def test_a_waiver_that_does_not_say_one_thing_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        waiver(**changes)


def test_a_reason_has_two_thousand_letters_at_most() -> None:
    assert len(waiver(reason=2000 * "x").reason) == 2000


def test_any_change_of_a_waiver_is_another_waiver() -> None:
    same = waiver()
    assert same.id == waiver().id
    others = [
        waiver(rule="policy_sampler"),
        waiver(dataset=..., plan_digest=PLAN),
        waiver(owner="dave"),
        waiver(created_by="dave"),
        waiver(expires_at="2027-02-02T00:00:00Z"),
    ]
    assert len({item.id for item in (same, *others)}) == 6


def test_times_are_cut_to_the_second_so_that_a_certificate_never_outlives_its_waiver() -> None:
    moment = datetime(2027, 1, 1, 0, 0, 59, 999_999, tzinfo=UTC)
    assert format_instant(moment) == "2027-01-01T00:00:59Z"


# ---- as they are signed ------------------------------------------------------------------


def test_what_was_signed_is_read_back_and_nothing_else(key: SigningKey) -> None:
    document = STRICT.as_document()
    envelope = sign_document("policy", document, key)
    assert open_document("policy", envelope, key.public) == document
    with pytest.raises(BadSignedDocument):
        open_document("waiver", envelope, key.public)
    with pytest.raises(BadSignedDocument):
        open_document("policy", envelope, SigningKey.generate().public)
    with pytest.raises(BadSignedDocument):
        open_document("policy", envelope.replace(b'"sig":"', b'"sig":"A'), key.public)
    with pytest.raises(BadSignedDocument):
        open_document("policy", b"{}", key.public)


def test_a_policy_cannot_be_passed_off_as_a_certificate(key: SigningKey) -> None:
    from affidavit.certificate.issuance import BUNDLE_TYPE
    from affidavit.certificate.verification.bundle_verification import verify
    from affidavit.trust import VerificationError

    envelope = sign_document("policy", STRICT.as_document(), key).decode()
    bundle = f'{{"bundleType": "{BUNDLE_TYPE}", "envelope": {envelope}}}'
    with pytest.raises(VerificationError) as caught:
        verify(bundle.encode(), trusting(key.public))
    assert caught.value.code == "bad_statement"


def test_the_policy_that_is_named_is_the_policy_that_judged(
    plan_of: MakePlan, key: SigningKey
) -> None:
    plan = plan_of(adjacency="zero_out")
    lenient: Policy = STRICT.model_copy(update={"epsilon_cap": 8.0, "version": 2})
    result, judgement = evaluate_policy(plan, certify(plan, second_opinion=False), lenient)
    stated = issue(result, key, requester="carol", issued_at=NOW, evaluation=judgement).statement
    assert stated["predicate"]["policy"] == lenient.reference()
    assert stated["predicate"]["validity"]["not_after"] == "2027-04-10T12:00:00Z"
    assert lenient.digest() != STRICT.digest()
