"""Waivers over HTTP: granted by another, visible, ended by time or by a person, and logged."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from affidavit.certificate.policy import open_document
from affidavit.service.audit.audit import AuditFinding, audit
from affidavit.service.core.database import snapshot
from affidavit.trust import KeyStore, format_instant
from tests.service.conftest import ON_SQLITE

Document = Callable[..., dict[str, Any]]


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def predicate(answer: Any) -> dict[str, Any]:
    payload = answer.json()["certificate"]["bundle"]["envelope"]["payload"]
    result: dict[str, Any] = json.loads(base64.b64decode(payload))["predicate"]
    return result


def status(house: Any, answer: Any) -> str:
    result: str = house.ask("sam", "GET", answer.headers["location"]).json()["certificate"][
        "status"
    ]
    return result


def stop_clock(house: Any, monkeypatch: pytest.MonkeyPatch, at: datetime) -> None:
    """Let the database's time, and this machine's, be ``at``."""
    clock = house.client.app.state.services.clock
    monkeypatch.setattr(clock, "now", lambda: at)
    monkeypatch.setattr(clock, "_wall", lambda: at)


def test_a_waiver_lets_one_reason_pass_and_is_seen(
    house: Any, plan: Document, in_days: Callable[[float], str]
) -> None:
    house.activate(epsilon_cap=0.5)
    refused = house.submit("sam", plan())
    granted = house.waive()
    assert granted.status_code == 201
    waiver = granted.json()
    assert (waiver["status"], waiver["revoked"]) == ("in_force", None)
    assert waiver["waiver"]["created_by"] == "token:amy"
    (public,) = KeyStore(house.settings.key_directory).public_keys()
    assert (
        open_document("waiver", json.dumps(waiver["envelope"]).encode(), public) == waiver["waiver"]
    )

    passed = house.submit("sam", plan())
    assert (refused.json()["verdict"], passed.json()["verdict"]) == ("refused", "certified")
    assert passed.json()["certificate"]["id"] != refused.json()["certificate"]["id"]
    (seen,) = passed.json()["waived"]
    assert (seen["code"], seen["waiver"]["id"]) == ("policy_epsilon_cap", waiver["id"])
    stated = predicate(passed)
    assert stated["waived"] == [seen]
    assert stated["validity"]["not_after"] == waiver["waiver"]["expires_at"] <= in_days(30)
    assert house.submit("sue", plan()).content == passed.content
    assert house.ask("ann", "GET", f"/v1/waivers/{waiver['id']}").json() == waiver
    assert house.ask("sam", "GET", "/v1/waivers").json() == {"items": [waiver], "next": None}
    (entry,) = house.entries("waiver")
    assert (entry["subject"], entry["actor"]) == (waiver["id"], "token:amy")
    assert entry["body"]["waiver"] == waiver["waiver"]


def test_a_revoked_waiver_takes_its_certificates_along(house: Any, plan: Document) -> None:
    house.activate(epsilon_cap=0.5)
    refused = house.submit("sam", plan())
    waiver = house.waive().json()
    passed = house.submit("sam", plan())
    elsewhere = house.submit("sam", plan(dataset={"name": "other", "size": 1000}))
    path = f"/v1/waivers/{waiver['id']}"

    assert code(house.ask("amy", "DELETE", path)) == (422, "invalid_parameter")
    ended = house.ask("pat", "DELETE", f"{path}?reason=over")
    assert ended.status_code == 200
    assert ended.json()["status"] == "revoked"
    assert ended.json()["revoked"]["by"] == "token:pat"
    assert status(house, passed) == "revoked"
    assert (status(house, refused), status(house, elsewhere)) == ("active", "active")
    assert house.submit("sam", plan()).content == refused.content

    again = house.ask("amy", "DELETE", f"{path}?reason=again")
    assert again.json() == ended.json()
    granted, revoked = house.entries("waiver")
    assert (granted["body"]["event"], revoked["body"]["event"]) == ("granted", "revoked")
    assert revoked["body"]["certificates"] == [passed.json()["certificate"]["id"]]
    (withdrawn,) = house.entries("revocation")
    assert withdrawn["subject"] == passed.json()["certificate"]["id"]
    assert waiver["id"] in withdrawn["body"]["reason"]
    assert code(house.ask("amy", "DELETE", f"/v1/waivers/sha256:{'0' * 64}?reason=x")) == (
        404,
        "not_found",
    )


@ON_SQLITE
def test_an_expired_waiver_helps_no_more(
    house: Any, plan: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.activate(epsilon_cap=0.5)
    house.waive()
    assert house.submit("sam", plan()).json()["verdict"] == "certified"

    store, later = house.client.app.state.services.policies, datetime.now(UTC) + timedelta(days=31)
    monkeypatch.setattr(store, "_now", lambda: later)
    store._last.clear()
    assert house.submit("sam", plan()).json()["verdict"] == "refused"


HELPLESS: list[dict[str, Any]] = [
    {"rule": "policy_adjacency"},
    {"rule": "policy_sampler"},
    {"dataset": ..., "plan_digest": "sha256:" + "1" * 64},
]


@ON_SQLITE
def test_a_waiver_of_another_rule_or_plan_does_not_help(house: Any, plan: Document) -> None:
    house.activate(epsilon_cap=0.5, datasets=["toy", "other"])
    for changes in (*HELPLESS, {"dataset": "other"}):
        assert house.waive(**changes).status_code == 201
    result = house.submit("sam", plan()).json()
    assert (result["verdict"], result["waived"]) == ("refused", [])


@ON_SQLITE
def test_a_waiver_ends_with_the_version_that_it_was_granted_against(
    house: Any, plan: Document
) -> None:
    house.activate(epsilon_cap=0.5)
    house.waive()
    assert house.submit("sam", plan()).json()["verdict"] == "certified"
    house.activate(version=2, epsilon_cap=0.4)
    assert house.submit("sam", plan()).json()["verdict"] == "refused"


# ---- four eyes -----------------------------------------------------------------------------


def test_nobody_waives_for_a_plan_they_asked_for_or_where_they_are_the_owner(
    house: Any, plan: Document
) -> None:
    house.activate(epsilon_cap=0.5)
    mine = house.submit("pat", plan()).json()["plan_digest"]
    about = {"dataset": ..., "plan_digest": mine}
    assert code(house.waive("pat", **about)) == (403, "four_eyes")
    for owner in ("token:amy", "amy"):
        assert code(house.waive("amy", owner=owner)) == (403, "four_eyes")
    assert house.entries("waiver") == []
    assert house.waive("amy", **about).status_code == 201
    assert house.submit("pat", plan()).json()["verdict"] == "certified"


def test_a_waiver_does_not_help_its_granter_with_a_plan_sent_later(
    house: Any, plan: Document
) -> None:
    """For a data set, or for a plan that nobody had sent when it was granted."""
    house.activate(epsilon_cap=0.5)
    assert house.waive("pat").status_code == 201
    assert house.submit("pat", plan()).json()["verdict"] == "refused"
    others = house.submit("sam", plan())
    assert others.json()["verdict"] == "certified"
    again = house.submit("pat", plan())
    assert again.json()["verdict"] == "refused"
    assert again.json()["certificate"]["id"] != others.json()["certificate"]["id"]


def test_who_asked_for_a_plan_does_not_approve_what_their_waiver_had_certified(
    house: Any, plan: Document
) -> None:
    """Somebody else's request is another certificate, because it rests on the waiver."""
    house.activate(epsilon_cap=0.5, approvals=1)
    assert house.submit("pat", plan()).json()["verdict"] == "refused"
    assert house.waive("pat").status_code == 201
    result = house.submit("sam", plan()).json()["certificate"]
    path = f"/v1/certificates/{result['id']}/approvals"
    seen = {"envelope": result["envelope_digest"]}
    assert code(house.ask("pat", "POST", path, seen)) == (403, "own_request")
    approved = house.ask("amy", "POST", path, seen)
    assert approved.json()["certificate"]["status"] == "active"


