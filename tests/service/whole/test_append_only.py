"""Every table but those named here keeps its rows, whoever asks and by whatever statement.

The tables and their keys are read from the metadata and from the database, and each gets a
row made of nothing but its columns' types; a new table is attacked as soon as it exists.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.exc import DatabaseError

from affidavit.service.core.database import UtcDateTime
from affidavit.service.operation.database_admin import metadata
from tests.support.databases import Migrated

CHANGING = {
    "certifications": "how far long requests are; their certificates are kept elsewhere",
    "log_pending": "entries leave it when they get their places in the tree",
    "run_leases": "who has a run now, under a lock; what became of it is in run_events",
    "sessions": "who is signed in with a browser; they end",
    "token_uses": "when a token was last used, for its owner's eyes",
}
"""Tables without history, and why none is lost with their rows."""

TABLES = sorted(metadata.tables.keys() - CHANGING.keys())


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A database with a row in every table, opened as a stranger opens it: with no settings."""
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("whole") / "affidavit.db"
        template: Path = request.getfixturevalue("migrated_sqlite")
        shutil.copy(template, path)
        url = f"sqlite:///{path}"
    else:
        lender: Migrated = request.getfixturevalue("migrated_postgresql")
        url = f"{lender.server}/{lender.lend()}"
    result = create_engine(url)
    try:
        with result.begin() as connection, unguarded(connection):
            for table in metadata.sorted_tables:
                connection.execute(sa.insert(table).values(row_of(table)))
        yield result
    finally:
        result.dispose()


@contextmanager
def unguarded(connection: Connection) -> Iterator[None]:
    """No trigger, check or foreign key for a while; afterwards those against changes alone.

    The guards of single tables stay away: they would refuse made-up rows for other reasons.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA ignore_check_constraints=ON")
        triggers = connection.execute(
            text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        ).all()
        for name, _ in triggers:
            connection.exec_driver_sql(f"DROP TRIGGER {name}")
        yield
        for name, created in triggers:
            if "_refuse_" in name:
                connection.exec_driver_sql(created)
        connection.exec_driver_sql("PRAGMA ignore_check_constraints=OFF")
        return
    query = (
        "SELECT conrelid::regclass, conname FROM pg_constraint JOIN pg_class ON oid = conrelid "
        "WHERE contype = 'c' AND relnamespace = 'public'::regnamespace"
    ).replace("ON oid", "ON pg_class.oid")
    for table, name in connection.execute(text(query)).all():
        connection.exec_driver_sql(f"ALTER TABLE {table} DROP CONSTRAINT {name}")
    query = "SELECT tgrelid::regclass, tgname, tgenabled FROM pg_trigger WHERE NOT tgisinternal"
    states = connection.execute(text(query)).all()
    for table, name, _ in states:
        connection.exec_driver_sql(f"ALTER TABLE {table} DISABLE TRIGGER {name}")
    connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
    yield
    connection.exec_driver_sql("SET LOCAL session_replication_role = origin")
    verbs = {"A": "ENABLE ALWAYS", "O": "ENABLE", "R": "ENABLE REPLICA", "D": "DISABLE"}
    for table, name, state in (item for item in states if "_refuse_" in item[1]):
        verb = verbs[state.decode() if isinstance(state, bytes) else state]
        connection.exec_driver_sql(f"ALTER TABLE {table} {verb} TRIGGER {name}")


def row_of(table: sa.Table, *, second: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A row of a table; the columns in ``second`` have another value than without."""
    return {column.name: value_of(column, column.name in second) for column in table.columns}


def value_of(column: sa.Column[Any], second: bool) -> Any:
    if isinstance(column.type, UtcDateTime):
        return datetime(2026 + second, 1, 1, tzinfo=UTC)
    kind = column.type.python_type
    if kind is bool:
        return second
    if kind in (int, float):
        return kind(7 + second)
    length = getattr(column.type, "length", None) or 4
    letter = "ab"[second] * min(length, 4)
    return letter.encode() if kind is bytes else letter


def keys_of(engine: Engine, table: sa.Table) -> list[frozenset[str]]:
    """Every set of columns that the database keeps unique in a table."""
    result = inspect(engine)
    keys = [result.get_pk_constraint(table.name)["constrained_columns"]]
    keys += [constraint["column_names"] for constraint in result.get_unique_constraints(table.name)]
    keys += [
        [name for name in index["column_names"] if name]
        for index in result.get_indexes(table.name)
        if index["unique"]
    ]
    declared = [list(table.primary_key.columns.keys())]
    declared += [
        list(item.columns.keys())
        for item in table.constraints
        if isinstance(item, sa.UniqueConstraint)
    ]
    return sorted({frozenset(key) for key in (*keys, *declared)}, key=sorted)


def contents(connection: Connection, table: sa.Table) -> list[Any]:
    query = sa.select(table).order_by(*table.primary_key.columns)
    return [tuple(row) for row in connection.execute(query).all()]


def attacks(engine: Engine, table: sa.Table) -> Iterator[tuple[str, Any]]:
    """Names and statements that would change or remove the row that is there."""
    name = table.name
    columns = ", ".join(column.name for column in table.columns)
    first = next(iter(table.columns)).name
    key = ", ".join(table.primary_key.columns.keys())
    copied = f"INTO {name} ({columns}) SELECT {columns} FROM {name} WHERE true"
    yield "update", text(f"UPDATE {name} SET {first} = {first}")
    yield "delete", text(f"DELETE FROM {name}")
    yield (
        "upsert",
        text(f"INSERT {copied} ON CONFLICT ({key}) DO UPDATE SET {first} = excluded.{first}"),
    )
    if engine.dialect.name == "postgresql":
        yield "truncate", text(f"TRUNCATE {name} CASCADE")
        return
    yield "update or replace", text(f"UPDATE OR REPLACE {name} SET {first} = {first}")
    yield "replace", text(f"REPLACE {copied}")
    yield (
        "replace by rowid",
        text(
            f"INSERT OR REPLACE INTO {name} (rowid, {columns}) SELECT rowid, {columns} FROM {name}"
        ),
    )
    for same in keys_of(engine, table):
        others = frozenset(table.columns.keys()) - same
        row = row_of(table, second=others)
        yield (
            f"replace by {', '.join(sorted(same))}",
            sa.insert(table).prefix_with("OR REPLACE").values(row),
        )


def test_what_changes_is_named_with_its_reason() -> None:
    assert CHANGING.keys() <= metadata.tables.keys()
    assert len(TABLES) > 20


@pytest.mark.in_both
@pytest.mark.parametrize("name", TABLES)
def test_no_statement_changes_or_removes_a_row(engine: Engine, name: str) -> None:
    table = metadata.tables[name]
    roles = ["origin", "replica"] if engine.dialect.name == "postgresql" else [None]
    with engine.connect() as connection:
        before = contents(connection, table)
        assert len(before) == 1
        connection.rollback()
        let_through = []
        for attack, statement in attacks(engine, table):
            for role in roles:
                if role is not None:
                    connection.exec_driver_sql(f"SET LOCAL session_replication_role = {role}")
                try:
                    connection.execute(statement)
                    after = contents(connection, table)
                except DatabaseError:
                    after = before
                else:
                    # An insertion beside what is there is no attack of this kind.
                    if attack.startswith("replace by") and before[0] in after:
                        after = before
                    else:
                        let_through.append(f"{attack} as {role}")
                connection.rollback()
        assert contents(connection, table) == before
    assert not let_through
