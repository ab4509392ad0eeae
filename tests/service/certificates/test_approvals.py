"""Four eyes: who may approve what, once, and what the certificate then says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import VerificationOptions, verify
from affidavit.plan import canonical_json
from affidavit.service.audit.audit import audit
from affidavit.service.core.database import snapshot, writer
from affidavit.service.log.entries import append_certificates
from affidavit.service.log.signing_keys import insert_signing_key
from affidavit.service.tables.certificates import certificates
from affidavit.service.tables.log import log_entries, log_pending
from affidavit.trust import (
    SigningKey,
    VerificationError,
    read_envelope,
    sign_envelope,
)
from affidavit.trust.log import LogEntry
from tests.service.certificates.conftest import Company
from tests.service.conftest import ON_SQLITE
from tests.support.trust import trusting

NONE = "sha256:" + "0" * 64


def predicate(result: dict[str, Any]) -> dict[str, Any]:
    envelope = read_envelope(result["certificate"]["bundle"]["envelope"])
    outcome: dict[str, Any] = json.loads(envelope.payload)["predicate"]
    return outcome


def rejected(bundle: bytes, company: Company, **options: Any) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify(bundle, trusting(company.trusted), options=VerificationOptions(**options))
    return caught.value


@ON_SQLITE
def test_what_awaits_approval_is_certified_and_not_usable(
    company: Company, pending: dict[str, Any]
) -> None:
    assert pending["verdict"] == "certified"
    assert pending["certificate"]["status"] == "awaiting_approval"
    assert predicate(pending)["approvals"] == {"required": 2, "given": []}
    error = rejected(company.bundle(pending), company)
    assert (error.step, error.code) == (13, "not_approved")


def test_the_last_approval_signs_the_next_issue_with_all_of_them_in_it(
    company: Company, pending: dict[str, Any]
) -> None:
    first = company.decide("bea", pending, comment="looked at the clipping")
    assert first.status_code == 201
    assert first.json()["certificate"]["status"] == "awaiting_approval"
    second = company.decide("cem", pending)
    assert second.status_code == 201
    result = second.json()
    assert result["certificate"]["id"] == pending["certificate"]["id"]
    assert (result["certificate"]["issue"], result["certificate"]["status"]) == (2, "active")
    stated = predicate(result)
    digest = pending["certificate"]["envelope_digest"]
    assert stated["supersedes"] == digest
    provided = stated["approvals"]["given"]
    assert [item["name"] for item in provided] == ["token:bea", "token:cem"]
    assert {entry["envelope"] for entry in provided} == {digest}
    assert provided[0]["comment"] == "looked at the clipping"
    assert stated["validity"]["not_after"] == predicate(pending)["validity"]["not_after"]
    verified = verify(company.bundle(result), trusting(company.trusted))
    assert verified.predicate["guarantee"] == predicate(pending)["guarantee"]
    assert company.current(pending) == result
    assert company.submit(_plan_of(pending)).json() == result


def _plan_of(result: dict[str, Any]) -> Any:
    return predicate(result)["plan"]


@ON_SQLITE
def test_nothing_but_the_certificate_differs_in_the_answer(
    company: Company, pending: dict[str, Any]
) -> None:
    company.decide("bea", pending)
    result = company.decide("cem", pending).json()
    assert {**result, "certificate": None} == {**pending, "certificate": None}


def test_the_issues_tell_who_decided(company: Company, pending: dict[str, Any]) -> None:
    company.decide("bea", pending)
    company.decide("cem", pending)
    issued, awaiting = company.issues(pending)
    assert (issued["issue"], issued["status"]) == (2, "active")
    assert (awaiting["issue"], awaiting["status"]) == (1, "superseded")
    decisions = awaiting["approvals"]["decisions"]
    assert [decision["approver"] for decision in decisions] == ["token:bea", "token:cem"]
    # The issue in force was signed with them; they name the envelope that was reviewed.
    signed = [
        {**decision, "at": decision["at"][:19]} for decision in issued["approvals"]["decisions"]
    ]
    assert signed == [{**decision, "at": decision["at"][:19]} for decision in decisions]
    assert {item["envelope_digest"] for item in decisions} == {awaiting["envelope_digest"]}
    where = f"/v1/certificates/{pending['certificate']['id']}/issues"
    old = company.ask("eve", "GET", f"{where}/1").json()
    assert old["certificate"]["bundle"] == pending["certificate"]["bundle"]
    assert old["certificate"]["status"] == "superseded"
    assert company.ask("eve", "GET", f"{where}/3").status_code == 404


@pytest.mark.parametrize("asked", ["before", "with"])
def test_nobody_approves_what_they_asked_for(company: Company, plan: Any, asked: str) -> None:
    company.require_approvals(1)
    result = company.submit(plan(), "bea" if asked == "before" else "ada").json()
    company.submit(plan(), "bea")
    answer = company.decide("bea", result)
    assert (answer.status_code, answer.json()["code"]) == (403, "own_request")
    assert company.current(result)["certificate"]["status"] == "awaiting_approval"
    assert company.decide("cem", result).json()["certificate"]["status"] == "active"


def test_nobody_approves_twice(company: Company, pending: dict[str, Any]) -> None:
    assert company.decide("cem", pending).status_code == 201
    again = company.decide("cem", pending)
    assert (again.status_code, again.json()["code"]) == (409, "already_decided")


@ON_SQLITE
def test_an_approval_is_of_the_envelope_that_was_seen(
    company: Company, pending: dict[str, Any]
) -> None:
    answer = company.decide("bea", pending, envelope=NONE)
    assert (answer.status_code, answer.json()["code"]) == (409, "other_envelope")
    company.decide("bea", pending)
    company.decide("cem", pending)
    late = company.decide("bea", pending)
    assert (late.status_code, late.json()["code"]) == (409, "other_envelope")


def test_one_rejection_ends_it_until_somebody_has_it_issued_again(
    company: Company, pending: dict[str, Any]
) -> None:
    company.decide("bea", pending)
    no = company.decide("cem", pending, decision="reject", comment="δ is too large")
    assert no.json()["certificate"]["status"] == "rejected"
    assert company.submit(_plan_of(pending)).json()["certificate"]["status"] == "rejected"
    late = company.decide("bea", pending)
    assert (late.status_code, late.json()["code"]) == (409, "not_awaiting_approval")
    again = company.ask("cem", "POST", f"/v1/certificates/{pending['certificate']['id']}/issues")
    assert again.status_code == 201
    result = again.json()
    assert (result["certificate"]["issue"], result["certificate"]["status"]) == (
        2,
        "awaiting_approval",
    )
    # Who had it issued again asked for it, and cannot be one of those who approve it.
    assert company.decide("cem", result).json()["code"] == "own_request"
    assert company.decide("bea", result).status_code == 201


@ON_SQLITE
def test_what_is_no_decision_is_refused_by_field(company: Company) -> None:
    where = f"/v1/certificates/{NONE}/approvals"
    for document, pointer in (
        ({}, "/envelope"),
        ({"envelope": "sha256:1"}, "/envelope"),
        ({"envelope": NONE, "decision": "maybe"}, "/decision"),
        ({"envelope": NONE, "decision": "reject"}, ""),
        ({"envelope": NONE, "comment": "\0"}, "/comment"),
        ({"envelope": NONE, "comment": "x" * 2001}, "/comment"),
        ({"envelope": NONE, "comments": "x"}, "/comments"),
        ([], ""),
    ):
        answer = company.ask("bea", "POST", where, document)
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_decision")
        assert [reason["pointer"] for reason in answer.json()["reasons"]] == [pointer]
    assert company.ask("bea", "POST", where, {"envelope": NONE}).status_code == 404


@ON_SQLITE
def test_a_verdict_that_nobody_can_use_needs_no_approval(company: Company, plan: Any) -> None:
    company.require_approvals(2)
    result = company.submit(plan(target={"epsilon": 0.01, "delta": 1e-5})).json()
    assert (result["verdict"], result["certificate"]["status"]) == ("under_noised", "active")
    answer = company.decide("bea", result)
    assert (answer.status_code, answer.json()["code"]) == (409, "not_awaiting_approval")


@ON_SQLITE
def test_without_a_token_nobody_approves(company: Company, pending: dict[str, Any]) -> None:
    company.headers["nobody"] = {}
    assert company.decide("nobody", pending).status_code == 401
    assert company.decide("ada", pending).json()["code"] == "missing_scope"


def test_last_approvals_that_race_end_with_one_issue(
    company: Company, pending: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(2) as people:
        answers = list(people.map(lambda who: company.decide(who, pending), ("bea", "cem")))
    assert [answer.status_code for answer in answers] == [201, 201]
    assert [issue["status"] for issue in company.issues(pending)] == ["active", "superseded"]


# ---- the same, refused by the database ---------------------------------------------------


def insert_approval(company: Company, result: dict[str, Any], **changes: Any) -> None:
    row = {
        "certificate_id": result["certificate"]["id"],
        "untrusted": False,
        "issue": 1,
        "envelope_digest": result["certificate"]["envelope_digest"],
        "decision": "approve",
        "approver": "token:cem",
        "at": "2026-01-01 00:00:00+00:00",
        "comment": "",
        **changes,
    }
    names = ", ".join(row)
    places = ", ".join(f":{name}" for name in row)
    with company.engine.begin() as connection:
        connection.execute(text(f"INSERT INTO approvals ({names}) VALUES ({places})"), row)


def test_the_database_refuses_what_the_service_would(
    company: Company, pending: dict[str, Any]
) -> None:
    for changes, message in (
        ({"approver": "token:ada"}, "four eyes"),
        ({"approver": "anonymous@loopback"}, "approvals_by_someone"),
        ({"envelope_digest": NONE}, "awaits no approval"),
        ({"issue": 2}, "awaits no approval"),
        ({"untrusted": True}, "awaits no approval"),
        ({"decision": "perhaps"}, "approvals_decision"),
    ):
        with pytest.raises(IntegrityError, match=message):
            insert_approval(company, pending, **changes)
    insert_approval(company, pending)
    with pytest.raises(IntegrityError, match="has decided"):
        insert_approval(company, pending, comment="again")


def insert_entry(company: Company, result: dict[str, Any], kind: str, *, waits: bool) -> None:
    """An entry like that of ``insert_approval``, whose columns name it an approval anyhow."""
    made = result["certificate"]
    body = {"issue": 1, "envelope": made["envelope_digest"], "decision": "approve", "comment": ""}
    subject, at = made["id"], datetime(2026, 1, 1, tzinfo=UTC)
    entry = LogEntry(kind=kind, subject=subject, actor="token:cem", at=at, body=body)
    row = {"kind": "approval", "subject": subject, "at": at, "content": entry.content.decode()}
    with company.engine.begin() as connection:
        added = insert(log_entries).values(row).returning(log_entries.c.id)
        entry_id = connection.execute(added).scalar_one()
        if waits:
            connection.execute(insert(log_pending).values(entry_id=entry_id))


@pytest.mark.parametrize("entry", [None, ("approval", False), ("run", True)])
def test_an_approval_that_only_the_database_has_issues_nothing(
    company: Company, pending: dict[str, Any], entry: tuple[str, bool] | None
) -> None:
    """Nor one whose entry never gets a place in the tree, or is of something else there."""
    insert_approval(company, pending)
    if entry is not None:
        insert_entry(company, pending, entry[0], waits=entry[1])
    answer = company.decide("bea", pending)
    assert (answer.status_code, answer.json()["code"]) == (503, "log_damaged")
    current = company.current(pending)["certificate"]
    assert (current["issue"], current["status"]) == (1, "awaiting_approval")
    no = company.decide("bea", pending, decision="reject", comment="who is cem?")
    assert no.status_code == 201, no.text


@pytest.mark.parametrize("stranger", [None, SigningKey.generate()])
def test_a_pending_issue_that_nobody_signed_is_not_signed_by_approving_it(
    company: Company, pending: dict[str, Any], stranger: SigningKey | None
) -> None:
    """Else whoever can insert rows, and keys, has the service sign what it never certified."""
    stored = company.client.app.state.services.store.get(pending["certificate"]["id"])
    bundle = json.loads(stored.bundle)
    envelope = read_envelope(bundle["envelope"])
    statement = json.loads(envelope.payload)
    statement["predicate"] |= {"issue": 2, "supersedes": stored.envelope_digest}
    forged = envelope.model_copy(update={"payload": canonical_json(statement)})
    if stranger is not None:
        forged = sign_envelope(forged.payload, stranger)
    bundle |= {"envelope": forged.as_document()}
    result = json.loads(stored.result)
    result["certificate"]["bundle"] = bundle
    row = {column.name: getattr(stored, column.name) for column in certificates.c}
    row |= {"issue": 2, "envelope_digest": forged.digest, "key_id": forged.key_id}
    row |= {"bundle": canonical_json(bundle), "result": json.dumps(result)}
    with writer(company.engine).begin() as connection:
        if stranger is not None:
            insert_signing_key(connection, stranger.public.as_record(), stored.created_at)
        connection.execute(insert(certificates).values(row))
        append_certificates(connection, [row["bundle"]])
    pending["certificate"]["envelope_digest"] = forged.digest
    answer = company.decide("bea", pending)
    assert (answer.status_code, answer.json()["code"]) == (409, "not_genuine"), answer.text
    with snapshot(company.engine) as connection:
        contradicted = [item.message for item in audit(connection, [], (), company.trusted)]
    why = "signature" if stranger is None else "neither the key directory nor a keyset"
    assert any(why in message for message in contradicted), contradicted


def test_a_logged_rejection_is_no_approval_whatever_its_row_says(
    company: Company, pending: dict[str, Any]
) -> None:
    assert company.decide("cem", pending, decision="reject", comment="no").status_code == 201
    with writer(company.engine).begin() as connection:
        if company.engine.dialect.name == "sqlite":
            connection.execute(text("DROP TRIGGER approvals_refuse_update"))
        else:
            connection.execute(text("ALTER TABLE approvals DISABLE TRIGGER ALL"))
        connection.execute(text("UPDATE approvals SET decision = 'approve'"))
    answer = company.decide("bea", pending)
    assert (answer.status_code, answer.json()["code"]) == (503, "log_damaged")


def test_what_nobody_in_particular_asked_for_is_approved_by_nobody(
    company: Company, pending: dict[str, Any]
) -> None:
    """They may be the one who approves; a person who has it issued again is known."""
    identity = pending["certificate"]["id"]
    with company.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO requests (certificate_id, untrusted, issue, requester, received_at, "
                "content_type, body) SELECT certificate_id, untrusted, issue, "
                "'anonymous@loopback', received_at, content_type, body FROM requests"
            )
        )
    answer = company.decide("cem", pending)
    assert (answer.status_code, answer.json()["code"]) == (409, "anonymous_request")
    with pytest.raises(IntegrityError, match="is not known"):
        insert_approval(company, pending)
    assert company.revoke("bea", pending).status_code == 201
    again = company.ask("bea", "POST", f"/v1/certificates/{identity}/issues", {})
    assert again.status_code == 201, again.text
    assert company.decide("cem", again.json()).status_code == 201


def test_a_temporary_table_does_not_hide_who_asked(
    company: Company, pending: dict[str, Any]
) -> None:
    """Another ``requests`` in a session of one's own must not be what the guard looks at."""
    row = (
        f"INSERT INTO approvals (certificate_id, untrusted, issue, envelope_digest, decision, "
        f"approver, at, comment) SELECT id, untrusted, issue, envelope_digest, 'approve', "
        f"'token:ada', created_at, '' FROM certificates WHERE id = '{pending['certificate']['id']}'"
    )
    with company.engine.connect() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE requests AS SELECT 1 AS id WHERE 1 = 0"))
        connection.execute(text("ALTER TABLE requests ADD COLUMN certificate_id TEXT"))
        connection.execute(text("ALTER TABLE requests ADD COLUMN requester TEXT"))
        with pytest.raises(IntegrityError, match="four eyes"):
            connection.execute(text(row))
        connection.rollback()


def test_the_database_refuses_approvals_after_the_end(
    company: Company, pending: dict[str, Any]
) -> None:
    company.decide("bea", pending)
    company.decide("cem", pending)
    with pytest.raises(IntegrityError, match="superseded"):
        insert_approval(company, pending, approver="token:new")


def test_the_database_refuses_an_issue_that_names_approvals_nobody_gave(
    company: Company, pending: dict[str, Any]
) -> None:
    assert pending["certificate"]["issue"] == 1
    copied = (
        "id, untrusted, issue, plan_digest, name, dataset, adjacency, verdict, epsilon_upper, "
        "delta, created_at, key_id, bundle, result, not_after, envelope_digest, "
        "approvals_required, approvals_given"
    )
    forged = copied.replace("issue,", "{issue},").replace("approvals_given", "{given}")
    statement = f"INSERT INTO certificates ({copied}) SELECT {forged} FROM certificates"
    for issue, provided, message in ((2, 2, "more approvals"), (3, 0, "left out")):
        with (
            pytest.raises(IntegrityError, match=message),
            company.engine.begin() as connection,
        ):
            connection.execute(text(statement.format(issue=issue, given=provided)))
