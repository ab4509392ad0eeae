"""The store on SQLite and on PostgreSQL: one transaction, one row, nothing rewritten."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import methodcaller
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.exc import DatabaseError

from affidavit.plan import canonical_json
from affidavit.service.certificates.integrity import signed_columns
from affidavit.service.certificates.store import CertificateStore, PlanRequest, StoredCertificate
from affidavit.service.core import database
from affidavit.service.core.database import (
    open_engine,
    reader,
    writer,
)
from affidavit.service.core.wire_models import Status
from affidavit.service.log.signing_keys import insert_signing_key
from affidavit.service.operation.database_admin import (
    SchemaNotAtHead,
    head,
    metadata,
    upgrade,
)
from affidavit.service.operation.database_admin import require_head as require
from affidavit.service.tables.certificates import (
    certificates,
    requests,
    signing_keys,
)
from affidavit.trust import (
    SigningKey,
    format_instant,
    sign_envelope,
)
from tests.service.child_processes import killed, on, start
from tests.service.conftest import ON_SQLITE, PRAGMAS
from tests.support.polling import TIMEOUT_SECONDS

NOON = datetime(2025, 1, 1, 12, tzinfo=UTC)
TABLES = (signing_keys, certificates, requests)
ID = "sha256:" + "0" * 64


@pytest.fixture
def store(engine: Engine) -> CertificateStore:
    return CertificateStore(engine)


SIGNER = SigningKey.generate()
KEY = SIGNER.public.as_record()
DEVELOPER = SigningKey.generate(development=True)
"""Of certificates that are untrusted."""
FOREVER = NOON.replace(year=9999)
BOUNDS = {"epsilon": "8", "delta": "1e-5"}


def certificate(number: int = 0, requester: str = "é", **changes: Any) -> StoredCertificate:
    """A certificate that says what the columns repeat, and nothing else."""
    values = {"name": "a", "verdict": "certified", "issue": 1, "untrusted": False, **changes}
    created, end = NOON + timedelta(seconds=number // 2), changes.get("not_after", FOREVER)
    plan = {"name": values["name"], "dataset": {"name": "d"}, "adjacency": "add_remove"}
    noise: dict[str, Any] = {"joint": None, "releases": []}
    predicate = {
        "certificate_id": f"sha256:{number:064x}",
        **{name: values[name] for name in ("verdict", "issue", "untrusted")},
        "requester": requester,
        "plan": {**plan, "number": number},
        "policy": {},
        "approvals": [],
        "guarantee": {name: {"upper": value} for name, value in BOUNDS.items()},
        "noise_multiplier": noise,
        "validity": {"not_before": format_instant(created), "not_after": format_instant(end)},
    }
    signer = DEVELOPER if values["untrusted"] else SIGNER
    envelope = sign_envelope(canonical_json({"predicate": predicate}), signer)
    bundle = {"envelope": envelope.as_document()}
    result = {
        **{name: {"upper": float(value)} for name, value in BOUNDS.items()},
        **{name: predicate[name] for name in ("verdict", "policy")},
        "noise_multiplier": noise,
        "certificate": {"bundle": bundle},
    }
    return StoredCertificate(
        **signed_columns(predicate),
        status=Status.ACTIVE,
        epsilon_upper=8.0,
        delta=1e-5,
        created_at=created,
        envelope_digest=envelope.digest,
        key_id=signer.key_id,
        bundle=canonical_json(bundle),
        result=json.dumps(result),
    )


REQUEST = PlanRequest(requester="me", received_at=NOON, content_type="application/json", body=b"{}")


def counts(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in TABLES
        }


def test_what_is_added_is_found_unchanged(store: CertificateStore) -> None:
    created = certificate()
    assert store.add(created, KEY, REQUEST) == (created, True)
    assert store.find(created.id) == created
    with store.writing() as connection:  # a checkpoint alone vouches for no key
        insert_signing_key(connection, {"key_id": "other"}, NOON)
    assert store.keys() == [KEY]
    assert store.keys(["other"]) == [KEY, {"key_id": "other"}]
    assert store.find("sha256:" + "f" * 64) is None


def test_adding_it_again_keeps_the_first_and_records_the_request(
    store: CertificateStore, engine: Engine
) -> None:
    first = certificate()
    store.add(first, KEY, REQUEST)
    assert store.add(certificate(requester="other"), KEY, REQUEST) == (first, False)
    expected = {"signing_keys": 1, "certificates": 1, "requests": 2}
    assert counts(engine) == expected


@pytest.mark.in_both
def test_adders_that_race_end_with_one_certificate(database_url: str, engine: Engine) -> None:
    engines = [open_engine(database_url) for _ in range(8)]
    try:
        with ThreadPoolExecutor(8) as racers:
            outcomes = list(
                racers.map(
                    lambda pair: CertificateStore(pair[1]).add(
                        certificate(requester=str(pair[0])), KEY, REQUEST
                    ),
                    enumerate(engines),
                )
            )
    finally:
        for item in engines:
            item.dispose()
    assert sorted(created for _, created in outcomes) == [False] * 7 + [True]
    assert len({stored.bundle for stored, _ in outcomes}) == 1
    assert counts(engine) == {"signing_keys": 1, "certificates": 1, "requests": 8}


@pytest.mark.in_both
def test_first_certificates_of_one_key_that_race_are_all_kept(
    database_url: str, engine: Engine
) -> None:
    engines = [open_engine(database_url) for _ in range(8)]
    together = Barrier(8)

    def add(number: int) -> bool:
        store = CertificateStore(engines[number])
        store.keys()
        together.wait()
        return store.add(certificate(number), KEY, REQUEST)[1]

    try:
        with ThreadPoolExecutor(8) as racers:
            assert list(racers.map(add, range(8))) == [True] * 8
    finally:
        for item in engines:
            item.dispose()
    assert counts(engine) == {"signing_keys": 1, "certificates": 8, "requests": 8}


def test_a_trusted_certificate_counts_before_an_untrusted_one(store: CertificateStore) -> None:
    unsure, sure = certificate(untrusted=True), certificate(requester="trusted")
    store.add(unsure, DEVELOPER.public.as_record(), REQUEST)
    assert store.find(unsure.id) == unsure
    assert store.repeat(unsure.id, REQUEST, untrusted_too=True) == unsure
    assert store.repeat(unsure.id, REQUEST, untrusted_too=False) is None
    assert store.add(sure, KEY, REQUEST) == (sure, True)
    assert store.find(unsure.id) == sure


@ON_SQLITE
def test_an_altered_untrusted_issue_does_not_block_the_trusted_one(
    store: CertificateStore, engine: Engine
) -> None:
    sure = certificate()
    store.add(certificate(untrusted=True), DEVELOPER.public.as_record(), REQUEST)
    store.add(sure, KEY, REQUEST)
    with engine.begin() as connection:
        triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        for name in connection.execute(text(triggers)).scalars().all():
            connection.execute(text(f"DROP TRIGGER {name}"))
        connection.execute(text("UPDATE certificates SET epsilon_upper = 1 WHERE untrusted"))
    assert CertificateStore(open_engine(str(engine.url))).find(sure.id) == sure


def test_a_failure_at_the_last_row_leaves_nothing(store: CertificateStore, engine: Engine) -> None:
    def fail(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("INSERT INTO requests"):
            raise RuntimeError("the plug was pulled")

    event.listen(engine, "before_cursor_execute", fail)
    with pytest.raises(RuntimeError, match="plug"):
        store.add(certificate(), KEY, REQUEST)
    assert set(counts(engine).values()) == {0}


@pytest.mark.ordinary("sqlite")
def test_killed_before_any_of_its_statements_it_leaves_nothing_and_a_retry_succeeds(
    database_url: str, engine: Engine
) -> None:
    add = partial(on, CertificateStore, methodcaller("add", certificate(), KEY, REQUEST))
    for statements in range(1, 20):
        if not killed(statements, database_url, add):
            break
        assert set(counts(engine).values()) == {0}, statements
        engine.dispose()
    assert 5 <= statements < 20
    assert set(counts(engine).values()) == {1}
    assert CertificateStore(engine).add(certificate(), KEY, REQUEST)[1] is False


# ---- pages -------------------------------------------------------------------------


def test_pages_show_every_row_once_newest_first(store: CertificateStore) -> None:
    created = [certificate(number) for number in range(11)]
    for item in created:
        store.add(item, KEY, REQUEST)
    page, cursor = store.page(None, 3)
    seen = [row.id for row in page]
    while cursor is not None:
        page, cursor = store.page(cursor, 3)
        seen += [row.id for row in page]
    assert seen == [entry.id for entry in sorted(created, key=lambda c: (c.created_at, c.id))][::-1]


def test_filters_narrow(store: CertificateStore) -> None:
    store.add(certificate(1, name="b", verdict="refused"), KEY, REQUEST)
    store.add(certificate(4), KEY, REQUEST)

    def ids(**wanted: Any) -> list[str]:
        return [row.id[-1] for row in store.page(None, 10, **wanted)[0]]

    assert ids() == ["4", "1"]
    assert ids(verdict="refused") == ["1"]
    assert ids(name="a") == ["4"]
    assert ids(plan_digest=certificate(1, name="b").plan_digest) == ["1"]
    assert ids(created_after=NOON) == ["4"]
    assert ids(created_before=NOON + timedelta(seconds=1)) == ["1"]
    assert ids(verdict="refused", name="a") == []


# ---- append-only -------------------------------------------------------------------


@pytest.mark.in_both
@pytest.mark.parametrize("table", [table.name for table in TABLES])
@pytest.mark.parametrize(
    ("database_url", "attack"),
    [
        ("sqlite", "UPDATE"),
        ("sqlite", "DELETE"),
        ("postgresql", "UPDATE"),
        ("postgresql", "DELETE"),
        ("postgresql", "TRUNCATE"),  # which SQLite does not have
    ],
    indirect=["database_url"],
)
def test_rows_can_be_neither_changed_nor_removed(
    store: CertificateStore, engine: Engine, table: str, attack: str
) -> None:
    store.add(certificate(), KEY, REQUEST)
    column = metadata.tables[table].columns.keys()[0]
    statement = {
        "UPDATE": f"UPDATE {table} SET {column} = {column}",
        "DELETE": f"DELETE FROM {table}",
        "TRUNCATE": f"TRUNCATE {table} CASCADE",
    }[attack]
    with pytest.raises(DatabaseError, match="append-only"), engine.begin() as connection:
        connection.execute(text(statement))
    assert set(counts(engine).values()) == {1}


def test_replication_mode_does_not_switch_the_triggers_off(
    postgresql_url: str,
) -> None:
    engine = open_engine(postgresql_url)
    CertificateStore(engine).add(certificate(), KEY, REQUEST)
    replica = engine.connect()
    replica.execute(text("SET session_replication_role = replica"))
    replica.commit()
    for statement in ("DELETE FROM requests", "TRUNCATE requests"):
        with pytest.raises(DatabaseError, match="append-only"):
            replica.execute(text(statement))
        replica.rollback()
    replica.close()
    assert counts(engine)["requests"] == 1
    engine.dispose()


@pytest.mark.parametrize("recursive", ["ON", "OFF"])
@pytest.mark.parametrize("table", [table.name for table in TABLES])
def test_insert_or_replace_is_refused_whatever_the_stranger_sets(
    sqlite_url: str, tmp_path: Path, table: str, recursive: str
) -> None:
    engine = open_engine(sqlite_url)
    CertificateStore(engine).add(certificate(), KEY, REQUEST)
    engine.dispose()
    stranger = sqlite3.connect(tmp_path / "affidavit.db")
    stranger.execute(f"PRAGMA recursive_triggers={recursive}")
    columns = metadata.tables[table].columns.keys()
    listed = ", ".join(columns)
    for statement in (
        f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
        f"REPLACE INTO {table} SELECT * FROM {table}",
        # Another key under the hidden row number of the row that is to vanish.
        f"INSERT OR REPLACE INTO {table} (rowid, {listed}) SELECT rowid, "
        + ", ".join(["'other'" if columns[0] in ("id", "key_id") else columns[0], *columns[1:]])
        + f" FROM {table}",
        f"UPDATE OR REPLACE {table} SET {columns[0]} = {columns[0]}",
    ):
        with pytest.raises(sqlite3.DatabaseError):
            stranger.execute(statement)
    stranger.rollback()
    (stored,) = stranger.execute(f"SELECT {columns[0]} FROM {table}").fetchone()
    assert stored in (1, ID, SIGNER.key_id)
    stranger.close()


# ---- the schema --------------------------------------------------------------------


def test_upgrade_twice_changes_nothing(
    database_url: str, store: CertificateStore, engine: Engine
) -> None:
    store.add(certificate(), KEY, REQUEST)
    upgrade(database_url)
    assert set(counts(engine).values()) == {1}
    assert require(engine) == head()


def test_an_empty_database_is_not_at_head(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(SchemaNotAtHead, match="affidavit migrate"):
        require(engine)
    engine.dispose()


def test_two_that_migrate_at_once_both_end_at_head(
    tmp_path: Path, postgresql: str, request: pytest.FixtureRequest
) -> None:
    name = f"empty{abs(hash(request.node.nodeid))}"
    engine = open_engine(f"{postgresql}/postgres").execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    for url in (f"sqlite:///{tmp_path / 'deep' / 'empty.db'}", f"{postgresql}/{name}"):
        children = [start(partial(upgrade, url)) for _ in range(3)]
        assert [child.wait(TIMEOUT_SECONDS) for child in children] == [0, 0, 0]
        migrated = open_engine(url)
        assert require(migrated) == head()
        migrated.dispose()


def test_sqlite_is_set_up_to_keep_what_it_answered(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PRAGMAS", PRAGMAS)
    engine = open_engine(sqlite_url)
    with engine.connect() as connection:
        result = {
            pragma: connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one()
            for pragma in ("journal_mode", "synchronous", "foreign_keys", "recursive_triggers")
        }
    engine.dispose()
    assert result == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "recursive_triggers": 1,
    }


# ---- connections ---------------------------------------------------------------------


def test_a_connection_that_the_server_closed_is_opened_anew_before_it_is_used(
    postgresql_url: str,
) -> None:
    engine, other = open_engine(postgresql_url), open_engine(postgresql_url)
    who = text("SELECT pg_backend_pid()")
    with engine.connect() as connection:
        first = connection.execute(who).scalar_one()
    with engine.connect() as connection:
        assert connection.execute(who).scalar_one() == first
    with other.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": first})
    for item in (writer(engine), reader(engine)):
        with item.connect() as connection:
            assert connection.execute(who).scalar_one() != first
    engine.dispose()
    other.dispose()


def test_a_reader_neither_waits_for_writers_nor_blocks_them(postgresql_url: str) -> None:
    engine = open_engine(postgresql_url)
    states = text("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'")
    reading = reader(engine).connect()
    reading.execute(text("SELECT count(*) FROM certificates"))
    with reader(engine).connect() as connection:
        assert connection.execute(states).scalar_one() == 0
    reading.close()
    # The connection that comes back writes in transactions again.
    with writer(engine).connect() as connection:
        connection.execute(text("CREATE TABLE half_done (id int)"))
        connection.rollback()
    with reader(engine).connect() as connection:
        assert connection.execute(text("SELECT to_regclass('half_done')")).scalar_one() is None
    engine.dispose()


def test_what_is_asked_often_is_planned_for_its_values(postgresql_url: str) -> None:
    engine = open_engine(postgresql_url)
    plans = text("SELECT sum(generic_plans), sum(custom_plans) FROM pg_prepared_statements")
    with reader(engine).connect() as connection:
        for number in range(20):
            connection.execute(
                text("SELECT id FROM certificates WHERE id = :id"), {"id": str(number)}
            )
        generic, custom = connection.execute(plans).one()
    assert generic == 0
    assert custom > 10
    engine.dispose()