def test_the_database_itself_keeps_owner_and_granter_apart(house: Any) -> None:
    house.activate(epsilon_cap=0.5)
    house.waive()
    others = "envelope, key_id, created_by, created_at, expires_at"
    statement = (
        f"INSERT INTO waivers (waiver_id, owner, {others}) SELECT 'x', created_by, {others} "
        "FROM waivers"
    )
    with pytest.raises(DatabaseError), house.engine.begin() as connection:
        connection.execute(text(statement))


# ---- what cannot be waived, and hostile requests -------------------------------------------

WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"rule": "under_noised"}, 400, "malformed_waiver"),
    ({"rule": "policy_budget"}, 400, "malformed_waiver"),
    ({"rule": "policy_dataset"}, 400, "malformed_waiver"),
    ({"rule": ["policy_epsilon_cap"]}, 400, "malformed_waiver"),
    ({"plan_digest": "sha256:" + "1" * 64}, 400, "malformed_waiver"),
    ({"dataset": ...}, 400, "malformed_waiver"),
    ({"owner": ""}, 400, "malformed_waiver"),
    ({"owner": "o\x00"}, 400, "malformed_waiver"),
    ({"reason": "\ud800"}, 400, "malformed_waiver"),
    ({"reason": ...}, 400, "malformed_waiver"),
    ({"expires_at": "tomorrow"}, 400, "malformed_waiver"),
    ({"created_by": "token:sam"}, 400, "malformed_waiver"),
    ({"expires_at": "2020-01-01T00:00:00Z"}, 409, "waiver_expiry"),
    ({"expires_at": "9999-01-01T00:00:00Z"}, 409, "waiver_expiry"),
    ({"policy": "none"}, 409, "no_policy"),
    ({"policy": "default"}, 409, "no_policy"),
    ({"dataset": "other"}, 409, "other_policy"),
]


