"""Alembic's entry: run the migrations on the connection that the caller opened.

``affidavit.service.operation.database_admin`` puts an open connection into the configuration.
The upgrade is one transaction, on SQLite too, so that a killed migration leaves the schema
unchanged. One process migrates at a time; the others wait, and then find nothing to do.
"""

from __future__ import annotations

from alembic import context
from alembic.operations import Operations
from sqlalchemy import Connection, text

from affidavit.migrations import schema
from affidavit.service.core import teams
from affidavit.service.operation.database_admin import metadata

MIGRATION_LOCK = 0x0AFF_1DA7
"""Id of the advisory lock in PostgreSQL."""


def run() -> None:
    """Migrate the schema of ``config.attributes["connection"]`` to the requested revision."""
    connection: Connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            # SQLite needs none, because its transaction holds the write lock.
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK}
            )
        migration = context.get_context()
        if migration.get_current_revision() is None:
            with Operations.context(migration):
                schema.create()
            migration.stamp(context.script, "head")
        else:
            context.run_migrations()
        if connection.dialect.name == "postgresql":
            teams.install(connection)


# Alembic loads this file as ``env_py``. Type checkers and doctests import it as a module of the
# package, and must not migrate.
if __name__ == "env_py":
    run()
