"""A database that is full, damaged or takes no writes: 503, nothing half done, and no traceback."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError

from affidavit.service.audit import readiness
from affidavit.service.core import clock, database
from affidavit.service.identity.scopes import Scope
from affidavit.service.keys import keyring as keys
from affidavit.service.settings import Settings, database_url
from affidavit.trust import KeyStore
from tests.service.operation.log_waiting import until_logged
from tests.support.database_owner import statements

Plan = Callable[..., dict[str, Any]]

LIMITED = {"full": "PRAGMA max_page_count={}", "read-only": "PRAGMA query_only={}"}
READS = ("/v1/certificates", "/certificates", "/", "/v1/log/checkpoint", "/v1/runs", "/metrics")
WRITES: tuple[tuple[str, Any], ...] = (
    ("/v1/ledgers/toy/budget", {"adjacency": "add_remove", "epsilon": 50, "delta": 1e-3}),
    ("/v1/queues/default/claims", {"worker": "w"}),
)


@pytest.fixture
def serving(settings: Settings, client_of: Any, tokens_for: Any) -> Callable[..., Any]:
    """A client of the service with a token for everything, and what it asks with."""

    def serving(url: str, name: str = "all") -> Any:
        KeyStore(settings.key_directory).new("test")
        provided = replace(settings, database_url=url)
        headers = tokens_for(provided, {name: [*Scope]})[name]
        return client_of(provided), {**headers, "content-type": "application/json"}

    return serving


def unavailable(answer: Any) -> bool:
    return (answer.status_code, answer.json().get("code")) == (503, "database_unavailable")


@pytest.mark.parametrize("fault", LIMITED)
def test_what_cannot_be_kept_is_not_answered_and_is_kept_once_it_can_be(
    sqlite_url: str, serving: Any, plan: Plan, fault: str
) -> None:
    app, headers = serving(sqlite_url)
    with app as client:
        engine = client.app.state.services.engine
        pages = [1, 1_000_000]

        def limited(connection: Any, *_: Any) -> None:
            connection.execute(LIMITED[fault].format(pages[0])).close()

        event.listen(engine, "checkout", limited)
        body = json.dumps(plan())
        assert unavailable(client.post("/v1/certificates", content=body, headers=headers))
        assert client.get("/v1/certificates", headers=headers).json()["items"] == []
        pages[0] = 1_000_000 if fault == "full" else 0
        assert client.post("/v1/certificates", content=body, headers=headers).status_code == 201
        until_logged(client.app.state.services)


FULL = """
    CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
    CREATE TRIGGER full_disk AFTER INSERT ON log_pending EXECUTE FUNCTION full_disk();
