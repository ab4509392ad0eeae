"""A service that knows of damage spends nothing and signs nothing, and says why."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import DatabaseError

from affidavit.service.audit import readiness
from affidavit.service.audit.audit import audit
from affidavit.service.core.database import (
    TIMEOUTS,
    hold,
    open_engine,
    snapshot,
    writer,
)
from affidavit.service.ledger.integrity import state_digest
from affidavit.service.operation.database_admin import upgrade
from affidavit.service.settings import Settings
from affidavit.service.tables.certificates import certificates
from affidavit.trust import (
    KeyStore,
    SigningKey,
    read_envelope,
    sign_envelope,
)
from tests.service.conftest import EACH_SCOPE, ON_SQLITE, ONCE
from tests.support.polling import wait_until

BUDGET = {"adjacency": "add_remove", "epsilon": 8, "delta": 1e-4}


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    KeyStore(tmp_path / "keys").new("test")
    return Settings(
        database_url=database_url,
        key_directory=tmp_path / "keys",
        workers=1,
        loopback=True,
        comparison_seconds=0,
    )


@pytest.fixture
def ask(settings: Settings, client_of: Any, tokens_for: Any) -> Iterator[Any]:
    """Ask as the holder of a scope; each request looks at the database anew."""
    headers = tokens_for(settings, EACH_SCOPE)
    with client_of(settings) as client:

        def ask(method: str, path: str, who: str, body: Any = None) -> Any:
            return client.request(method, path, headers=headers[who], json=body)

        ask.services = client.app.state.services  # type: ignore[attr-defined]
        yield ask


def own(ask: Any, *statements: str) -> None:
    """What the owner of the database can do: take the triggers off, and write."""
    engine = writer(ask.services.engine)
    if engine.dialect.name == "postgresql":
        logged = ("log_checkpoints", "log_entries", "log_nodes", "log_leaves")
        for table in ("ledgers", "ledger_events", "reservations", "runs", *logged):
            with engine.begin() as connection:  # one lock at a time: the log is written meanwhile
                connection.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER ALL"))
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            query = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
            for name in connection.execute(text(query)).scalars().all():
                connection.execute(text(f"DROP TRIGGER {name}"))
        for statement in statements:
            connection.execute(text(statement))


def reserved(ask: Any, plan: Any) -> tuple[str, str]:
    """A certificate and a reservation for it."""
    assert ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET).status_code == 201
    made = ask("POST", "/v1/certificates", "submit", plan()).json()["certificate"]["id"]
    reservation = ask("POST", "/v1/ledgers/toy/reservations", "submit", {"certificate": made})
    assert reservation.status_code == 201, reservation.text
    return made, reservation.json()["id"]


def refused(ask: Any, plan: Any, made: str, reservation: str, code: str) -> None:
    """Whatever spends or signs is refused for that reason, and the probe says so."""
    ready = ask("GET", "/readyz", "audit")
    assert (ready.status_code, ready.json()["reasons"][0]["code"]) == (503, code)
    run = {"certificate": made, "data": "digits", "model": "mlp:8", "output": "o"}
    for who, path, body in (
        ("submit", "/v1/certificates", plan(steps=2)),
        ("submit", "/v1/ledgers/toy/reservations", {"certificate": made}),
        ("submit", "/v1/runs", run),
        ("work", f"/v1/reservations/{reservation}/commit", {}),
        ("submit", f"/v1/reservations/{reservation}/release", {}),
        ("admin", "/v1/ledgers/toy/budget", {**BUDGET, "epsilon": 80}),
        ("work", "/v1/queues/default/claims", {"worker": "w"}),
    ):
        answer = ask("POST", path, who, body)
        assert (answer.status_code, answer.json()["code"]) == (503, "writes_suspended"), path
        assert answer.json()["reasons"][0]["code"] == code
    assert ask("GET", "/v1/status", "audit").status_code == 503
    assert ask("GET", f"/v1/certificates/{made}", "audit").status_code == 200
    assert ask("GET", "/metrics", "audit").text.count("affidavit_writes_suspended 1.0") == 1


SPENT = "SELECT seq, state FROM ledger_events WHERE seq = (SELECT max(seq) FROM ledger_events)"


@pytest.mark.parametrize("with_an_entry", [False, True])
def test_a_ledger_whose_spending_was_rewritten_admits_nothing(
    ask: Any, plan: Any, *, with_an_entry: bool
) -> None:
    """Nor with an entry that says the same, but never gets a place in the log's tree."""
    made, reservation = reserved(ask, plan)
    with ask.services.engine.connect() as connection:
        seq, state = connection.execute(text(SPENT)).one()
        query = text("SELECT state FROM ledger_events WHERE seq = 1")
        unspent = json.loads(connection.execute(query).scalar_one())
    altered = json.dumps({**json.loads(state), "spent": unspent["spent"]}, sort_keys=True)
    digests = f"'{state_digest(state)}', '{state_digest(altered)}'"
    statements = [f"UPDATE ledger_events SET state = '{altered}' WHERE seq = {seq}"]
    if with_an_entry:
        statements += [
            f"UPDATE ledger_events SET body = REPLACE(body, {digests}) WHERE seq = {seq}",
            "INSERT INTO log_entries (kind, subject, at, content) SELECT kind, subject, at, "
            f"REPLACE(content, {digests}) FROM log_entries WHERE subject = '{reservation}'",
        ]
    own(ask, *(statement.replace(":", "\\:") for statement in statements))
    refused(ask, plan, made, reservation, "ledger_altered")


