"""A database that was lent is as if it had just been migrated when it is lent again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from tests.support.databases import TABLES, Migrated


@pytest.fixture
def name(migrated_postgresql: Migrated) -> str:
    return migrated_postgresql.lend()


@pytest.fixture
def engine(migrated_postgresql: Migrated, name: str) -> Iterator[Engine]:
    """Of a database that was written to."""
    result = open_engine(f"{migrated_postgresql.server}/{name}")
    TokenRepository(result).new("ci", [Scope.SUBMIT], 1, by="test", at=datetime.now(UTC))
    yield result
    result.dispose()


def rows(connection: Connection) -> dict[str, int]:
    tables = connection.scalars(TABLES).all()
    return {
        table: result
        for table in tables
        if (result := connection.scalar(text(f"SELECT count(*) FROM {table}")))
    }


def test_it_is_lent_again_without_rows_and_counts_from_one(
    migrated_postgresql: Migrated, name: str, engine: Engine
) -> None:
    with engine.connect() as connection:
        assert rows(connection)
    migrated_postgresql.take_back(name)
    assert migrated_postgresql.lend() == name
    with engine.connect() as connection:
        assert rows(connection) == {}
        assert connection.scalar(text("SELECT nextval('log_entries_id_seq')")) == 1
    migrated_postgresql.take_back(name)


def test_what_guards_its_rows_guards_them_still(
    migrated_postgresql: Migrated, name: str, engine: Engine
) -> None:
    migrated_postgresql.take_back(name)
    assert migrated_postgresql.lend() == name
    TokenRepository(engine).new("ci", [Scope.SUBMIT], 1, by="test", at=datetime.now(UTC))
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.execute(text("DELETE FROM log_entries"))
    migrated_postgresql.take_back(name)


def test_a_connection_that_was_left_open_is_closed(
    migrated_postgresql: Migrated, name: str, engine: Engine
) -> None:
    with engine.connect() as left:
        left.execute(text("SELECT 1"))
        migrated_postgresql.take_back(name)
        with pytest.raises(DBAPIError):
            left.execute(text("SELECT 1"))


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE log_entries DISABLE TRIGGER USER",
        "CREATE TABLE more (id integer)",
        "DROP TABLE waivers CASCADE",
        "CREATE INDEX more ON log_entries (id)",
        "CREATE OR REPLACE FUNCTION affidavit_refuse_change() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN RETURN NULL; END'",
        "ALTER DATABASE {name} SET work_mem = '1MB'",
        "GRANT CONNECT ON DATABASE {name} TO affidavit",
        "GRANT SELECT ON log_entries TO PUBLIC",
        "GRANT USAGE ON SCHEMA public TO affidavit",
    ],
)
def test_one_that_was_changed_is_not_lent_again(
    migrated_postgresql: Migrated, name: str, change: str
) -> None:
    changing = create_engine(f"{migrated_postgresql.server}/{name}")
    with changing.begin() as connection:
        connection.execute(text(change.format(name=name)))
    changing.dispose()
    migrated_postgresql.take_back(name)
    lent = [migrated_postgresql.lend() for _ in range(3)]
    assert name not in lent
    for item in lent:
        migrated_postgresql.take_back(item)
