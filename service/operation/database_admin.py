"""Administer the database: migrate its schema, grant roles, and copy it.

The service never creates a table. ``affidavit migrate`` does, before the service is started;
start-up and ``/readyz`` call ``require_head``. The migration scripts are part of the installed
package.

On PostgreSQL ``affidavit migrate`` runs as the owner of the tables. It grants the role in
``AFFIDAVIT_DATABASE_APP_ROLE`` what the service needs: to read and to insert, and to change or
delete rows in the few tables that are queues or counters. Append-only tables are recognised by the
trigger that makes them so; the role could not change their rows even without the trigger. It may
not create, truncate or alter anything. Earlier grants are revoked first. The database administrator
creates the role (``CREATE ROLE … LOGIN``), because its password must not be stored here.

``affidavit backup`` copies the embedded database while the service runs, by SQLite's online backup:
the copy is the state at one time. It is checked before it appears under its name, and is readable
only by its owner, because it contains plans. For PostgreSQL use ``pg_dump``.
"""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from importlib.resources import files
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.engine import make_url

from affidavit.service.core.database import (
    create_sqlite_file,
    is_missing_file,
    metadata,
    open_engine,
    writer,
)
from affidavit.service.core.errors import OperatorError, SettingsError
from affidavit.service.tables import certificates, identity, keys, ledger, log, policies, runs
from affidavit.trust import fsync_directory

TABLES = (certificates, identity, keys, ledger, log, policies, runs)
"""Every module with tables, imported so that ``metadata`` has them all."""

__all__ = ["metadata"]


