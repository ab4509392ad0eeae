"""The application's role on PostgreSQL does the service's work and rewrites nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import DatabaseError, ProgrammingError

from affidavit.service.core.errors import SettingsError
from affidavit.service.operation.database_admin import grant_application, upgrade
from affidavit.service.settings import Settings
from tests.service.operation.log_waiting import until_logged
from tests.support.database_owner import statements, with_user

ROLE = 'the "app" role'
"""A name that shows whether names are quoted."""
DENIED = "permission denied"


@pytest.fixture(scope="module")
def role(postgresql: str) -> str:
    quoted = ROLE.replace('"', '""')
    statements(f"{postgresql}/postgres", f'CREATE ROLE "{quoted}" LOGIN')
    return ROLE


@pytest.fixture
def owner_url(postgresql_url: str, role: str) -> str:
    """The database as its owner sees it, with what the role needs granted."""
    grant_application(postgresql_url, role)
    return postgresql_url


@pytest.fixture
def app_url(owner_url: str, role: str) -> str:
    return with_user(owner_url, role)


@pytest.fixture
def working(
    app_url: str,
    settings: Settings,
    client_of: Any,
    plan: Callable[..., dict[str, Any]],
    post: Callable[..., Any],
) -> Iterator[Any]:
    """A client of a service that works as the role and has certified something."""
    with client_of(replace(settings, database_url=app_url)) as client:
        assert post(client, plan()).status_code == 201
        yield client


def test_the_service_does_its_work_as_the_role(
    working: Any, plan: Callable[..., dict[str, Any]], post: Callable[..., Any]
) -> None:
    assert post(working, plan()).status_code == 200
    refused = post(working, plan(sampling={"scheme": "shuffled", "lot_size": 100}))
    assert refused.json()["verdict"] == "refused"
    identity = refused.json()["certificate"]["id"]
    until_logged(working.app.state.services)
    assert "log" in working.get(f"/v1/certificates/{identity}/bundle").json()
    for path in (
        "/readyz",
        "/metrics",
        "/v1/keys",
        "/v1/certificates",
        f"/v1/certificates/{identity}",
    ):
        assert working.get(path).status_code == 200, path


def tables(url: str) -> list[str]:
    engine = create_engine(url)
    result = sorted(inspect(engine).get_table_names())
    engine.dispose()
    return result


def append_only(url: str) -> list[str]:
    engine = create_engine(url)
    query = "SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname LIKE '%_refuse_change'"
    with engine.connect() as connection:
        result = sorted(connection.execute(text(query)).scalars())
    engine.dispose()
    return result


def test_what_is_append_only_stays_so_even_without_its_triggers(
    working: Any, owner_url: str, app_url: str
) -> None:
    assert working
    stored = append_only(owner_url)
    assert {"certificates", "signing_keys", "log_entries", "log_checkpoints", "keysets"} <= {
        *stored
    }
    engine = create_engine(app_url)
    columns = {name: inspect(engine).get_columns(name)[0]["name"] for name in stored}
    for table in stored:
        statements(owner_url, f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        column = columns[table]
        for attack in (
            f"UPDATE {table} SET {column} = {column}",
            f"DELETE FROM {table}",
            f"TRUNCATE {table} CASCADE",
        ):
            with pytest.raises(ProgrammingError, match=DENIED), engine.begin() as connection:
                connection.execute(text(attack))
    engine.dispose()


def test_triggers_are_always_on_and_cannot_be_switched_off_by_the_role(
    working: Any, owner_url: str, app_url: str
) -> None:
    assert working
    query = text("SELECT tgname, tgenabled::text FROM pg_trigger WHERE NOT tgisinternal")
    engine = create_engine(app_url)
    with engine.connect() as connection:
        states = connection.execute(query).all()
    assert len(states) > 10
    assert [name for name, state in states if state != "A"] == []
    for attack in (
        "ALTER TABLE certificates DISABLE TRIGGER ALL",
        "DROP TRIGGER certificates_refuse_change ON certificates",
        "SET session_replication_role = replica",
        "DROP TABLE audit",
        "CREATE TABLE mine (id int)",
        "CREATE OR REPLACE FUNCTION affidavit_refuse_change() RETURNS trigger "
        "LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "ALTER TABLE audit OWNER TO CURRENT_USER",
        "UPDATE alembic_version SET version_num = '0001'",
        "GRANT ALL ON certificates TO CURRENT_USER",
    ):
        with engine.connect() as connection:
            try:
                connection.execute(text(attack))
                connection.commit()
            except DatabaseError:
                continue
        # A grant that gives nothing is a warning and no error.
        assert attack.startswith("GRANT"), attack
    engine.dispose()
    test = create_engine(app_url)
    with pytest.raises(DatabaseError), test.begin() as connection:
        connection.execute(text("DELETE FROM certificates"))
    test.dispose()
    assert owner_url


def test_the_role_is_given_no_more_than_before_by_another_migration(
    owner_url: str, app_url: str, role: str
) -> None:
    before = _grants(owner_url, role)
    assert before["alembic_version"] == {"SELECT"}
    assert set(before) == set(tables(owner_url))
    quoted = role.replace('"', '""')
    statements(owner_url, f'GRANT ALL ON ALL TABLES IN SCHEMA public TO "{quoted}"')
    assert _grants(owner_url, role) != before
    grant_application(owner_url, role)
    assert _grants(owner_url, role) == before
    upgrade(owner_url)
    grant_application(owner_url, role)
    assert _grants(owner_url, role) == before
    assert app_url


def _grants(url: str, role: str) -> dict[str, set[str]]:
    query = text(
        "SELECT table_name, privilege_type FROM information_schema.role_table_grants "
        "WHERE grantee = :role"
    )
    result: dict[str, set[str]] = {}
    engine = create_engine(url)
    with engine.connect() as connection:
        for table, privilege in connection.execute(query, {"role": role}).all():
            result.setdefault(table, set()).add(privilege)
    engine.dispose()
    return result


def test_a_role_that_nothing_would_stop_is_refused(postgresql_url: str, sqlite_url: str) -> None:
    statements(
        postgresql_url,
        "CREATE ROLE mighty SUPERUSER",
        "CREATE ROLE heir",
        "CREATE ROLE wide BYPASSRLS",
        "GRANT affidavit TO heir",
    )
    for role, stated in (
        ("none", "does not exist"),
        ("mighty", "superuser"),
        ("wide", "row-level security"),
        ("heir", "owner"),
        ("affidavit", "superuser"),
    ):
        with pytest.raises(SettingsError, match=stated):
            grant_application(postgresql_url, role)
    with pytest.raises(SettingsError, match="no roles"):
        grant_application(sqlite_url, "any")