@ON_SQLITE
def test_a_waiver_that_cannot_be_is_refused_and_nothing_is_kept(house: Any) -> None:
    house.activate(epsilon_cap=0.5)
    for changes, expected, name in WRONG:
        answer = house.waive(**changes)
        assert code(answer) == (expected, name), changes
        assert answer.json()["reasons"][0]["remedy"]
    assert code(house.ask("amy", "POST", "/v1/waivers", b"[]")) == (400, "malformed_waiver")
    yaml = {"content-type": "application/yaml"}
    assert house.ask("amy", "POST", "/v1/waivers", b"", headers=yaml).status_code == 415
    assert house.entries("waiver") == []
    assert house.ask("sam", "GET", "/v1/waivers").json() == {"items": [], "next": None}


def test_a_waiver_granted_twice_in_a_second_is_one(
    house: Any, monkeypatch: pytest.MonkeyPatch, in_days: Callable[[float], str]
) -> None:
    house.activate(epsilon_cap=0.5)
    stop_clock(house, monkeypatch, datetime.now(UTC))
    until = in_days(30)
    first, second = house.waive(expires_at=until), house.waive(expires_at=until)
    assert (second.status_code, second.json()) == (201, first.json())
    assert len(house.entries("waiver")) == 1


def test_a_waiver_granted_to_two_teams_in_a_second_is_of_the_first(
    house: Any, monkeypatch: pytest.MonkeyPatch, in_days: Callable[[float], str]
) -> None:
    house.activate(epsilon_cap=0.5)
    moment, until = datetime.now(UTC), in_days(30)
    stop_clock(house, monkeypatch, moment)
    assert house.waive(expires_at=until, team="vision").status_code == 201
    again = house.waive(expires_at=until, team="text")
    assert code(again) == (409, "granted_to_another_team")
    stop_clock(house, monkeypatch, moment + timedelta(seconds=1))
    assert house.waive(expires_at=until, team="text").status_code == 201
    assert len(house.entries("waiver")) == 2


def test_a_waiver_row_that_was_changed_is_noticed(house: Any, plan: Document) -> None:
    house.activate(epsilon_cap=0.5)
    granted = house.waive().json()
    created = granted["waiver"]
    for column, value in (("expires_at", format_instant(datetime.now(UTC) + timedelta(days=300))),
                          ("created_by", "token:sue")):  # fmt: skip
        stored = created[column]
        house.tamper("waivers", f"UPDATE waivers SET {column} = :v", v=_of(house, column, value))
        house.restarted()
        answer = house.ask("sam", "POST", "/v1/certificates", plan())
        assert code(answer) == (503, "policy_altered")
        assert any("the waiver" in finding.message for finding in audit_findings(house))
        house.tamper("waivers", f"UPDATE waivers SET {column} = :v", v=_of(house, column, stored))
    house.restarted()
    assert house.submit("sam", plan()).json()["verdict"] == "certified"
    assert audit_findings(house) == []
    house.tamper("waiver_uses", "DELETE FROM waiver_uses")
    assert ["waiver_uses" in finding.message for finding in audit_findings(house)] == [True]
    assert house.ask("amy", "DELETE", f"/v1/waivers/{granted['id']}?reason=x").is_success
    house.tamper("waiver_revocations", "DELETE FROM waiver_revocations")
    house.restarted()
    for method, path, body in (("POST", "/v1/certificates", plan()), ("GET", "/v1/waivers", None)):
        assert code(house.ask("sam", method, path, body)) == (503, "policy_altered")


def audit_findings(house: Any) -> list[AuditFinding]:
    with snapshot(house.engine) as connection:
        return list(audit(connection, []))


def _of(house: Any, column: str, value: str) -> Any:
    """A value as raw SQL of either database takes it."""
    if not column.endswith("_at"):
        return value
    moment = datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return (
        moment.strftime("%Y-%m-%d %H:%M:%S.%f") if house.engine.dialect.name == "sqlite" else moment
    )