class SchemaNotAtHead(OperatorError):
    """The database's schema is not at the revision of this release."""

    def __init__(self, revision: str | None, expected: str) -> None:
        self.revision = revision
        self.expected = expected
        where = f"at revision {revision}" if revision else "empty"
        super().__init__(
            f"the database's schema is {where}, and this release needs revision {expected}; "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        return "run: affidavit migrate"


class UnknownSchema(SchemaNotAtHead):
    """The database's schema has a revision that this release cannot upgrade."""

    def _remedy(self) -> str:
        return (
            "it cannot be upgraded from there. If a newer release made it, use that release. "
            f"If it was made before the first release (a revision below {self.expected}), keep a "
            "copy, set DATABASE_URL to an empty database, and run: affidavit migrate"
        )


@cache
def head() -> str:
    """Return the schema revision of this release.

    Raises ``RuntimeError`` if the installation has no revision.
    """
    if not _revisions():
        raise RuntimeError("affidavit.migrations has no revision; the installation is incomplete")
    return max(_revisions())


def revision_of(engine: Engine) -> str | None:
    """Return the schema revision of the database."""
    if is_missing_file(engine.url):
        return None
    with engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return revision


def require_head(engine: Engine) -> str:
    """Return the head's revision; raises ``SchemaNotAtHead`` if the database has another one."""
    revision, expected = revision_of(engine), head()
    if revision != expected:
        raise _not_at_head(revision)
    return expected


def upgrade(url: str) -> None:
    """Migrate the database at ``url`` to the head, in one transaction.

    Raises ``UnknownSchema`` if this release does not know the database's revision.
    """
    from alembic import command  # imports slowly, and only migrations need it
    from alembic.config import Config

    create_sqlite_file(url)
    engine = open_engine(url, bounded=False)
    try:
        revision = revision_of(engine)
        if revision is not None and revision not in _revisions():
            raise _not_at_head(revision)
        with writer(engine).connect() as connection:
            config = Config()
            config.set_main_option("script_location", "affidavit:migrations")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def _not_at_head(revision: str | None) -> SchemaNotAtHead:
    known = revision is None or revision in _revisions()
    return (SchemaNotAtHead if known else UnknownSchema)(revision, head())


@cache
def _revisions() -> frozenset[str]:
    """Return the revisions of this release, which begin the names of its migrations."""
    names = (file.name for file in files("affidavit.migrations.versions").iterdir())
    return frozenset(name[:4] for name in names if re.match(r"\d{4}_", name))


PAGES_PER_COPY = 4096
"""Pages copied at once, between which writers can proceed."""


def back_up(url: str, target: Path) -> int:
    """Copy the SQLite database at ``url`` to the new file ``target``; return its size in bytes.

    Raises ``SettingsError`` for a database of another kind, ``OperatorError`` and ``OSError``.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        raise SettingsError(
            "DATABASE_URL is PostgreSQL's: back it up with pg_dump --format=custom; "
            "see docs/how-to/backup-and-restore.md."
        )
    source = Path(str(parsed.database))
    if not source.exists():
        raise OperatorError(f"{source} does not exist; there is nothing to back up.")
    if target.exists():
        raise OperatorError(
            f"{target} already exists, and a backup never overwrites a file; choose another name."
        )
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    partial = Path(name)
    try:
        _copy(source, partial)
        os.fsync(descriptor)
        os.link(partial, target)  # fails if the file exists by now
        fsync_directory(target.parent)
    except sqlite3.DatabaseError as error:
        raise OperatorError(f"{source} cannot be copied: {error}.") from None
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)
    return target.stat().st_size


def _copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy, pages=PAGES_PER_COPY)
        # A copy in WAL mode would need further files.
        copy.execute("PRAGMA journal_mode=DELETE")
        result = copy.execute("PRAGMA integrity_check").fetchone()
        if result != ("ok",):
            raise sqlite3.DatabaseError(f"the copy is corrupt ({result[0]})")


VERSION_TABLE = "alembic_version"

_TABLES = text(
    """
    SELECT c.relname AS name,
           EXISTS (SELECT 1 FROM pg_trigger t
                   WHERE t.tgrelid = c.oid AND t.tgname = c.relname || '_refuse_change')
           AS append_only
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p')
    ORDER BY 1
    """
)
_ROLE = text(
    """
    SELECT r.rolsuper AS super, r.rolbypassrls AS everywhere,
           pg_has_role(r.oid, (SELECT oid FROM pg_roles WHERE rolname = current_user), 'MEMBER')
           AS owner
    FROM pg_roles r WHERE r.rolname = :role
    """
)


def grant_application(url: str, role: str) -> None:
    """Grant ``role`` exactly what the service needs in the database at ``url``.

    Raises ``SettingsError`` for a role with too many privileges.
    """
    engine = open_engine(url, bounded=False)
    try:
        if engine.dialect.name != "postgresql":
            raise SettingsError(
                "AFFIDAVIT_DATABASE_APP_ROLE is for PostgreSQL; an SQLite file has no roles."
            )
        with engine.begin() as connection:
            _require_unprivileged(connection, role)
            _grant(connection, role)
    finally:
        engine.dispose()


def _require_unprivileged(connection: Connection, role: str) -> None:
    row = connection.execute(_ROLE, {"role": role}).first()
    if row is None:
        problem = "does not exist; create it: CREATE ROLE … LOGIN PASSWORD …"
    elif row.super:
        problem = "is a superuser, which no trigger stops; use a role that is not"
    elif row.everywhere:
        problem = "bypasses row-level security, which keeps teams apart; use a role that does not"
    elif row.owner:
        problem = "owns the tables, or can act as their owner; use a role that does not"
    else:
        return
    raise SettingsError(f"AFFIDAVIT_DATABASE_APP_ROLE: the role {role[:63]!r} {problem}.")


def _grant(connection: Connection, role: str) -> None:
    quote = connection.dialect.identifier_preparer.quote_identifier
    schema = quote(str(connection.execute(text("SELECT current_schema()")).scalar_one()))
    grantee = quote(role)
    for kind in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        connection.exec_driver_sql(f"REVOKE ALL ON ALL {kind} IN SCHEMA {schema} FROM {grantee}")
    connection.exec_driver_sql(f"REVOKE ALL ON SCHEMA {schema} FROM {grantee}")
    # PostgreSQL before 15 lets everybody create tables here.
    connection.exec_driver_sql(f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC")
    connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {grantee}")
    connection.exec_driver_sql(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {grantee}")
    for table in connection.execute(_TABLES).all():
        allowed = _allowed(table.name, append_only=table.append_only)
        named = f"{schema}.{quote(table.name)}"
        connection.exec_driver_sql(f"GRANT {allowed} ON TABLE {named} TO {grantee}")


def _allowed(table: str, *, append_only: bool) -> str:
    if table == VERSION_TABLE:
        return "SELECT"
    return "SELECT, INSERT" if append_only else "SELECT, INSERT, UPDATE, DELETE"
