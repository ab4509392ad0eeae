"""Alembic's entry: run the migrations on the connection that the caller opened.

``affidavit.service.operation.database_admin`` puts an open connection into the configuration.
The whole upgrade is one transaction, on SQLite too, so that a migration that is killed half-way
leaves the schema where it was; and only one process migrates at a time, the others wait and
then find nothing left to do.
"""

from __future__ import annotations

from alembic import context
from alembic.operations import Operations
from sqlalchemy import Connection, text

from affidavit.migrations import schema
from affidavit.service import teams
from affidavit.service.operation.database_admin import metadata

MIGRATION_LOCK = 0x0AFF_1DA7
"""Names our advisory lock among all those of a PostgreSQL server."""


def run() -> None:
    """Bring the schema of ``config.attributes["connection"]`` to the wanted revision."""
    connection: Connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            # SQLite needs none: its transaction began by taking the write lock.
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


# Alembic loads this file under the name ``env_py``. Type checkers and doctest collection
# import it as a module of the package, where there is nothing to migrate.
if __name__ == "env_py":
    run()