@ON_SQLITE
def test_a_budget_is_what_was_logged_of_its_filter_and_its_reservations(
    ask: Any, plan: Any
) -> None:
    """Releasing a reservation whose cost was raised would free what other runs spent."""
    made, reservation = reserved(ask, plan)
    path = f"/v1/reservations/{reservation}/release"
    query = text("SELECT cost FROM reservations")
    with ask.services.engine.connect() as connection:
        cost = connection.execute(query).scalar_one()
    own(ask, f"UPDATE reservations SET cost = '{cost.replace('0.', '9.')}'".replace(":", "\\:"))
    answer = ask("POST", path, "submit", {})
    assert (answer.status_code, answer.json()["code"]) == (503, "ledger_altered"), answer.text
    own(ask, f"UPDATE reservations SET cost = '{cost}'".replace(":", "\\:"))
    own(ask, "UPDATE ledgers SET filter = REPLACE(filter, '0.5', '0.75')")
    refused(ask, plan, made, reservation, "ledger_altered")


def test_reservations_and_runs_are_of_what_was_logged(ask: Any, plan: Any) -> None:
    """A cheap reservation is not made one of another certificate, nor a run one of other data."""
    made, reservation = reserved(ask, plan)
    run = {"certificate": made, "data": "digits", "model": "mlp:8", "output": "o"}
    run["reservation"] = reservation
    assert ask("POST", "/v1/runs", "submit", run).status_code == 201
    by_hand = ask("POST", "/v1/ledgers/toy/reservations", "submit", {"certificate": made}).json()
    path = f"/v1/reservations/{by_hand['id']}"
    assert ask("POST", f"{path}/commit", "work", {}).is_success
    steps = by_hand["steps"]["certified"]
    assert ask("POST", f"{path}/settle", "work", {"steps_run": steps}).is_success
    for change, found in (
        ("runs SET request = REPLACE(request, 'digits', 'others')", "['request']"),
        ("runs SET requested_by = 'token:other'", "'requested_by'"),
        ("runs SET plan_digest = 'of another'", "'plan_digest'"),
        ("ledger_events SET steps_run = 0 WHERE kind = 'settle'", "settled steps"),
        ("ledgers SET filter = REPLACE(filter, '0.5', '0.75')", "filter_differs"),
        ("reservations SET plan_digest = 'of another'", "reservation_differs"),
    ):
        own(ask, f"UPDATE {change}")
        with snapshot(ask.services.engine) as connection:
            messages = [finding.message for finding in audit(connection, [])]
        assert any(found in message for message in messages)


@ON_SQLITE
def test_what_nobody_signed_is_not_shown(ask: Any, plan: Any) -> None:
    """Whoever can write to the database has nobody read what they wrote of a certificate."""
    made = ask("POST", "/v1/certificates", "submit", plan()).json()["certificate"]["id"]
    for column, forged in (
        ("verdict", "'refused'"),
        ("epsilon_upper", "epsilon_upper / 2"),
        ("not_after", "'2999-01-01'"),
        ("result", "replace(result, 'certified', 'approved')"),
    ):
        row = select(certificates).where(certificates.c.id == made)
        with ask.services.engine.connect() as connection:
            was = connection.execute(row).mappings().one()[column]
        own(ask, f"UPDATE certificates SET {column} = {forged}")
        for method, path in (("GET", ""), ("GET", "/issues"), ("GET", "/bundle")):
            answer = ask(method, f"/v1/certificates/{made}{path}", "audit")
            assert (answer.status_code, answer.json()["code"]) == (409, "not_genuine"), answer.text
        again = ask("POST", "/v1/certificates", "submit", plan())
        assert (again.status_code, again.json()["code"]) == (409, "not_genuine"), again.text
        with writer(ask.services.engine).begin() as connection:
            connection.execute(certificates.update().values({column: was}))
        assert ask("GET", f"/v1/certificates/{made}", "audit").status_code == 200


