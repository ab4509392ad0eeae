"""Triggers that let rows in and never out.

SQLite: UPDATE and DELETE are refused by row triggers. ``INSERT OR REPLACE`` deletes
without firing a delete trigger unless the connection asked for ``recursive_triggers``,
which a stranger's connection does not; so an insert whose key is already there is
refused too, before the old row is touched. The hidden ``rowid`` is such a key, and so is
everything else that the table keeps unique.

PostgreSQL: UPDATE and DELETE are refused by a row trigger, TRUNCATE by a statement
trigger, and both are ``ENABLE ALWAYS``, because an ordinary trigger does not fire in a
session that set ``session_replication_role = replica``. Its owner can still drop a
trigger: that is what a log whose checkpoints are kept elsewhere is for.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op


def protect(table: str, *keys: str) -> None:
    """Make ``table``, whose primary key is ``keys``, append-only."""
    if op.get_bind().dialect.name == "sqlite":
        _protect_sqlite(table, keys)
    else:
        _protect_postgresql(table)


def install() -> None:
    """What ``protect`` needs once in a database."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            """
            CREATE FUNCTION affidavit_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
                    USING ERRCODE = 'integrity_constraint_violation';
            END $$
            """
        )


def uninstall() -> None:
    """Remove what ``install`` made; the triggers went with their tables."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION affidavit_refuse_change()")


def _protect_sqlite(table: str, keys: tuple[str, ...]) -> None:
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {table}_refuse_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: {verb} refused'); END"
        )
    # A row that names no rowid has -1 here, which no row of ours ever gets.
    unique = [
        constraint["column_names"]
        for constraint in sa.inspect(op.get_bind()).get_unique_constraints(table)
    ]
    same = " OR ".join(
        " AND ".join(f"{name} = NEW.{name}" for name in columns)
        for columns in (keys, *unique, ("rowid",))
    )
    op.execute(
        f"CREATE TRIGGER {table}_refuse_replace BEFORE INSERT ON {table} "
        f"WHEN EXISTS (SELECT 1 FROM {table} WHERE {same}) "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: REPLACE refused'); END"
    )


def _protect_postgresql(table: str) -> None:
    for name, when in (
        ("refuse_change", "BEFORE UPDATE OR DELETE ON {} FOR EACH ROW"),
        ("refuse_truncate", "BEFORE TRUNCATE ON {} FOR EACH STATEMENT"),
    ):
        op.execute(
            f"CREATE TRIGGER {table}_{name} {when.format(table)} "
            "EXECUTE FUNCTION affidavit_refuse_change()"
        )
        op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_{name}")
