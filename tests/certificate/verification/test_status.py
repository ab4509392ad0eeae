"""The last step of verification: each code has an input that only it rejects."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from affidavit.assessment import Assessment, certify
from affidavit.certificate.issuance import Certificate, issue, issue_approved
from affidavit.certificate.policy.document import BUILT_IN
from affidavit.certificate.policy.evaluation import Approval, Approvals, evaluate_policy
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.certificate.verification.status_list import PAYLOAD_TYPE as STATUS_PAYLOAD
from affidavit.certificate.verification.status_list import current_status, sign_status
from affidavit.certificate.verification.verification_result import SeenStatus, VerificationOptions
from affidavit.plan import Plan, canonical_json
from affidavit.trust import SigningKey, VerificationError, read_envelope, sign_envelope
from affidavit.trust.dsse import PAYLOAD_TYPE
from tests.support.trust import trusting

NOW = datetime.now(UTC).replace(microsecond=0)


def new_key(*, development: bool = False) -> SigningKey:
    """A key whose window was open before this file was read, however late its test runs."""
    created = SigningKey.generate("test", development=development)
    earlier = replace(created.public, not_before=NOW - timedelta(hours=1))
    return replace(created, public=earlier)


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


@pytest.fixture
def easy(make_plan: Any) -> Plan:
    """A plan that is certified."""
    releases = [{"name": "all", "clip_norm": 0.1, "noise_multiplier": 50}]
    result: Plan = make_plan(releases=releases)
    return result


@pytest.fixture
def usable(easy: Plan, key: SigningKey) -> Certificate:
    result = certify(easy, second_opinion=False)
    assert result.verdict == "certified"
    return issue(result, key, requester="ada", issued_at=NOW)


def written(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def content(key: SigningKey, **changes: Any) -> dict[str, Any]:
    return {
        "issuer": "a",
        "sequence": 5,
        "issued_at": written(NOW),
        "next_update": written(NOW + timedelta(hours=1)),
        "keyset_version": None,
        "keys": (key.key_id,),
        "listed": (),
        **changes,
    }


def listing(certificate: Certificate, status: str = "revoked") -> dict[str, Any]:
    return {
        "envelope": certificate.envelope_digest,
        "certificate_id": certificate.id,
        "issue": 1,
        "status": status,
        "reason": "plan_error",
        "since": written(NOW),
    }


def code(certificate: Certificate, key: SigningKey, status: bytes | None, **options: Any) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(
            certificate.bundle,
            trusting(key.public, at=NOW),
            options=VerificationOptions(status=status, **options),
        )
    assert (caught.value.step, caught.value.step_name) == (13, "status")
    assert caught.value.remedy
    return caught.value.code


def test_an_empty_list_lets_it_pass_and_without_one_it_is_said(
    usable: Certificate, key: SigningKey
) -> None:
    checked = verify(
        usable.bundle,
        trusting(key.public),
        options=VerificationOptions(status=sign_status(content(key), key)),
    )
    assert 13 not in checked.unchecked
    assert checked.steps[-1][2] == "not listed in status list 5 of a"
    unchecked = verify(usable.bundle, trusting(key.public))
    assert 13 in unchecked.unchecked
    assert "not checked" in unchecked.steps[-1][2]
    assert code(usable, key, None, require_status=True) == "no_status"


@pytest.mark.parametrize("status", ["revoked", "superseded"])
def test_a_listed_certificate_is_rejected_by_its_envelope(
    usable: Certificate, key: SigningKey, status: str
) -> None:
    listed = sign_status(content(key, listed=(listing(usable, status),)), key)
    assert code(usable, key, listed) == status
    # The id alone does not do: another issue of the certificate may be good.
    other = {**listing(usable, status), "envelope": "sha256:" + "0" * 64}
    verify(
        usable.bundle,
        trusting(key.public),
        options=VerificationOptions(status=sign_status(content(key, listed=(other,)), key)),
    )


def test_a_list_is_good_until_its_next_update(usable: Certificate, key: SigningKey) -> None:
    status = sign_status(content(key), key)
    end = NOW + timedelta(hours=1)
    current_status(status, trusting(key.public, at=end), {})
    with pytest.raises(VerificationError) as caught:
        verify(
            usable.bundle,
            trusting(key.public, at=end + timedelta(seconds=1)),
            options=VerificationOptions(status=status),
        )
    assert caught.value.code == "stale_status"
    ahead = content(
        key,
        issued_at=written(NOW + timedelta(minutes=10)),
        next_update=written(NOW + timedelta(hours=2)),
    )
    assert code(usable, key, sign_status(ahead, key)) == "bad_status"


def test_a_number_never_goes_back_and_stands_for_one_list(
    usable: Certificate, key: SigningKey
) -> None:
    status = sign_status(content(key), key)
    digest = read_envelope(json.loads(status)).digest
    for seen in (
        {},
        {"a": SeenStatus(5, digest)},
        {"a": SeenStatus(4, "x")},
        {"b": SeenStatus(9, "x")},
    ):
        verify(
            usable.bundle,
            trusting(key.public),
            options=VerificationOptions(status=status, status_seen=seen),
        )
    assert code(usable, key, status, status_seen={"a": SeenStatus(6, "x")}) == "status_rollback"
    assert code(usable, key, status, status_seen={"a": SeenStatus(5, "x")}) == "status_rollback"


def test_a_list_speaks_for_the_keys_that_it_names_and_no_others(
    usable: Certificate, key: SigningKey
) -> None:
    """A fresh list of another service that the verifier trusts too says nothing."""
    other = new_key()
    status = sign_status(content(other), other)
    with pytest.raises(VerificationError) as caught:
        verify(
            usable.bundle,
            trusting(key.public, other.public),
            options=VerificationOptions(status=status),
        )
    assert caught.value.code == "other_status"


def test_only_a_trusted_key_inside_its_window_signs_a_list(
    usable: Certificate, key: SigningKey
) -> None:
    stranger = new_key()
    assert code(usable, key, sign_status(content(key), stranger)) == "bad_status"
    development = new_key(development=True)
    late = new_key()
    late = replace(late, public=replace(late.public, not_before=NOW + timedelta(minutes=30)))
    for signer in (development, late):
        with pytest.raises(VerificationError, match="status list"):
            current_status(sign_status(content(key), signer), trusting(signer.public, at=NOW), {})


def test_any_single_byte_changed_is_rejected(usable: Certificate, key: SigningKey) -> None:
    status = sign_status(content(key, listed=(listing(usable),)), key)
    for place in range(len(status)):
        changed = bytearray(status)
        changed[place] ^= 1 << (place % 7)
        with pytest.raises(VerificationError) as caught:
            current_status(bytes(changed), trusting(key.public, at=NOW), {})
        assert caught.value.code == "bad_status", place


def test_no_payload_passes_for_one_of_the_other_type(usable: Certificate, key: SigningKey) -> None:
    """The type is signed: neither a relabelled nor a mistyped envelope is read."""
    certificate, status = json.loads(usable.bundle), json.loads(sign_status(content(key), key))
    assert code(usable, key, canonical_json(certificate["envelope"])) == "bad_status"
    relabelled = {**certificate["envelope"], "payloadType": STATUS_PAYLOAD}
    assert code(usable, key, canonical_json(relabelled)) == "bad_status"
    for envelope, step in (
        (status, 2),
        ({**status, "payloadType": PAYLOAD_TYPE}, 4),
        (sign_envelope(read_envelope(status).payload, key).as_document(), 5),
    ):
        with pytest.raises(VerificationError) as caught:
            verify(canonical_json({**certificate, "envelope": envelope}), trusting(key.public))
        assert caught.value.step == step
    mistyped = sign_envelope(read_envelope(certificate["envelope"]).payload, key, STATUS_PAYLOAD)
    assert code(usable, key, canonical_json(mistyped.as_document())) == "bad_status"


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 0},
        {"sequence": "5"},
        {"_type": "https://affidavit.dev/status-list/v2"},
        {"issued_at": "yesterday"},
        {"issued_at": "2026-13-01T00:00:00Z"},
        {"listed": [{"envelope": "sha256:1"}]},
        {"listed": None},
        {"more": 1},
    ],
)
def test_a_list_of_another_form_is_rejected_though_it_is_signed(
    usable: Certificate, key: SigningKey, changes: dict[str, Any]
) -> None:
    payload = json.loads(read_envelope(json.loads(sign_status(content(key), key))).payload)
    envelope = sign_envelope(canonical_json({**payload, **changes}), key, STATUS_PAYLOAD)
    assert code(usable, key, canonical_json(envelope.as_document())) == "bad_status"


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_list_is_rejected(usable: Certificate, key: SigningKey, raw: bytes) -> None:
    assert code(usable, key, raw) == "bad_status"


# ---- approvals ---------------------------------------------------------------------------


@pytest.fixture
def pending(easy: Plan, key: SigningKey) -> Certificate:
    """A certificate that two people other than ada have to approve."""
    policy = BUILT_IN.model_copy(update={"approvals": 2})
    assessment: Assessment = certify(easy, second_opinion=False)
    result, under = evaluate_policy(easy, assessment, policy, ())
    return issue(result, key, requester="ada", issued_at=NOW, evaluation=under)


class _First:
    def __init__(self, certificate: Certificate) -> None:
        self.issue = 1
        self.envelope_digest = certificate.envelope_digest


def given_by(pending: Certificate, key: SigningKey, *names: str, envelope: str = "") -> Certificate:
    seen = envelope or pending.envelope_digest
    return issue_approved(
        pending.statement,
        key,
        approvals=Approvals(2, tuple(Approval(name, written(NOW), "", seen) for name in names)),
        issued_at=NOW,
        previous=_First(pending),
    )


def test_a_certificate_passes_once_all_have_approved_it(
    pending: Certificate, key: SigningKey
) -> None:
    assert code(pending, key, None) == "not_approved"
    assert code(given_by(pending, key, "bea"), key, None) == "not_approved"
    full = given_by(pending, key, "bea", "cem")
    predicate = verify(full.bundle, trusting(key.public)).predicate
    assert (predicate["issue"], predicate["supersedes"]) == (2, pending.envelope_digest)


def test_one_person_is_one_approval_and_the_requester_none(
    pending: Certificate, key: SigningKey
) -> None:
    assert code(given_by(pending, key, "bea", "bea"), key, None) == "not_approved"
    assert code(given_by(pending, key, "bea", "ada"), key, None) == "not_approved"


def test_approvals_of_another_envelope_do_not_count(pending: Certificate, key: SigningKey) -> None:
    other = given_by(pending, key, "bea", "cem", envelope="sha256:" + "0" * 64)
    assert code(other, key, None) == "not_approved"


def test_approvals_are_critical_so_that_no_verifier_overlooks_them(pending: Certificate) -> None:
    assert "approvals" in pending.statement["predicate"]["critical"]


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        3,
        [1],
        {"required": "2", "given": []},
        {"required": -1, "given": []},
        {"required": True, "given": []},
        {"required": 0, "given": [{}]},
        {"required": 0, "given": 1},
    ],
)
def test_approvals_that_cannot_be_read_are_no_approvals(
    pending: Certificate, key: SigningKey, said: Any
) -> None:
    statement = json.loads(json.dumps(pending.statement))
    statement["predicate"]["approvals"] = said
    envelope = sign_envelope(canonical_json(statement), key).as_document()
    bundle = canonical_json({**json.loads(pending.bundle), "envelope": envelope})
    assert code(replace(pending, bundle=bundle), key, None) == "not_approved"


def test_a_refusal_needs_no_approval(certificate: Certificate, key: SigningKey) -> None:
    assert certificate.statement["predicate"]["verdict"] == "under_noised"
    verify(certificate.bundle, trusting(key.public))