"""
"""The last row of a change no longer fits: as where a disk fills in the middle of a transaction."""


def test_a_disk_that_fills_in_a_transaction_stops_all_writes_until_there_is_room(
    postgresql_url: str, serving: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, headers = serving(postgresql_url)
    body = json.dumps(plan())
    with app as client:
        statements(postgresql_url, FULL)
        assert unavailable(client.post("/v1/certificates", content=body, headers=headers))
        assert client.get("/v1/certificates", headers=headers).json()["items"] == []
        for path, provided in (("/v1/certificates", plan()), *WRITES[:1]):
            answer = client.post(path, content=json.dumps(provided), headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (503, "writes_suspended"), path
            assert answer.json()["reasons"][0]["code"] == "disk_full"
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"][0]["code"]) == (503, "disk_full")
        assert "affidavit_writes_suspended 1" in client.get("/metrics", headers=headers).text
        statements(postgresql_url, "DROP TRIGGER full_disk ON log_pending")
        later = time.monotonic() + readiness.FULL_SECONDS
        monkeypatch.setattr(readiness, "time", SimpleNamespace(monotonic=lambda: later))
        assert client.post("/v1/certificates", content=body, headers=headers).status_code == 201
        assert client.get("/readyz").status_code == 200
        until_logged(client.app.state.services)


@pytest.mark.parametrize("kept", [0, 4096], ids=["no database", "damaged pages"])
def test_a_damaged_file_is_told_without_a_traceback(
    sqlite_url: str, serving: Any, plan: Plan, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    app, headers = serving(sqlite_url)
    with app as client:
        engine = client.app.state.services.engine
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        engine.dispose()
        path = Path(sqlite_url.removeprefix("sqlite:///"))
        content = path.read_bytes()
        path.write_bytes(content[:kept] + random.Random(kept).randbytes(len(content) - kept))
        for read in READS:
            assert unavailable(client.get(read, headers=headers)), read
        for write, body in (("/v1/certificates", plan()), *WRITES):
            provided = json.dumps(body)
            assert unavailable(client.post(write, content=provided, headers=headers)), write
        page = client.get("/certificates", headers={**headers, "accept": "text/html"})
        assert page.status_code == 503
        assert "database_unavailable" in page.text
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").json()["reasons"][0]["code"] == "database_unavailable"
    assert "the database cannot be used" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_statement_that_no_database_takes_is_a_fault_of_ours(
    sqlite_url: str, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, headers = serving(sqlite_url)
    with app as client:
        wrong = ProgrammingError("SELECT", {}, Exception("no such column"))
        store = type(client.app.state.services.store)

        def fails(*_: Any, **__: Any) -> None:
            raise wrong

        monkeypatch.setattr(store, "get", fails)
        identity = "sha256:" + "0" * 64
        answer = client.get(f"/v1/certificates/{identity}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")


def test_after_a_failover_the_service_goes_on_with_the_primary(
    postgresql_url: str, serving: Any, plan: Plan
) -> None:
    """A server that became a standby keeps its connections, which take no writes any more."""
    app, headers = serving(postgresql_url)
    with app as client:
        engine = client.app.state.services.engine
        body = json.dumps(plan())
        with engine.connect() as connection:
            connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
            connection.commit()
        first = client.post("/v1/certificates", content=body, headers=headers)
        # What writes to the log may have met that connection before.
        assert unavailable(first) or first.status_code == 201
        body = json.dumps(plan(steps=11))
        assert client.post("/v1/certificates", content=body, headers=headers).status_code == 201
        until_logged(client.app.state.services)


def test_what_a_transaction_asks_on_the_way_needs_none_of_the_connections_that_may_wait_for_it(
    postgresql_url: str, serving: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all others wait for what this transaction has locked."""
    monkeypatch.setattr(database, "MAX_CONNECTIONS", 1)
    for module in (clock, keys):  # asked each time
        monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    app, headers = serving(postgresql_url)
    policy = {"schema_version": 1, "name": "strict", "version": 1, "approvals": 1}
    with app as client:
        asked = partial(client.post, headers=headers)
        assert asked("/v1/policies", json={**policy, "datasets": "default"}).status_code == 201
        body = json.dumps(plan())
        made = asked("/v1/certificates", content=body).json()["certificate"]
        assert asked("/v1/certificates", content=body).status_code == 200
        approver = {**headers, **serving(postgresql_url, "second")[1]}
        decision = {"envelope": made["envelope_digest"]}
        answer = client.post(
            f"/v1/certificates/{made['id']}/approvals", json=decision, headers=approver
        )
        assert answer.status_code == 201, answer.text
        until_logged(client.app.state.services)


@pytest.mark.parametrize("stored", [False, True])
def test_a_connection_that_breaks_at_the_commit_does_not_say_what_was_stored(
    postgresql_url: str, serving: Any, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    app, headers = serving(postgresql_url)
    headers["idempotency-key"] = "once"
    path, budget = WRITES[0]
    with app as client:
        dialect = client.app.state.services.engine.dialect

        def breaks(connection: Any) -> None:
            if stored:
                connection.commit()
            connection.driver_connection.close()
            raise dialect.loaded_dbapi.OperationalError("server closed the connection")

        with monkeypatch.context() as patch:
            patch.setattr(dialect, "do_commit", breaks)
            answer = client.post(path, json=budget, headers=headers)
        assert unavailable(answer)
        assert "may be stored or not" in answer.json()["detail"]
        again = client.post(path, json=budget, headers=headers)
        assert again.status_code == (200 if stored else 201), again.text
        assert again.json()["budget"]["version"] == 1
        until_logged(client.app.state.services)


def test_a_standby_is_not_ready(postgresql_url: str, serving: Any) -> None:
    app, _ = serving(postgresql_url)
    name = postgresql_url.rpartition("/")[2]
    with app as client:
        assert client.get("/readyz").status_code == 200
        statements(
            postgresql_url, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'
        )
        client.app.state.services.engine.dispose()
        answer = client.get("/readyz")
        assert answer.status_code == 503
        (reason,) = answer.json()["reasons"]
        assert reason["code"] == "database_read_only"
        assert client.get("/livez").status_code == 200


def test_of_several_hosts_the_one_that_takes_writes_is_used(
    postgresql_url: str, serving: Any
) -> None:
    result = make_url(postgresql_url)
    hosts = [f"127.0.0.1:{port}" for port in (1, result.port)]  # nobody is at the first
    query = {"host": hosts, "target_session_attrs": "read-write"}
    url = result.set(host=None, port=None, query=query).render_as_string(hide_password=False)
    app, _ = serving(database_url(url.replace("+psycopg", "")))
    with app as client:
        assert client.get("/readyz").status_code == 200