@ON_SQLITE
def test_no_status_list_lacks_a_revocation_that_was_logged(ask: Any, plan: Any) -> None:
    made = ask("POST", "/v1/certificates", "submit", plan()).json()["certificate"]["id"]
    why = {"code": "plan_error", "reason": "oops"}
    assert ask("POST", f"/v1/certificates/{made}/revocation", "approve", why).status_code == 201
    assert ask("GET", "/v1/status", "audit").status_code == 200
    ask.services.safety._seconds = ONCE
    own(ask, "DELETE FROM revocations")
    for path in ("/v1/status", f"/v1/certificates/{made}/issues"):
        answer = ask("GET", path, "audit")
        assert (answer.status_code, answer.json()["code"]) == (503, "log_damaged")


def test_an_issue_that_was_not_logged_spends_nothing(ask: Any, plan: Any) -> None:
    """Whoever can insert rows can sign one with a key of their own."""
    made, reservation = reserved(ask, plan)
    ask.services.safety._seconds = ONCE
    issue = (certificates.c.id == made) & (certificates.c.issue == 1)
    with writer(ask.services.engine).begin() as connection:
        row = dict(connection.execute(select(certificates).where(issue)).mappings().one())
        document = json.loads(row["bundle"])
        payload = read_envelope(document["envelope"]).payload
        document["envelope"] = sign_envelope(payload, SigningKey.generate()).as_document()
        row |= {"issue": 2, "bundle": json.dumps(document).encode()}
        connection.execute(insert(certificates).values(row))
    run = {"certificate": made, "data": "digits", "model": "mlp:8", "output": "o"}
    for path, body in (("/v1/ledgers/toy/reservations", {"certificate": made}), ("/v1/runs", run)):
        answer = ask("POST", path, "submit", body)
        assert (answer.status_code, answer.json()["code"]) == (409, "not_genuine"), answer.text
    released = ask("POST", f"/v1/reservations/{reservation}/release", "submit", {})
    assert released.status_code == 200, released.text


def test_tokens_end_by_the_databases_clock(ask: Any) -> None:
    """Not by the replica's own, which may be minutes off."""
    clock, later = ask.services.clock, datetime.now(UTC) + timedelta(days=2)
    assert ask("GET", "/v1/certificates", "submit").status_code == 200
    clock._wall = lambda: later
    clock._base = later, time.monotonic()
    clock._asked_at = float("inf")
    refused = ask("GET", "/v1/certificates", "submit")
    assert (refused.status_code, refused.json()["code"]) == (401, "expired_token")


def test_a_ledger_whose_end_was_removed_admits_nothing(ask: Any, plan: Any) -> None:
    made, reservation = reserved(ask, plan)
    own(ask, "DELETE FROM ledger_events WHERE seq = 2")
    refused(ask, plan, made, reservation, "ledger_altered")


def test_an_entry_that_cannot_be_read_suspends_writes(ask: Any, plan: Any) -> None:
    made, reservation = reserved(ask, plan)
    own(ask, "UPDATE log_entries SET content = '{}' WHERE kind = 'reservation'")
    refused(ask, plan, made, reservation, "log_damaged")
    assert ask("GET", "/readyz", "audit").status_code == 503


def test_a_log_that_was_rolled_back_is_not_built_on(ask: Any, plan: Any) -> None:
    made, reservation = reserved(ask, plan)
    services = ask.services
    wait_until(lambda: services.sequencer.newest() is not None and not pending(services))
    services.sequencer.stop()
    wait = "INSERT INTO log_pending SELECT entry_id FROM log_leaves"
    own(ask, wait, *(f"DELETE FROM log_{table}" for table in ("checkpoints", "nodes", "leaves")))
    refused(ask, plan, made, reservation, "log_damaged")


