"""Revoked for good: in the answers, in the status list, in the log, and for a verifier."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from sqlalchemy import select, text
from sqlalchemy.exc import DatabaseError

from affidavit.certificate import (
    SeenStatus,
    VerificationOptions,
    current_status,
    verify,
)
from affidavit.service.certificates import status_list_signing as lists
from affidavit.service.tables.log import log_entries
from affidavit.trust import VerificationError, read_envelope
from tests.service.certificates.conftest import Company
from tests.service.conftest import ON_SQLITE
from tests.support.trust import trusting


def content(raw: bytes) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(read_envelope(json.loads(raw)).payload)
    return result


def rejected(company: Company, bundle: bytes, status: bytes) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(bundle, trusting(company.trusted), options=VerificationOptions(status=status))
    return caught.value.code


@ON_SQLITE
def test_a_revoked_certificate_verifies_no_more(company: Company, plan: Any) -> None:
    result = company.submit(plan()).json()
    before = company.status()
    verify(
        company.bundle(result),
        trusting(company.trusted),
        options=VerificationOptions(status=before),
    )
    answer = company.revoke("bea", result)
    assert answer.status_code == 201
    stored = answer.json()
    assert (stored["issue"], stored["code"], stored["revoked_by"]) == (1, "plan_error", "token:bea")
    after = company.status()
    assert content(after)["sequence"] == content(before)["sequence"] + 1
    (listed,) = content(after)["listed"]
    assert (
        listed["envelope"] == result["certificate"]["envelope_digest"] == stored["envelope_digest"]
    )
    assert "wrong data set" not in json.dumps(listed)
    assert rejected(company, company.bundle(result), after) == "revoked"
    # The list from before is well signed and not stale; only memory finds it out.
    seen = {"status_seen": {content(after)["issuer"]: SeenStatus(content(after)["sequence"], "x")}}
    with pytest.raises(VerificationError) as caught:
        verify(
            company.bundle(result),
            trusting(company.trusted),
            options=VerificationOptions(status=before, **seen),
        )
    assert caught.value.code == "status_rollback"


@ON_SQLITE
def test_sending_the_plan_again_never_brings_it_back(company: Company, plan: Any) -> None:
    result = company.submit(plan()).json()
    company.revoke("dan", result)
    again = company.submit(plan())
    assert again.status_code == 200
    revoked = again.json()
    assert revoked["verdict"] == "certified"
    assert (revoked["certificate"]["status"], revoked["certificate"]["issue"]) == ("revoked", 1)
    assert company.current(result) == revoked
    (issue,) = company.issues(result)
    assert (issue["status"], issue["revocation"]["reason"]) == ("revoked", "the wrong data set")


def test_only_a_decision_issues_it_again_and_the_old_issue_stays_revoked(
    company: Company, plan: Any
) -> None:
    result = company.submit(plan()).json()
    company.revoke("bea", result)
    where = f"/v1/certificates/{result['certificate']['id']}/issues"
    assert company.ask("ada", "POST", where).status_code == 403
    again = company.ask("bea", "POST", where)
    assert again.status_code == 201
    fresh = again.json()
    assert (fresh["certificate"]["issue"], fresh["certificate"]["status"]) == (2, "active")
    statuses = [(issue["issue"], issue["status"]) for issue in company.issues(result)]
    assert statuses == [(2, "active"), (1, "revoked")]
    status = company.status()
    verify(
        company.bundle(fresh), trusting(company.trusted), options=VerificationOptions(status=status)
    )
    assert rejected(company, company.bundle(result), status) == "revoked"
    # Revoked once more, both are.
    company.revoke("bea", fresh, code="run_error", reason="not as certified")
    listed = {item["issue"]: item["reason"] for item in content(company.status())["listed"]}
    assert listed == {1: "plan_error", 2: "run_error"}


def test_revoking_reaches_every_issue_before(company: Company, pending: dict[str, Any]) -> None:
    company.decide("bea", pending)
    approved = company.decide("cem", pending).json()
    status = company.status()
    assert content(status)["listed"] == []
    # What lacks its approvals never passes, listed or not.
    assert rejected(company, company.bundle(pending), status) == "not_approved"
    company.revoke("dan", approved)
    digests = [item["certificate"]["envelope_digest"] for item in (pending, approved)]
    assert [entry["envelope"] for entry in content(company.status())["listed"]] == digests
    late = company.decide("bea", approved)
    assert (late.status_code, late.json()["code"]) == (409, "not_awaiting_approval")


def test_a_usable_issue_that_was_superseded_is_listed(company: Company, plan: Any) -> None:
    first = company.submit(plan()).json()
    company.change_key()
    second = company.submit(plan()).json()
    status = company.status()
    assert rejected(company, company.bundle(first), status) == "superseded"
    verify(
        company.bundle(second),
        trusting(company.trusted),
        options=VerificationOptions(status=status),
    )


@ON_SQLITE
def test_who_may_revoke_may_revoke_their_own_and_once_is_enough(
    company: Company, plan: Any
) -> None:
    result = company.submit(plan(), "bea").json()
    other = "sha256:" + "0" * 64
    assert company.revoke("bea", result, envelope=other).json()["code"] == "other_envelope"
    assert company.revoke("ada", result).json()["code"] == "missing_scope"
    first = company.revoke("bea", result)
    second = company.revoke("dan", result, code="other", reason="me too")
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.json() == first.json()


def test_revocations_that_race_end_with_one(company: Company, plan: Any) -> None:
    result = company.submit(plan()).json()
    with ThreadPoolExecutor(4) as people:
        answers = list(people.map(lambda who: company.revoke(who, result), ["bea", "dan"] * 2))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert len({answer.text for answer in answers}) == 1


def test_a_revocation_and_its_log_entry_stand_together(company: Company, plan: Any) -> None:
    result = company.submit(plan()).json()
    company.revoke("bea", result)
    with company.engine.connect() as connection:
        query = select(log_entries.c.content).where(log_entries.c.kind == "revocation")
        (entry,) = [json.loads(item) for item in connection.execute(query).scalars()]
    assert (entry["subject"], entry["actor"]) == (result["certificate"]["id"], "token:bea")
    assert entry["body"]["envelope"] == result["certificate"]["envelope_digest"]


@ON_SQLITE
def test_what_is_no_revocation_is_refused_by_field(company: Company) -> None:
    where = f"/v1/certificates/sha256:{'0' * 64}/revocation"
    good = {"code": "other", "reason": "because"}
    for changes, pointer in (
        ({"code": "bad_weather"}, "/code"),
        ({"reason": ""}, "/reason"),
        ({"reason": "\0"}, "/reason"),
        ({"reason": 7}, "/reason"),
        ({"because": "x"}, "/because"),
        ({"envelope": "x"}, "/envelope"),
    ):
        answer = company.ask("bea", "POST", where, {**good, **changes})
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_decision")
        assert [reason["pointer"] for reason in answer.json()["reasons"]] == [pointer]
    assert company.ask("bea", "POST", where, good).status_code == 404


@ON_SQLITE
def test_answers_have_the_documented_shape(
    company: Company, pending: dict[str, Any], openapi: dict[str, Any]
) -> None:
    where = "/v1/certificates/{certificate_id}"

    def fits(method: str, path: str, answer: Any) -> None:
        responses = openapi["paths"][path][method]["responses"]
        schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
        document = {**schema, "components": openapi["components"]}
        Draft202012Validator(document).validate(answer.json())

    issues = where.replace("{certificate_id}", pending["certificate"]["id"]) + "/issues"
    fits("post", f"{where}/approvals", company.decide("bea", pending))
    approved = company.decide("cem", pending)
    fits("post", f"{where}/approvals", approved)
    fits("post", f"{where}/revocation", company.revoke("bea", pending))
    fits("post", f"{where}/revocation", company.revoke("bea", pending))
    fits("post", f"{where}/issues", company.ask("bea", "POST", issues))
    fits("get", f"{where}/issues", company.ask("bea", "GET", issues))
    fits("get", f"{where}/issues/{{issue}}", company.ask("bea", "GET", f"{issues}/1"))
    fits("get", "/v1/status", company.client.get("/v1/status"))


# ---- the status list ---------------------------------------------------------------------


def test_a_list_is_signed_again_when_it_is_old_changed_or_its_key_is(
    company: Company, plan: Any
) -> None:
    result = company.submit(plan()).json()
    created = company.client.app.state.services.status_lists
    now = datetime.now(UTC)
    first = created.at(now)
    assert created.at(now + lists.MAX_LIST_AGE - timedelta(seconds=2)) == first
    second = created.at(now + lists.MAX_LIST_AGE + timedelta(seconds=2))
    assert content(second)["sequence"] == content(first)["sequence"] + 1
    assert content(second)["issuer"] == content(first)["issuer"]
    good = lists.LIST_VALIDITY + lists.MAX_LIST_AGE
    at = now + good - timedelta(seconds=5)
    current_status(second, trusting(company.trusted, at=at), {})
    company.change_key()
    third = created.at(now + lists.MAX_LIST_AGE + timedelta(seconds=3))
    assert content(third)["sequence"] == content(second)["sequence"] + 1
    assert set(content(second)["keys"]) < set(content(third)["keys"])
    company.revoke("bea", result)
    fourth = content(created.at(now + lists.MAX_LIST_AGE + timedelta(seconds=4)))
    assert (fourth["sequence"], len(fourth["listed"])) == (content(third)["sequence"] + 1, 1)


def test_lists_that_are_signed_at_once_are_one(company: Company) -> None:
    with ThreadPoolExecutor(6) as askers:
        result = set(askers.map(lambda _: company.status(), range(6)))
    numbers = [content(raw)["sequence"] for raw in result]
    assert sorted(numbers) == sorted(set(numbers))


def test_a_revoked_issue_is_listed_until_a_day_after_its_validity(
    company: Company, plan: Any
) -> None:
    result = company.submit(plan()).json()
    company.revoke("bea", result)
    created = company.client.app.state.services.status_lists
    ends = datetime.now(UTC) + timedelta(days=365)
    assert content(created.at(ends + lists.LISTED_AFTER - timedelta(minutes=5)))["listed"]
    assert not content(created.at(ends + lists.LISTED_AFTER + timedelta(minutes=5)))["listed"]


# ---- rows that stay ----------------------------------------------------------------------


@pytest.mark.in_both
@pytest.mark.ordinary(
    "sqlite-approvals", "postgresql-status_lists", "sqlite-revocations", "postgresql-certificates"
)
@pytest.mark.parametrize("table", ["approvals", "revocations", "status_lists", "certificates"])
def test_what_was_decided_can_be_neither_changed_nor_removed(
    company: Company, pending: dict[str, Any], table: str
) -> None:
    company.decide("bea", pending)
    company.revoke("dan", pending)
    company.status()
    sqlite = company.engine.dialect.name == "sqlite"
    attacks = [
        f"UPDATE {table} SET untrusted = untrusted",
        f"DELETE FROM {table}",
    ]
    if table == "status_lists":
        attacks[0] = "UPDATE status_lists SET key_id = key_id"
    if sqlite:
        attacks += [
            f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
            f"UPDATE OR REPLACE {table} SET rowid = rowid + 10",
            *(_REPLACING.get(table, ())),
        ]
    else:
        attacks.append(f"TRUNCATE {table} CASCADE")
    with company.engine.connect() as connection:
        before = connection.execute(text(f"SELECT * FROM {table}")).all()
    assert before
    for attack in attacks:
        with company.engine.connect() as connection:
            if sqlite:  # as a stranger's connection, which does not ask for the triggers
                connection.exec_driver_sql("ROLLBACK")
                connection.exec_driver_sql("PRAGMA recursive_triggers=OFF")
                connection.exec_driver_sql("BEGIN")
            with pytest.raises(DatabaseError):
                connection.execute(text(attack))
            connection.rollback()
            if sqlite:
                connection.exec_driver_sql("ROLLBACK")
                connection.exec_driver_sql("PRAGMA recursive_triggers=ON")
                connection.exec_driver_sql("BEGIN")
    with company.engine.connect() as connection:
        assert connection.execute(text(f"SELECT * FROM {table}")).all() == before


_SAME = "certificate_id, untrusted, issue, envelope_digest"
_REPLACING = {
    # A new row under the unique key of the old one, which would vanish without a trace.
    "approvals": [
        f"INSERT OR REPLACE INTO approvals ({_SAME}, decision, approver, at, comment) "
        f"SELECT {_SAME}, decision, approver, at, 'other' FROM approvals"
    ],
    "revocations": [
        f"INSERT OR REPLACE INTO revocations ({_SAME}, code, reason, revoked_by, at) "
        f"SELECT {_SAME}, code, 'other', revoked_by, at FROM revocations"
    ],
    "status_lists": [
        "INSERT INTO status_lists (sequence, issued_at, next_update, content_digest, key_id, "
        "envelope) SELECT sequence - 1, issued_at, next_update, content_digest, key_id, envelope "
        "FROM status_lists WHERE sequence > 1"
        " UNION SELECT 1, issued_at, next_update, content_digest, key_id, envelope "
        "FROM status_lists"
    ],
}
