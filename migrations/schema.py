"""The schema of an empty database: the service's tables, and triggers that protect their rows.

The tables are those of this release (``database_admin.metadata``), stamped as the newest revision.
Revisions migrate the databases of earlier releases, so a change of a table needs a revision.

Triggers refuse changes to append-only tables, and rows that break a rule. In SQLite, row triggers
refuse UPDATE and DELETE. ``INSERT OR REPLACE`` deletes without a delete trigger, unless the
connection enables ``recursive_triggers``, so an insert of an existing key is refused too: a primary
key, a unique constraint or the hidden ``rowid``. In PostgreSQL, a row trigger refuses UPDATE and
DELETE, and a statement trigger TRUNCATE. Both are ``ENABLE ALWAYS``, because an ordinary trigger
does not fire in a session with ``session_replication_role = replica``. The owner can still drop a
trigger; log checkpoints that are stored elsewhere reveal what changes then.

Reference: Alembic, Building an Up to Date Database from Scratch.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

from affidavit.service.operation.database_admin import metadata

MUTABLE_TABLES = frozenset(
    {"certifications", "log_pending", "run_leases", "sessions", "token_uses"}
)
"""Queues, counters and other tables without evidence; all others are append-only."""

_SAME_ISSUE = (
    "certificate_id = NEW.certificate_id AND untrusted = NEW.untrusted AND issue = NEW.issue"
)
_ITS_ENVELOPE = (
    "id = NEW.certificate_id AND untrusted = NEW.untrusted AND issue = NEW.issue "
    "AND envelope_digest = NEW.envelope_digest"
)

INSERT_RULES: Mapping[str, Mapping[str, str]] = {
    "approvals": {
        "four eyes: who asked for a certificate cannot approve it": (
            "EXISTS (SELECT 1 FROM requests WHERE certificate_id = NEW.certificate_id "
            "AND requester = NEW.approver)"
        ),
        "four eyes: who asked for this issue is not known": (
            f"EXISTS (SELECT 1 FROM requests WHERE {_SAME_ISSUE} AND requester LIKE 'anonymous@%')"
        ),
        "this envelope awaits no approval": (
            f"NOT EXISTS (SELECT 1 FROM certificates WHERE {_ITS_ENVELOPE} "
            "AND approvals_given < approvals_required)"
        ),
        "this issue is superseded": (
            "EXISTS (SELECT 1 FROM certificates WHERE id = NEW.certificate_id "
            "AND untrusted = NEW.untrusted AND issue > NEW.issue)"
        ),
        "this issue is revoked": f"EXISTS (SELECT 1 FROM revocations WHERE {_SAME_ISSUE})",
        # With only a unique constraint, INSERT OR REPLACE of SQLite would remove the old row.
        "approvals is append-only: this approver has decided": (
            f"EXISTS (SELECT 1 FROM approvals WHERE {_SAME_ISSUE} AND approver = NEW.approver)"
        ),
        "this issue is rejected": (
            f"EXISTS (SELECT 1 FROM approvals WHERE {_SAME_ISSUE} AND decision = 'reject')"
        ),
    },
    "certificates": {
        "an issue was left out": (
            "NEW.issue > 1 AND NOT EXISTS (SELECT 1 FROM certificates WHERE id = NEW.id "
            "AND untrusted = NEW.untrusted AND issue = NEW.issue - 1)"
        ),
        "it names more approvals than were given": (
            "NEW.approvals_given > 0 AND NEW.approvals_given > (SELECT count(*) FROM approvals "
            "WHERE certificate_id = NEW.id AND untrusted = NEW.untrusted "
            "AND issue = NEW.issue - 1 AND decision = 'approve')"
        ),
    },
    "revocations": {
        "there is no such envelope": (
            f"NOT EXISTS (SELECT 1 FROM certificates WHERE {_ITS_ENVELOPE})"
        ),
        "revocations is append-only: this issue is revoked": (
            f"EXISTS (SELECT 1 FROM revocations WHERE {_SAME_ISSUE})"
        ),
    },
    "status_lists": {
        "the sequence number of status lists only grows": (
            "NEW.sequence <= (SELECT max(sequence) FROM status_lists)"
        ),
    },
}
"""Refused rows by table: the error message and the SQL condition."""

PERSONAL_TOKEN = {
    "four eyes: this token is a person''s, who decides by their own name": (
        "NEW.approver LIKE 'token:%' AND EXISTS (SELECT 1 FROM tokens "
        "WHERE 'token:' || name = NEW.approver AND person IS NOT NULL)"
    ),
}
"""A person who approves with a token would not be recognised as the requester."""

UNSEQUENCED_ENTRY = {
    "this entry has no place in the tree yet": (
        "NOT EXISTS (SELECT 1 FROM log_leaves WHERE entry_id = OLD.entry_id)"
    ),
}
"""A waiting entry already counts as logged (``log.entries.logged``), so it must not vanish."""


def create() -> None:
    """Create the tables and their triggers."""
    _install_function()
    metadata.create_all(op.get_bind(), checkfirst=False)
    for table in metadata.sorted_tables:
        if table.name not in MUTABLE_TABLES:
            _protect(table.name)
    for name, rules in INSERT_RULES.items():
        _refuse(name, rules)
    _refuse("approvals", PERSONAL_TOKEN, trigger="approvals_guard_person")
    for event in ("UPDATE", "DELETE"):
        _refuse("log_pending", UNSEQUENCED_ENTRY, f"log_pending_guard_{event.lower()}", event)


def add(table: str) -> None:
    """Create a table of this release that earlier databases lack, append-only."""
    metadata.tables[table].create(op.get_bind())
    _protect(table)


# ---- triggers


ERROR = "USING ERRCODE = 'integrity_constraint_violation'"


def _install_function() -> None:
    """Create the trigger function of append-only tables, once per database."""
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


def _protect(table: str) -> None:
    """Make ``table`` append-only."""
    if _is_sqlite():
        _protect_sqlite(table)
        return
    for name, event in (
        ("refuse_change", f"BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW"),
        ("refuse_truncate", f"BEFORE TRUNCATE ON {table} FOR EACH STATEMENT"),
    ):
        _create_postgresql_trigger(table, f"{table}_{name}", event, "affidavit_refuse_change")


def _refuse(table: str, rules: Mapping[str, str], trigger: str = "", event: str = "INSERT") -> None:
    """Refuse an ``event`` of ``table`` for rows that meet a condition.

    ``rules`` maps the error message to an SQL condition on the row ``NEW`` or ``OLD``. The default
    trigger is ``TABLE_guard``; SQLite has a numbered one for each rule.
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
    # Without a search path, a temporary table of the same name would shadow the table.
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
    # Without an explicit rowid, NEW.rowid is -1, which no row has.
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
