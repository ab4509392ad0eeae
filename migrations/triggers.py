"""Triggers that refuse changes to append-only tables and rows that break a rule.

SQLite: row triggers refuse UPDATE and DELETE. ``INSERT OR REPLACE`` deletes without firing
a delete trigger unless the connection asked for ``recursive_triggers``, which a stranger's
connection does not; so an insert whose key exists is refused too, before the old row is
touched. The hidden ``rowid`` is such a key, and so is every unique constraint.

PostgreSQL: a row trigger refuses UPDATE and DELETE, a statement trigger TRUNCATE, and both
are ``ENABLE ALWAYS``, because an ordinary trigger does not fire in a session that set
``session_replication_role = replica``. The owner can still drop a trigger: checkpoints of
the log that are kept elsewhere reveal that.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

ERROR = "USING ERRCODE = 'integrity_constraint_violation'"


def install() -> None:
    """Create what ``protect`` needs once in a database."""
    if not _is_sqlite():
        op.execute(
            f"""
            CREATE FUNCTION affidavit_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
                    {ERROR};
            END $$
            """
        )


def protect(table: str) -> None:
    """Make ``table`` append-only."""
    if _is_sqlite():
        _protect_sqlite(table)
        return
    for name, event in (
        ("refuse_change", f"BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW"),
        ("refuse_truncate", f"BEFORE TRUNCATE ON {table} FOR EACH STATEMENT"),
    ):
        _create_postgresql_trigger(table, f"{table}_{name}", event, "affidavit_refuse_change")


def refuse(table: str, rules: Mapping[str, str], trigger: str = "", event: str = "INSERT") -> None:
    """Refuse an ``event`` of rows of ``table`` that meet a condition, whoever asks for it.

    ``rules`` maps the error's message to a condition in SQL about the row ``NEW`` or ``OLD``. The
    trigger is called ``TABLE_guard`` by default; SQLite has one for each rule, numbered.
    """
    if _is_sqlite():
        for number, (message, condition) in enumerate(rules.items(), 1):
            _create_sqlite_trigger(
                trigger or f"{table}_guard_{number}",
                f"{event} ON {table} WHEN {condition}",
                message,
            )
        return
    checks = " ".join(
        f"IF {condition} THEN RAISE EXCEPTION '{message}' {ERROR}; END IF;"
        for message, condition in rules.items()
    )
    # Without a search path, a temporary table of the same name would be found before ours.
    schema = op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    trigger = trigger or f"{table}_guard"
    function = "affidavit_guard_" + trigger.replace("_guard", "")
    op.execute(
        f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql "
        f"SET search_path = {schema}, pg_temp AS $$ BEGIN {checks} "
        f"RETURN {'OLD' if event == 'DELETE' else 'NEW'}; END $$"
    )
    _create_postgresql_trigger(table, trigger, f"BEFORE {event} ON {table} FOR EACH ROW", function)


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _protect_sqlite(table: str) -> None:
    for verb in ("UPDATE", "DELETE"):
        _create_sqlite_trigger(
            f"{table}_refuse_{verb.lower()}",
            f"{verb} ON {table}",
            f"{table} is append-only: {verb} refused",
        )
    inspector = sa.inspect(op.get_bind())
    unique = [entry["column_names"] for entry in inspector.get_unique_constraints(table)]
    # A row that names no rowid has -1 here, which no row of ours ever gets.
    keys = (inspector.get_pk_constraint(table)["constrained_columns"], *unique, ["rowid"])
    same = " OR ".join(
        " AND ".join(f"{column} = NEW.{column}" for column in columns) for columns in keys
    )
    _create_sqlite_trigger(
        f"{table}_refuse_replace",
        f"INSERT ON {table} WHEN EXISTS (SELECT 1 FROM {table} WHERE {same})",
        f"{table} is append-only: REPLACE refused",
    )


def _create_sqlite_trigger(name: str, event: str, message: str) -> None:
    op.execute(f"CREATE TRIGGER {name} BEFORE {event} BEGIN SELECT RAISE(ABORT, '{message}'); END")


def _create_postgresql_trigger(table: str, name: str, event: str, function: str) -> None:
    op.execute(f"CREATE TRIGGER {name} {event} EXECUTE FUNCTION {function}()")
    op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}")