def test_a_rollback_is_noticed_by_the_transaction_that_would_spend(ask: Any, plan: Any) -> None:
    """Not only when it is next looked for."""
    made, _ = reserved(ask, plan)
    services = ask.services
    wait_until(lambda: services.sequencer.newest() is not None and not pending(services))
    services.sequencer.stop()
    services.safety._seconds = ONCE
    assert ask("GET", "/readyz", "audit").status_code == 200
    own(ask, "DELETE FROM log_checkpoints", "DELETE FROM log_nodes", "DELETE FROM log_leaves")
    spent = ask("POST", "/v1/ledgers/toy/reservations", "submit", {"certificate": made})
    assert (spent.status_code, spent.json()["code"]) == (503, "log_damaged")
    assert ask("GET", "/readyz", "audit").json()["reasons"][0]["code"] == "log_damaged"


def pending(services: Any) -> int:
    with services.engine.connect() as connection:
        query = text("SELECT count(*) FROM log_pending")
        result: int = connection.execute(query).scalar_one()
        return result


def test_a_full_disk_begins_nothing(ask: Any, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, reservation = reserved(ask, plan)
    if ask.services.engine.dialect.name == "postgresql":
        return  # the server says it of its own disk, with each write
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    refused(ask, plan, made, reservation, "disk_full")


def test_what_ends_work_or_takes_a_right_away_goes_on(ask: Any, plan: Any) -> None:
    made, _ = reserved(ask, plan)
    run = {"certificate": made, "data": "digits", "model": "mlp:8", "output": "o"}
    run_id = ask("POST", "/v1/runs", "submit", run).json()["id"]
    ask.services.safety._faults = [readiness._reason("log_damaged", "", "")]
    ask.services.safety._checked_at = float("inf")
    assert ask("POST", f"/v1/runs/{run_id}/cancel", "submit", {}).status_code == 200
    revoked = ask(
        "POST",
        f"/v1/certificates/{made}/revocation",
        "approve",
        {"code": "plan_error", "reason": "x"},
    )
    assert revoked.status_code in (200, 201), revoked.text


def test_the_embedded_database_is_its_owners_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        url = f"sqlite:///{tmp_path / 'new' / 'affidavit.db'}"
        upgrade(url)
        engine = open_engine(url)
        with writer(engine).begin() as connection:
            connection.execute(text("CREATE TABLE more (id INTEGER)"))
            modes = {
                path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()
            }
        engine.dispose()
    finally:
        os.umask(former)
    assert set(modes.values()) == {0o600}, modes
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_each_connection_to_postgresql_has_our_timeouts(postgresql_url: str) -> None:
    """Those of the server, or of a role, do not count; the default there is to wait for ever."""
    engine = open_engine(postgresql_url)
    with engine.connect() as connection:
        for name, seconds in TIMEOUTS.items():
            query = text("SELECT extract(epoch FROM current_setting(:name)::interval)")
            shown = connection.execute(query, {"name": name}).scalar_one()
            assert shown == seconds, name
    engine.dispose()


def test_a_process_that_stops_in_a_transaction_gives_back_its_lock(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIMEOUTS, "idle_in_transaction_session_timeout", 1)
    stopped, other = open_engine(postgresql_url), open_engine(postgresql_url)
    hung = stopped.connect()
    hung.begin()
    hold(hung, "ledger toy")
    with other.begin() as connection:
        hold(connection, "ledger toy")  # waits for the one that hangs, no longer
    with pytest.raises(DatabaseError):
        hung.execute(text("SELECT 1"))
    hung.close()
    stopped.dispose()
    other.dispose()


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_replica_with_another_clock_writes_nothing_and_is_not_ready(
    ask: Any, plan: Any, minutes: int
) -> None:
    """Windows, status lists, checkpoints and leases keep the database's time meanwhile."""
    clock, off = ask.services.clock, timedelta(minutes=minutes)
    if ask.services.engine.dialect.name == "sqlite":  # which has no clock but the machine's
        assert abs(clock.skew()) < timedelta(seconds=1)
        return
    clock._wall = lambda: datetime.now(UTC) + off
    answer = ask("POST", "/v1/certificates", "submit", plan())
    assert (answer.status_code, answer.json()["code"]) == (503, "writes_suspended")
    assert answer.json()["reasons"][0]["code"] == "clock_skewed"
    assert ask("GET", "/readyz", "audit").json()["reasons"][0]["code"] == "clock_skewed"
    assert ask("GET", "/v1/status", "audit").status_code == 503
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(minutes=5)
    assert ask.services.keyring.current().public.covers(datetime.now(UTC))
    # By what time it looks for leases and reservations that ran out.
    assert abs(ask.services.dispatcher._now() - datetime.now(UTC)) < timedelta(minutes=5)
    clock._wall = lambda: datetime.now(UTC) + off / 1000
    assert ask("POST", "/v1/certificates", "submit", plan()).status_code == 201
