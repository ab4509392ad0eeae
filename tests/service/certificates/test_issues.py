"""Expired, issued again, superseded: issues follow one another and none is ever lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select

from affidavit.certificate import verify
from affidavit.service.certificates.store import CertificateStore, ConcurrentUpdate
from affidavit.service.core.database import open_engine
from affidavit.service.core.wire_models import Status
from affidavit.service.tables.certificates import certificates, requests
from affidavit.service.tables.log import log_entries
from affidavit.trust import VerificationError, read_envelope
from tests.service.certificates.conftest import Company
from tests.service.certificates.test_certificate_store import KEY, REQUEST, certificate
from tests.service.conftest import ON_SQLITE
from tests.support.trust import trusting

YEAR = timedelta(days=366)


@pytest.fixture
def a_year_later(company: Company, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the service's clock be a year ahead from when it is called."""

    services = company.client.app.state.services
    now = services.keyring.now

    def later(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> Any:
        statement = statement.replace("'now')", f"'now', '{YEAR.days} days')")
        year = f"statement_timestamp() + interval '{YEAR.days} days'"
        return statement.replace("statement_timestamp()", year), parameters

    def go() -> None:
        event.listen(services.engine, "before_cursor_execute", later, retval=True)
        monkeypatch.setattr(services.keyring, "now", lambda: now() + YEAR)

    return go


def predicate(result: dict[str, Any]) -> dict[str, Any]:
    envelope = read_envelope(result["certificate"]["bundle"]["envelope"])
    outcome: dict[str, Any] = json.loads(envelope.payload)["predicate"]
    return outcome


def test_an_expired_certificate_is_issued_again_when_its_plan_is_sent(
    company: Company, plan: Any, a_year_later: Any
) -> None:
    first = company.submit(plan())
    a_year_later()
    old = company.current(first.json())
    assert old["certificate"]["status"] == "expired"
    again = company.submit(plan())
    assert (first.status_code, again.status_code) == (201, 201)
    result = again.json()
    assert result["certificate"]["id"] == first.json()["certificate"]["id"]
    assert (result["certificate"]["issue"], result["certificate"]["status"]) == (2, "active")
    stated = predicate(result)
    assert (stated["issue"], stated["supersedes"]) == (
        2,
        first.json()["certificate"]["envelope_digest"],
    )
    assert company.submit(plan()).status_code == 200
    assert company.current(result) == result
    statuses = [(issue["issue"], issue["status"]) for issue in company.issues(result)]
    assert statuses == [(2, "active"), (1, "superseded")]
    with company.engine.connect() as connection:
        query = select(log_entries.c.content).where(log_entries.c.kind == "certificate")
        rows = connection.execute(query.order_by(log_entries.c.id)).scalars()
        logged = [json.loads(item)["body"] for item in rows]
    digest = first.json()["certificate"]["envelope_digest"]
    assert [entry.get("supersedes") for entry in logged] == [None, digest]
    with pytest.raises(VerificationError, match="expired"):
        verify(company.bundle(old), trusting(company.trusted, at=datetime.now(UTC) + YEAR))
    verify(company.bundle(result), trusting(company.trusted, at=datetime.now(UTC) + YEAR))


def test_the_list_shows_current_issues_by_their_status(
    company: Company, plan: Any, a_year_later: Any
) -> None:
    result = company.submit(plan()).json()
    other = company.submit(plan(steps=11)).json()
    a_year_later()
    company.submit(plan())
    where = "/v1/certificates"
    shown = company.ask("eve", "GET", where).json()["items"]
    assert [(item["id"], item["issue"], item["status"]) for item in shown] == [
        (result["certificate"]["id"], 2, "active"),
        (other["certificate"]["id"], 1, "expired"),
    ]
    for status, ids in (("active", [result]), ("expired", [other]), ("revoked", [])):
        outcome = company.ask("eve", "GET", f"{where}?status={status}").json()["items"]
        assert [entry["id"] for entry in outcome] == [
            element["certificate"]["id"] for element in ids
        ]
    assert company.ask("eve", "GET", f"{where}?status=lost").status_code == 422


def test_a_certificate_whose_key_was_revoked_is_issued_again(company: Company, plan: Any) -> None:
    first = company.submit(plan()).json()
    bad = company.change_key()
    again = company.submit(plan())
    assert again.status_code == 201
    assert predicate(again.json())["supersedes"] == first["certificate"]["envelope_digest"]
    assert [issue["key_id"] == bad for issue in company.issues(first)] == [False, True]
    assert company.submit(plan()).status_code == 200


@ON_SQLITE
def test_what_a_clock_dated_ahead_is_issued_again_once_it_is_right(
    company: Company, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = company.client.app.state.services.keyring
    now = keyring.now
    with monkeypatch.context() as patch:
        patch.setattr(keyring, "now", lambda: now() + timedelta(hours=12))
        ahead = company.submit(plan())
    with pytest.raises(VerificationError, match="not valid yet"):
        verify(company.bundle(ahead.json()), trusting(company.trusted))
    again = company.submit(plan())
    assert (ahead.status_code, again.status_code) == (201, 201)
    assert again.json()["certificate"]["issue"] == 2
    verify(company.bundle(again.json()), trusting(company.trusted))
    assert company.submit(plan()).status_code == 200


def test_a_good_certificate_is_not_issued_again(company: Company, plan: Any) -> None:
    result = company.submit(plan()).json()
    where = f"/v1/certificates/{result['certificate']['id']}/issues"
    answer = company.ask("bea", "POST", where)
    assert (answer.status_code, answer.json()["code"]) == (409, "still_valid")
    unknown = "/v1/certificates/sha256:" + "0" * 64
    assert company.ask("bea", "POST", f"{unknown}/issues").status_code == 404
    assert company.ask("bea", "GET", f"{unknown}/issues").status_code == 404


# ---- the store -------------------------------------------------------------------------


def old(number: int = 0, **changes: Any) -> Any:
    past = datetime(2025, 6, 1, tzinfo=UTC)
    return certificate(number, not_after=past, **changes)


def test_eight_that_issue_again_at_once_end_with_one_more_issue(
    database_url: str, engine: Engine
) -> None:
    store = CertificateStore(engine)
    former = old()
    store.add(former, KEY, REQUEST)
    assert store.repeat(former.id, REQUEST, untrusted_too=False) is None
    engines, together = [open_engine(database_url) for _ in range(8)], Barrier(8)

    def again(number: int) -> Any:
        mine = certificate(issue=2, requester=str(number))
        together.wait()
        return CertificateStore(engines[number]).add(mine, KEY, REQUEST)

    try:
        with ThreadPoolExecutor(8) as racers:
            outcomes = list(racers.map(again, range(8)))
    finally:
        for item in engines:
            item.dispose()
    assert sorted(created for _, created in outcomes) == [False] * 7 + [True]
    assert len({stored.result for stored, _ in outcomes}) == 1
    with engine.connect() as connection:
        counted = [
            connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in (certificates, requests)
        ]
    assert counted == [2, 9]
    earlier = replace(former, status=Status.SUPERSEDED)
    assert store.issues(former.id) == [outcomes[0][0], earlier]


def test_each_request_is_kept_with_the_issue_that_answered_it(engine: Engine) -> None:
    store = CertificateStore(engine)
    store.add(old(), KEY, REQUEST)
    store.add(certificate(issue=2), KEY, REQUEST)
    store.repeat(certificate().id, REQUEST, untrusted_too=False)
    with engine.connect() as connection:
        answered = connection.execute(select(requests.c.issue).order_by(requests.c.id)).scalars()
        assert list(answered) == [1, 2, 2]
    assert [item.issue for item in store.page(None, 10)[0]] == [2]


def test_an_issue_follows_the_current_one_and_leaves_none_out(engine: Engine) -> None:
    store = CertificateStore(engine)
    store.add(old(), KEY, REQUEST)
    for number in (1, 3):
        with pytest.raises(ConcurrentUpdate):
            store.add(certificate(issue=number), KEY, REQUEST)
    assert [issue.issue for issue in store.issues(old().id)] == [1]
